//! What a run's calls come to, told and booked as they are settled.

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::billing::{Books, Fact, facts};
use crate::budget::{Ledger, Usage};
use crate::journal::{Event, Feed, Kind};

/// The calls of one run, read from its audit log: what is not in there is not billed.
pub(super) struct Bill<'a> {
    books: &'a Books,
    feed: &'a Feed,
    log: PathBuf,
    reader: Option<facts::Reader>,
    /// Read, and not booked yet: whoever waits for that may be gone before.
    read: Vec<Fact>,
    /// The calls of which watchers have been told by an earlier process.
    told: HashSet<String>,
}

impl<'a> Bill<'a> {
    pub(super) fn new(books: &'a Books, feed: &'a Feed, log: &Path) -> Self {
        Self { books, feed, log: log.to_owned(), reader: None, read: vec![], told: HashSet::new() }
    }

    /// Where an earlier process has begun to tell, to those who count on being told once.
    pub(super) fn after(self, told: &[Event]) -> Self {
        let call = |event: &Event| {
            let told: Value = serde_json::from_str(&event.data).ok()?;
            Some(told.get("call_id")?.as_str()?.to_owned())
        };
        Self { told: told.iter().filter_map(call).collect(), ..self }
    }

    /// For as long as it is polled.
    pub(super) async fn follow(&mut self, ledger: Option<&Ledger>) -> Infallible {
        let Some(ledger) = ledger else { return pending().await };
        loop {
            ledger.closed().await;
            // Its record is on its way.
            tokio::time::sleep(FLUSH).await;
            self.take().await;
        }
    }

    /// Books what is new when the agent has ended. Its calls end with it; one that is drained for longer is told of later.
    pub(super) async fn take_last(&mut self, ledger: Option<&Ledger>) {
        let Some(ledger) = ledger else { return };
        if ledger.status().open_calls > 0 {
            let closed = async {
                while ledger.status().open_calls > 0 {
                    ledger.closed().await;
                }
                tokio::time::sleep(FLUSH).await;
            };
            let _ = tokio::time::timeout(LINGER, closed).await;
        }
        self.take().await;
    }

    /// Books what is new. What cannot be booked now is when the run has ended, or when it is recovered.
    pub(super) async fn take(&mut self) {
        if let Err(error) = self.try_take().await {
            tracing::error!(run = self.feed.run(), "cannot book the run's calls: {error:#}");
        }
    }

    async fn try_take(&mut self) -> anyhow::Result<()> {
        if self.reader.is_none() {
            self.reader = Some(facts::Reader::open(&self.log));
        }
        let Some(reader) = &mut self.reader else { return Ok(()) };
        self.read.extend(reader.read_new()?);
        if self.read.is_empty() {
            return Ok(());
        }
        self.books.record(&self.read).await?;
        for fact in self.read.drain(..).filter(|fact| !self.told.contains(&fact.call_id)) {
            self.feed.tell(Kind::UsageReport, &report(&fact));
        }
        Ok(())
    }
}

/// What a watcher is told of a call.
fn report(fact: &Fact) -> Value {
    let Usage { input, output, cache_read, cache_write, reasoning, .. } = fact.usage;
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
const FLUSH: Duration = Duration::from_millis(120);

/// An answer is not kept from its watchers for longer than this.
const LINGER: Duration = Duration::from_millis(500);
