//! Reports and records the usage of a run's calls as the gateway settles them.

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::llm::budget::{BudgetLedger, Nanodollars, TokenUsage};
use crate::service::billing::{BillingError, BillingStore, CallUsage, call_usage};
use crate::service::store::{EventFeed, RunEvent, RunEventKind};

/// A recorder of one run's calls, read from its audit log. A call that is not in the log is not billed.
pub(super) struct UsageRecorder {
    billing: BillingStore,
    feed: EventFeed,
    log: PathBuf,
    /// The reader at its current position. A task that is cancelled during a read drops the reader; the next read
    /// starts from the beginning of the log.
    reader: Option<call_usage::CallUsageReader>,
    /// The calls that were read and are not recorded yet. They survive a task that is cancelled during the recording.
    read: Vec<CallUsage>,
    /// The ids of the calls that watchers have received, from this process or an earlier one.
    reported: HashSet<String>,
}

impl UsageRecorder {
    pub(super) fn new(billing: BillingStore, feed: EventFeed, log: PathBuf) -> Self {
        Self { billing, feed, log, reader: None, read: vec![], reported: HashSet::new() }
    }

    /// Returns the feed of the run's watchers.
    pub(super) fn feed(&self) -> &EventFeed {
        &self.feed
    }

    /// Skips the reports of the calls that an earlier process has published, because clients count on one report per
    /// call.
    pub(super) fn skipping_reported(self, told: &[RunEvent]) -> Self {
        let call = |event: &RunEvent| {
            let told: Value = serde_json::from_str(&event.data).ok()?;
            Some(told.get("call_id")?.as_str()?.to_owned())
        };
        Self { reported: told.iter().filter_map(call).collect(), ..self }
    }

    /// Records new calls after each settlement, for as long as the future is polled.
    pub(super) async fn follow_log(&mut self, ledger: Option<&BudgetLedger>) -> Infallible {
        let Some(ledger) = ledger else { return pending().await };
        loop {
            ledger.wait_for_close().await;
            // The gateway's writer still has the call's record; the wait lets the record reach the file.
            tokio::time::sleep(LOG_FLUSH_WAIT).await;
            self.record_new().await;
        }
    }

    /// Records new calls when the agent has ended. Open calls end with the agent; a call that drains for longer is
    /// reported later.
    pub(super) async fn record_final(&mut self, ledger: Option<&BudgetLedger>) {
        let Some(ledger) = ledger else { return };
        if ledger.budget_status().open_calls > 0 {
            let closed = async {
                while ledger.budget_status().open_calls > 0 {
                    ledger.wait_for_close().await;
                }
                tokio::time::sleep(LOG_FLUSH_WAIT).await;
            };
            let _ = tokio::time::timeout(FINAL_FLUSH_WAIT, closed).await;
        }
        self.record_new().await;
    }

    /// Records new calls and logs a failure. Calls that cannot be recorded now are recorded before the run ends.
    pub(super) async fn record_new(&mut self) {
        if let Err(error) = self.try_record_new().await {
            let error = anyhow::Error::from(error);
            tracing::error!(
                run = self.feed.run_id(),
                "cannot record the run's calls in the billing store: {error:#}"
            );
        }
    }

    /// Records new calls and returns a failure, for callers that retry. If the log cannot be read, the calls before the
    /// unreadable part are recorded, because a retry would not help.
    ///
    /// # Errors
    /// Returns an error if the billing store cannot be written.
    pub(super) async fn try_record_new(&mut self) -> Result<(), BillingError> {
        if let Err(error) = self.read_new().await {
            tracing::error!(
                run = self.feed.run_id(),
                "cannot read the audit log of the run for billing: {error:#}"
            );
        }
        // Recording comes before publishing. A cancelled recording is repeated, and the billing store accepts a call
        // that it knows already.
        self.billing.record_calls(&self.read).await?;
        for fact in self.read.drain(..) {
            if self.reported.insert(fact.call_id.clone()) {
                self.feed.publish(RunEventKind::UsageReport, &usage_event(&fact));
            }
        }
        Ok(())
    }

    /// Returns the cost of the run's calls by its log, as far as the log was read. A call without a settlement counts
    /// as reserved. Returns `None` if the log cannot be read.
    pub(super) fn charged(&self) -> Option<Nanodollars> {
        self.reader.as_ref()?.charged()
    }

    async fn read_new(&mut self) -> anyhow::Result<()> {
        // The reader moves to the blocking thread and back. If this future is dropped in between, the reader stays
        // `None`, and the log is read again from its beginning.
        let reader = self.reader.take();
        let mut reader = reader.unwrap_or_else(|| call_usage::CallUsageReader::open(&self.log));
        let read = move || {
            let read = reader.read_new();
            (reader, read)
        };
        let (reader, read) = spawn_blocking(read).await?;
        self.reader = Some(reader);
        self.read.extend(read?.into_iter().filter(CallUsage::can_cost));
        Ok(())
    }
}

/// Returns the event data of a call for watchers.
fn usage_event(fact: &CallUsage) -> Value {
    let TokenUsage { input, output, cache_read, cache_write, reasoning, .. } = fact.usage;
    let (model, tool) =
        if fact.has_own_price() { (None, &fact.model) } else { (fact.model.as_ref(), &None) };
    json!({
        "call_id": fact.call_id,
        "model": model,
        "tool": tool,
        "outcome": fact.outcome,
        "status": fact.status,
        "input": input,
        "output": output,
        "cache_read": cache_read,
        "cache_write": cache_write,
        "reasoning": reasoning,
        "source": fact.usage.source,
        "cost_usd": fact.expected_cost().unwrap_or(fact.cost).to_string(),
    })
}

/// The time within which the audit log's writer has passed a record to the kernel.
const LOG_FLUSH_WAIT: Duration = Duration::from_millis(120);

/// The maximum time for which an answer waits for the records of open calls. Our choice.
const FINAL_FLUSH_WAIT: Duration = Duration::from_millis(500);
