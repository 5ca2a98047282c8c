//! The service's bookkeeper: looks for calls without a receipt, asks LiteLLM about them, and tells the metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::BillingStore;
use super::litellm::LitellmClient;
use super::reconcile::{ReconcileError, ReconcileReport};
use super::store::{BillingTotals, CallFilter, UnreceiptedCall};
use crate::telemetry::metrics::{BillingGauges, MetricsRegistry};

/// Looks after the books until it is stopped.
pub struct ReconcileTask {
    pub books: BillingStore,
    /// Where receipts come from that no callback has brought; without one, they are only missed.
    pub litellm: Option<LitellmClient>,
    pub metrics: Arc<MetricsRegistry>,
    pub every: Duration,
}

impl ReconcileTask {
    /// Goes on until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if stop.run_until_cancelled(Box::pin(self.run_once())).await.is_none() {
                return;
            }
        }
    }

    /// Looks once.
    pub async fn run_once(&self) {
        self.run_once_at(SystemTime::now()).await;
    }

    /// Looks at what is open at a given time.
    pub async fn run_once_at(&self, now: SystemTime) {
        match self.reconcile(now).await {
            Ok(()) => self.metrics.record_reconciliation(true),
            Err(error) => {
                self.metrics.record_reconciliation(false);
                tracing::warn!(error = %error_chain(&error), "the books could not be compared with LiteLLM's");
            }
        }
        match self.books.totals(now).await {
            Ok(totals) => self.metrics.set_billing_gauges(&billing_gauges(&totals)),
            Err(error) => tracing::error!(%error, "the books cannot be read"),
        }
    }

    /// Asks for what has no receipt, each call at its turn: the oldest by their ids, so that one that stays without costs no
    /// more than itself, and the rest by the time in which they began.
    async fn reconcile(&self, now: SystemTime) -> Result<(), ReconcileError> {
        let Some(client) = &self.litellm else { return Ok(()) };
        // What LiteLLM has not written down after so long it will not.
        let since = now.checked_sub(MAX_CALL_AGE).unwrap_or(SystemTime::UNIX_EPOCH);
        let open = self.books.calls_without_receipt(since, now).await?;
        let (few, many) = open.split_at(open.len().min(MAX_SINGLE_QUERIES));
        let left = if let Some(strange) = self.books.query_calls(client, few).await? {
            self.log_unknown_calls(few, &strange, now);
            many
        } else {
            &open
        };
        if let Some(filter) = filter_around(left) {
            log_report(&self.books.reconcile(client, &filter, now).await?);
        }
        if !open.is_empty() {
            self.books.mark_queried(&open, now).await?;
        }
        Ok(())
    }

    /// What came of asking for single calls.
    fn log_unknown_calls(
        &self,
        asked: &[UnreceiptedCall],
        strange: &[UnreceiptedCall],
        now: SystemTime,
    ) {
        let is_overdue = |call: &&UnreceiptedCall| call.settled + self.books.receipt_bound() < now;
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

/// The time in which calls began.
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
        tracing::debug!(matched, receipts_written, pending, "the books agree with LiteLLM's");
    } else {
        let conflicting = report.conflicting.len();
        tracing::warn!(
            matched,
            receipts_written,
            pending,
            missing,
            unknown,
            conflicting,
            "the books do not agree with LiteLLM's; `cogni-gateway billing reconcile` says how"
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

/// Of one look: calls that are asked for one by one.
const MAX_SINGLE_QUERIES: usize = 20;

/// A call that ended longer ago is not asked for.
const MAX_CALL_AGE: Duration = Duration::from_hours(48);
