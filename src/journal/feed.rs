//! The events of a run that is not over: one writes, any number watch.
//!
//! **Invariant:** a run has no more than [`MAX_EVENTS`] events and [`MAX_BYTES`] of details here. What is left out is
//! the detail that comes after; how the run ends is always told.
//!
//! **Invariant:** no two events of a run have one number, also where the first was told, lost with its process, and the
//! second told by another: each process [begins](begin_after) with numbers that no earlier one can have used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;

use super::event::{Event, Kind};

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
    pub(crate) fn new(run: &str, first: u64) -> Self {
        let changed = watch::Sender::new((first, false));
        Self(Arc::new(Shared { run: run.to_owned(), first, told: Mutex::default(), changed }))
    }

    pub fn run(&self) -> &str {
        &self.0.run
    }

    /// Tells the watchers, if there is room for it.
    pub fn tell(&self, kind: Kind, data: &Value) {
        let mut told = self.told();
        let seq = self.0.first + told.events.len() as u64 + 1;
        let event = Event::now(seq, kind, data);
        if kind.is_detail() {
            if told.events.len() >= MAX_EVENTS || told.bytes + event.data.len() > MAX_BYTES {
                told.dropped += 1;
                return;
            }
            told.bytes += event.data.len();
        }
        told.events.push(event);
        drop(told);
        self.0.changed.send_modify(|(last, _)| *last = seq);
    }

    /// Whether something of this kind was told, since this process has had the run.
    pub fn has_told(&self, kind: Kind) -> bool {
        self.told().events.iter().rev().any(|event| event.kind == kind)
    }

    /// Counts a detail that was not even read.
    pub fn leave_out(&self) {
        self.told().dropped += 1;
    }

    /// How many details were left out.
    pub fn dropped(&self) -> u64 {
        self.told().dropped
    }

    pub(super) fn first(&self) -> u64 {
        self.0.first
    }

    /// The events that `words` will be, once they are in the file. Nothing else is told meanwhile.
    pub(super) fn last(&self, words: &[(Kind, Value)]) -> Vec<Event> {
        let next = self.0.first + self.told().events.len() as u64 + 1;
        let numbered = (next..).zip(words);
        numbered.map(|(seq, (kind, data))| Event::now(seq, *kind, data)).collect()
    }

    /// Tells the last events, which are in the file as all others are.
    pub(super) fn end(&self, last: Vec<Event>) {
        let mut told = self.told();
        told.events.extend(last);
        told.saved = told.events.len();
        let last = self.0.first + told.saved as u64;
        drop(told);
        self.0.changed.send_modify(|changed| *changed = (last, true));
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

    /// Returns when nothing more is told.
    pub(super) async fn over(&self) {
        let mut changed = self.0.changed.subscribe();
        let _ = changed.wait_for(|(_, is_over)| *is_over).await;
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

/// Where the numbers of a process begin that takes up a run of which `last` is in the file. Its watchers may have been
/// told more than that, and come back with a number that was never written down.
pub(super) fn begin_after(last: u64) -> u64 {
    (last / NUMBERS + 1) * NUMBERS
}

/// Of one run. An answer of a million words has fewer.
pub const MAX_EVENTS: usize = 20_000;

/// What one process has to number a run's events with: more than a run can have.
const NUMBERS: u64 = 100_000;

/// Of one run's details: as much as a run's output is kept by default.
pub const MAX_BYTES: usize = 1 << 20;

/// Events that a watcher is given at once.
pub(super) const PAGE: u32 = 256;

/// Events are gathered for so long before they are written together.
pub(super) const GATHER: Duration = Duration::from_millis(50);

/// How long they are gathered at most, where they cannot be written.
pub(super) const LONGEST: Duration = Duration::from_secs(30);
