//! The events of a run that is not over: one writes, any number watch.
//!
//! **Invariant:** a run has no more than [`MAX_EVENTS`] events and [`MAX_BYTES`] of details here. What is left out is
//! the detail that comes after; how the run ends is always told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use tokio::sync::watch;

use super::event::{Event, Kind};
use super::millis;

/// A handle to the events of one run.
#[derive(Clone, Debug)]
pub struct Feed(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    run: String,
    /// The last event before those in memory.
    first: u64,
    told: Mutex<Told>,
    /// What was told last, and whether that was all.
    changed: watch::Sender<(u64, bool)>,
}

#[derive(Debug, Default)]
struct Told {
    events: Vec<Event>,
    /// Of `events`, those in the file.
    saved: usize,
    bytes: usize,
    dropped: u64,
}

impl Feed {
    pub(super) fn new(run: &str, first: u64) -> Self {
        let changed = watch::Sender::new((first, false));
        Self(Arc::new(Shared { run: run.to_owned(), first, told: Mutex::default(), changed }))
    }

    pub fn run(&self) -> &str {
        &self.0.run
    }

    /// Tells the watchers, if there is room for it.
    pub fn tell(&self, kind: Kind, data: &Value) {
        let data: Arc<str> = data.to_string().into();
        let at_ms = millis(SystemTime::now());
        let mut told = self.told();
        if kind.is_detail() {
            if told.events.len() >= MAX_EVENTS || told.bytes + data.len() > MAX_BYTES {
                told.dropped += 1;
                return;
            }
            told.bytes += data.len();
        }
        let seq = self.0.first + told.events.len() as u64 + 1;
        told.events.push(Event { seq, at_ms, kind, data });
        drop(told);
        self.0.changed.send_modify(|(last, _)| *last = seq);
    }

    /// How many details were left out.
    pub fn dropped(&self) -> u64 {
        self.told().dropped
    }

    pub(super) fn first(&self) -> u64 {
        self.0.first
    }

    /// Nothing will be told any more.
    pub(super) fn close(&self) {
        self.0.changed.send_modify(|(_, is_over)| *is_over = true);
    }

    /// Some events after one, as soon as there are any; none after the last.
    pub(super) async fn page(&self, after: u64) -> Option<Vec<Event>> {
        let mut changed = self.0.changed.subscribe();
        let news = changed.wait_for(|(last, is_over)| *last > after || *is_over).await;
        let (last, _) = *news.ok()?;
        if last <= after {
            return None;
        }
        let skip = usize::try_from(after - self.0.first).unwrap_or(usize::MAX);
        Some(self.told().events.iter().skip(skip).take(PAGE as usize).cloned().collect())
    }

    /// Returns when there is something to save, or false when there never will be.
    pub(super) async fn has_unsaved(&self) -> bool {
        let mut changed = self.0.changed.subscribe();
        let has_news = |(last, is_over): &(u64, bool)| *last > self.last_saved() || *is_over;
        changed.wait_for(has_news).await.is_ok_and(|news| !news.1)
    }

    pub(super) fn unsaved(&self) -> Vec<Event> {
        let told = self.told();
        told.events[told.saved..].to_vec()
    }

    /// Events up to `last` are in the file.
    pub(super) fn saved(&self, last: Option<u64>) {
        let Some(last) = last else { return };
        let mut told = self.told();
        let count = usize::try_from(last - self.0.first).unwrap_or(usize::MAX);
        told.saved = told.saved.max(count);
    }

    fn last_saved(&self) -> u64 {
        self.0.first + self.told().saved as u64
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of one run. An answer of a million words has fewer.
pub const MAX_EVENTS: usize = 20_000;

/// Of one run's details: as much as a run's output is kept by default.
pub const MAX_BYTES: usize = 1 << 20;

/// Events that a watcher is given at once.
pub(super) const PAGE: u32 = 256;

/// Events are gathered for so long before they are written together.
pub(super) const GATHER: Duration = Duration::from_millis(50);
