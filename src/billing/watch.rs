//! The service's bookkeeper: looks for calls without a receipt, asks LiteLLM about them, and tells the metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::Books;
use super::books::{Filter, Totals};
use super::litellm::Client;
use super::reconcile::{Error, Report};
use crate::observe::metrics::{Billed, Metrics};

/// Looks after the books until it is stopped.
pub struct Watch {
    pub books: Books,
    /// Where receipts come from that no callback has brought; without one, they are only missed.
    pub litellm: Option<Client>,
    pub metrics: Arc<Metrics>,
    pub every: Duration,
}

impl Watch {
    /// Goes on until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if stop.run_until_cancelled(self.look()).await.is_none() {
                return;
            }
        }
    }

    /// Looks once.
    pub async fn look(&self) {
        match self.reconcile(SystemTime::now()).await {
            Ok(report) => {
                self.metrics.reconciled(true);
                if let Some(report) = report {
                    tell(&report);
                }
            }
            Err(error) => {
                self.metrics.reconciled(false);
                tracing::warn!(error = %chain(&error), "the books could not be compared with LiteLLM's");
            }
        }
        match self.books.totals(SystemTime::now()).await {
            Ok(totals) => self.metrics.billed(&billed(&totals)),
            Err(error) => tracing::error!(%error, "the books cannot be read"),
        }
    }

    /// From the oldest call without a receipt on; where there is none, there is nothing to ask.
    async fn reconcile(&self, now: SystemTime) -> Result<Option<Report>, Error> {
        let Some(client) = &self.litellm else { return Ok(None) };
        let Some(oldest) = self.books.oldest_unreceipted().await? else { return Ok(None) };
        // What LiteLLM has not written down after so long it will not.
        let since = oldest.max(now.checked_sub(LONGEST).unwrap_or(oldest));
        let filter = Filter { since, until: now, account: None, run: None };
        self.books.reconcile(client, &filter, now).await.map(Some)
    }
}

fn billed(totals: &Totals) -> Billed {
    Billed {
        unreceipted_calls: totals.unreceipted_calls,
        unreceipted_runs: totals.unreceipted_runs,
        pending: totals.pending_calls,
        unpriced: totals.unpriced_calls,
        conflicting: totals.conflicting_calls,
    }
}

fn tell(report: &Report) {
    let Report { matched, receipts_written, pending, .. } = report;
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

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// How far back is asked for, however old the oldest call is.
const LONGEST: Duration = Duration::from_hours(48);
