//! What a run's calls come to, told and booked as they are settled.

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

/// The calls of one run, read from its audit log: what is not in there is not billed.
pub(super) struct UsageRecorder {
    books: BillingStore,
    feed: EventFeed,
    log: PathBuf,
    /// How far it has come. Whoever waits for it to read may be gone before; then it begins anew.
    reader: Option<call_usage::CallUsageReader>,
    /// Read, and not booked yet: whoever waits for that may be gone before, too.
    read: Vec<CallUsage>,
    /// The calls of which watchers have been told, by this process or an earlier one.
    told: HashSet<String>,
}

impl UsageRecorder {
    pub(super) fn new(books: BillingStore, feed: EventFeed, log: PathBuf) -> Self {
        Self { books, feed, log, reader: None, read: vec![], told: HashSet::new() }
    }

    /// Those who are told.
    pub(super) fn feed(&self) -> &EventFeed {
        &self.feed
    }

    /// Where an earlier process has begun to tell, to those who count on being told once.
    pub(super) fn skipping_reported(self, told: &[RunEvent]) -> Self {
        let call = |event: &RunEvent| {
            let told: Value = serde_json::from_str(&event.data).ok()?;
            Some(told.get("call_id")?.as_str()?.to_owned())
        };
        Self { told: told.iter().filter_map(call).collect(), ..self }
    }

    /// For as long as it is polled.
    pub(super) async fn follow_log(&mut self, ledger: Option<&BudgetLedger>) -> Infallible {
        let Some(ledger) = ledger else { return pending().await };
        loop {
            ledger.wait_for_close().await;
            // Its record is on its way.
            tokio::time::sleep(LOG_FLUSH_WAIT).await;
            self.record_new().await;
        }
    }

    /// Books what is new when the agent has ended. Its calls end with it; one that is drained for longer is told of later.
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

    /// Books what is new. What cannot be booked now is before the run ends.
    pub(super) async fn record_new(&mut self) {
        if let Err(error) = self.try_record_new().await {
            let error = anyhow::Error::from(error);
            tracing::error!(run = self.feed.run_id(), "cannot book the run's calls: {error:#}");
        }
    }

    /// The same, for whoever tries again. Of a log that cannot be read there is nothing to wait for: what stands in it
    /// before is booked.
    ///
    /// # Errors
    /// The books cannot be written.
    pub(super) async fn try_record_new(&mut self) -> Result<(), BillingError> {
        if let Err(error) = self.read_new().await {
            tracing::error!(run = self.feed.run_id(), "cannot read the run's calls: {error:#}");
        }
        self.books.record_calls(&self.read).await?;
        for fact in self.read.drain(..) {
            if self.told.insert(fact.call_id.clone()) {
                self.feed.publish(RunEventKind::UsageReport, &usage_event(&fact));
            }
        }
        Ok(())
    }

    /// Returns what the run's calls have cost by its log, as far as that was read; those without a settlement count as
    /// reserved. `None` of a log that cannot be read.
    pub(super) fn charged(&self) -> Option<Nanodollars> {
        self.reader.as_ref()?.charged()
    }

    async fn read_new(&mut self) -> anyhow::Result<()> {
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

/// What a watcher is told of a call.
fn usage_event(fact: &CallUsage) -> Value {
    let TokenUsage { input, output, cache_read, cache_write, reasoning, .. } = fact.usage;
    json!({
        "call_id": fact.call_id,
        "model": fact.model,
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

/// The audit log reaches the kernel within this.
const LOG_FLUSH_WAIT: Duration = Duration::from_millis(120);

/// An answer is not kept from its watchers for longer than this.
const FINAL_FLUSH_WAIT: Duration = Duration::from_millis(500);
