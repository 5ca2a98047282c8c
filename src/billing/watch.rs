//! The service's bookkeeper: looks for calls without a receipt, asks LiteLLM about them, and tells the metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::Books;
use super::books::{Filter, Open, Totals};
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
            if stop.run_until_cancelled(Box::pin(self.look())).await.is_none() {
                return;
            }
        }
    }

    /// Looks once.
    pub async fn look(&self) {
        self.look_at(SystemTime::now()).await;
    }

    /// Looks at what is open at a given time.
    pub async fn look_at(&self, now: SystemTime) {
        match self.reconcile(now).await {
            Ok(()) => self.metrics.reconciled(true),
            Err(error) => {
                self.metrics.reconciled(false);
                tracing::warn!(error = %chain(&error), "the books could not be compared with LiteLLM's");
            }
        }
        match self.books.totals(now).await {
            Ok(totals) => self.metrics.billed(&billed(&totals)),
            Err(error) => tracing::error!(%error, "the books cannot be read"),
        }
    }

    /// Asks for what has no receipt, each call at its turn: the oldest by their ids, so that one that stays without costs no
    /// more than itself, and the rest by the time in which they began.
    async fn reconcile(&self, now: SystemTime) -> Result<(), Error> {
        let Some(client) = &self.litellm else { return Ok(()) };
        // What LiteLLM has not written down after so long it will not.
        let since = now.checked_sub(LONGEST).unwrap_or(SystemTime::UNIX_EPOCH);
        let open = self.books.unreceipted(since, now).await?;
        let (few, many) = open.split_at(open.len().min(FEW));
        let left = if let Some(strange) = self.books.ask(client, few).await? {
            self.tell_of(few, &strange, now);
            many
        } else {
            &open
        };
        if let Some(filter) = around(left) {
            tell(&self.books.reconcile(client, &filter, now).await?);
        }
        if !open.is_empty() {
            self.books.asked(&open, now).await?;
        }
        Ok(())
    }

    /// What came of asking for single calls.
    fn tell_of(&self, asked: &[Open], strange: &[Open], now: SystemTime) {
        let is_overdue = |call: &&Open| call.settled + self.books.bound() < now;
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
fn around(calls: &[Open]) -> Option<Filter> {
    let since = calls.iter().map(|call| call.started).min()?;
    let last = calls.iter().map(|call| call.started).max()?;
    Some(Filter { since, until: last + Duration::from_millis(1), account: None, run: None })
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

/// Of one look: calls that are asked for one by one.
const FEW: usize = 20;

/// A call that ended longer ago is not asked for.
const LONGEST: Duration = Duration::from_hours(48);
