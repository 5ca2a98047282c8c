//! What a run's calls come to, told and booked as they are settled.

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::billing::{Books, Error, Fact, facts};
use crate::budget::{Ledger, Nanodollars, Usage};
use crate::journal::{Event, Feed, Kind};

/// The calls of one run, read from its audit log: what is not in there is not billed.
pub(super) struct Bill {
    books: Books,
    feed: Feed,
    log: PathBuf,
    /// How far it has come. Whoever waits for it to read may be gone before; then it begins anew.
    reader: Option<facts::Reader>,
    /// Read, and not booked yet: whoever waits for that may be gone before, too.
    read: Vec<Fact>,
    /// The calls of which watchers have been told, by this process or an earlier one.
    told: HashSet<String>,
}

impl Bill {
    pub(super) fn new(books: Books, feed: Feed, log: PathBuf) -> Self {
        Self { books, feed, log, reader: None, read: vec![], told: HashSet::new() }
    }

    /// Those who are told.
    pub(super) fn feed(&self) -> &Feed {
        &self.feed
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

    /// Books what is new. What cannot be booked now is before the run ends.
    pub(super) async fn take(&mut self) {
        if let Err(error) = self.try_take().await {
            let error = anyhow::Error::from(error);
            tracing::error!(run = self.feed.run(), "cannot book the run's calls: {error:#}");
        }
    }

    /// The same, for whoever tries again. Of a log that cannot be read there is nothing to wait for: what stands in it
    /// before is booked.
    ///
    /// # Errors
    /// The books cannot be written.
    pub(super) async fn try_take(&mut self) -> Result<(), Error> {
        if let Err(error) = self.read_new().await {
            tracing::error!(run = self.feed.run(), "cannot read the run's calls: {error:#}");
        }
        self.books.record(&self.read).await?;
        for fact in self.read.drain(..) {
            if self.told.insert(fact.call_id.clone()) {
                self.feed.tell(Kind::UsageReport, &report(&fact));
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
        let mut reader = reader.unwrap_or_else(|| facts::Reader::open(&self.log));
        let read = move || {
            let read = reader.read_new();
            (reader, read)
        };
        let (reader, read) = spawn_blocking(read).await?;
        self.reader = Some(reader);
        self.read.extend(read?.into_iter().filter(Fact::can_cost));
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
