//! The periodic reconciliation: finds calls without a receipt, asks LiteLLM about them, and updates the metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::BillingStore;
use super::litellm::LitellmClient;
use super::reconcile::{ReconcileError, ReconcileReport};
use super::store::{BillingTotals, CallFilter, UnreceiptedCall};
use crate::telemetry::metrics::{BillingGauges, MetricsRegistry};

/// A task that reconciles the billing store periodically.
pub struct ReconcileTask {
    pub billing: BillingStore,
    /// The LiteLLM that has the receipts which no callback delivered. `None` means that missing receipts are only
    /// counted.
    pub litellm: Option<LitellmClient>,
    pub metrics: Arc<MetricsRegistry>,
    pub every: Duration,
}

impl ReconcileTask {
    /// Runs the reconciliation at each interval, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.every);
        // A slow reconciliation delays the next one, instead of causing a burst of requests to LiteLLM.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if stop.run_until_cancelled(Box::pin(self.run_once())).await.is_none() {
                return;
            }
        }
    }

    /// Runs one reconciliation now.
    pub async fn run_once(&self) {
        self.run_once_at(SystemTime::now()).await;
    }

    /// Runs one reconciliation as of a given time.
    pub async fn run_once_at(&self, now: SystemTime) {
        match self.reconcile(now).await {
            Ok(()) => self.metrics.record_reconciliation(true),
            Err(error) => {
                self.metrics.record_reconciliation(false);
                tracing::warn!(error = %error_chain(&error), "the billing records could not be compared with LiteLLM's");
            }
        }
        // The gauges are set even after a failure, because the numbers of open calls come from our own billing store.
        match self.billing.totals(now).await {
            Ok(totals) => self.metrics.set_billing_gauges(&billing_gauges(&totals)),
            Err(error) => tracing::error!(%error, "cannot read the sums of the billing records"),
        }
    }

    /// Asks LiteLLM for the calls that have no receipt and whose next query is due. The oldest calls are queried by id,
    /// so that a call that stays without a receipt costs only its own query. The others are queried by the time in
    /// which they began.
    async fn reconcile(&self, now: SystemTime) -> Result<(), ReconcileError> {
        let Some(client) = &self.litellm else { return Ok(()) };
        // LiteLLM writes its rows within a minute. A row that is missing after two days never comes.
        let since = now.checked_sub(MAX_CALL_AGE).unwrap_or(SystemTime::UNIX_EPOCH);
        let open = self.billing.calls_without_receipt(since, now).await?;
        // 1. Query the oldest calls by id.
        let (few, many) = open.split_at(open.len().min(MAX_SINGLE_QUERIES));
        // 2. If LiteLLM cannot filter by id, all calls are left for the window.
        let left = if let Some(strange) = self.billing.query_calls(client, few).await? {
            self.log_unknown_calls(few, &strange, now);
            many
        } else {
            &open
        };
        // 3. One window covers the other calls.
        if let Some(filter) = filter_around(left) {
            log_report(&self.billing.reconcile(client, &filter, now).await?);
        }
        // Reschedule all calls that were queried; those with a receipt by now are unaffected.
        if !open.is_empty() {
            self.billing.mark_queried(&open, now).await?;
        }
        Ok(())
    }

    /// Logs the result of querying single calls.
    fn log_unknown_calls(
        &self,
        asked: &[UnreceiptedCall],
        strange: &[UnreceiptedCall],
        now: SystemTime,
    ) {
        let is_overdue =
            |call: &&UnreceiptedCall| call.settled + self.billing.receipt_bound() < now;
        let (asked, missing) = (asked.len(), strange.iter().filter(is_overdue).count());
        if missing > 0 {
            tracing::warn!(
                asked,
                missing,
                "LiteLLM does not know calls that it should have charged by now"
            );
        } else if asked > 0 {
            tracing::debug!(
                asked,
                pending = strange.len(),
                "asked LiteLLM for calls without a receipt"
            );
        }
    }
}

/// Returns a filter for the time in which calls began, or `None` for no calls.
fn filter_around(calls: &[UnreceiptedCall]) -> Option<CallFilter> {
    let since = calls.iter().map(|call| call.started).min()?;
    let last = calls.iter().map(|call| call.started).max()?;
    Some(CallFilter { since, until: last + Duration::from_millis(1), account: None, run: None })
}

fn billing_gauges(totals: &BillingTotals) -> BillingGauges {
    BillingGauges {
        unreceipted_calls: totals.unreceipted_calls,
        unreceipted_runs: totals.unreceipted_runs,
        pending: totals.pending_calls,
        unpriced: totals.unpriced_calls,
        conflicting: totals.conflicting_calls,
    }
}

fn log_report(report: &ReconcileReport) {
    let ReconcileReport { matched, receipts_written, pending, .. } = report;
    let (missing, unknown) = (report.missing.len(), report.unknown.len());
    if report.is_clean() {
        tracing::debug!(
            matched,
            receipts_written,
            pending,
            "the billing records agree with LiteLLM's"
        );
    } else {
        let conflicting = report.conflicting.len();
        tracing::warn!(
            matched,
            receipts_written,
            pending,
            missing,
            unknown,
            conflicting,
            "the billing records differ from LiteLLM's; `cogni-gateway billing reconcile` lists the differences"
        );
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The maximum number of calls that one reconciliation queries by id. Our choice.
const MAX_SINGLE_QUERIES: usize = 20;

/// The age from which a call without a receipt is not queried any more. Our choice.
const MAX_CALL_AGE: Duration = Duration::from_hours(48);
