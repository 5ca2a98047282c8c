//! The events of a run that is not over: one writes, any number watch.
//!
//! **Invariant:** a run has no more than [`MAX_EVENTS`] events and [`MAX_DETAIL_BYTES`] of details here. What is left out is
//! the detail that comes after; how the run ends is always told.
//!
//! **Invariant:** no two events of a run have one number, also where the first was told, lost with its process, and the
//! second told by another: each process [begins](next_sequence_base) with numbers that no earlier one can have used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;

use super::event::{RunEvent, RunEventKind};

/// A handle to the events of one run.
#[derive(Clone, Debug)]
pub struct EventFeed(Arc<EventFeedShared>);

#[derive(Debug)]
struct EventFeedShared {
    run: String,
    /// The last event before those in memory.
    first: u64,
    told: Mutex<FeedState>,
    /// What was told last, and whether that was all.
    changed: watch::Sender<(u64, bool)>,
}

#[derive(Debug, Default)]
struct FeedState {
    events: Vec<RunEvent>,
    /// Of `events`, those in the file.
    saved: usize,
    bytes: usize,
    dropped: u64,
}

impl EventFeed {
    pub(crate) fn new(run: &str, first: u64) -> Self {
        let changed = watch::Sender::new((first, false));
        Self(Arc::new(EventFeedShared {
            run: run.to_owned(),
            first,
            told: Mutex::default(),
            changed,
        }))
    }

    pub fn run_id(&self) -> &str {
        &self.0.run
    }

    /// Tells the watchers, if there is room for it.
    pub fn publish(&self, kind: RunEventKind, data: &Value) {
        let mut told = self.lock_state();
        let seq = self.0.first + told.events.len() as u64 + 1;
        let event = RunEvent::created_now(seq, kind, data);
        if kind.is_droppable() {
            if told.events.len() >= MAX_EVENTS || told.bytes + event.data.len() > MAX_DETAIL_BYTES {
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
    pub fn has_published(&self, kind: RunEventKind) -> bool {
        self.lock_state().events.iter().rev().any(|event| event.kind == kind)
    }

    /// Counts a detail that was not even read.
    pub fn count_dropped(&self) {
        self.lock_state().dropped += 1;
    }

    /// How many details were left out.
    pub fn dropped_count(&self) -> u64 {
        self.lock_state().dropped
    }

    pub(super) fn first_sequence(&self) -> u64 {
        self.0.first
    }

    /// The events that `words` will be, once they are in the file. Nothing else is told meanwhile.
    pub(super) fn prepare_final(&self, words: &[(RunEventKind, Value)]) -> Vec<RunEvent> {
        let next = self.0.first + self.lock_state().events.len() as u64 + 1;
        let numbered = (next..).zip(words);
        numbered.map(|(seq, (kind, data))| RunEvent::created_now(seq, *kind, data)).collect()
    }

    /// Tells the last events, which are in the file as all others are.
    pub(super) fn close(&self, last: Vec<RunEvent>) {
        let mut told = self.lock_state();
        told.events.extend(last);
        told.saved = told.events.len();
        let last = self.0.first + told.saved as u64;
        drop(told);
        self.0.changed.send_modify(|changed| *changed = (last, true));
    }

    /// Some events after one, as soon as there are any; none after the last.
    pub(super) async fn next_page(&self, after: u64) -> Option<Vec<RunEvent>> {
        let mut changed = self.0.changed.subscribe();
        let news = changed.wait_for(|(last, is_over)| *last > after || *is_over).await;
        let (last, _) = *news.ok()?;
        if last <= after {
            return None;
        }
        let skip = usize::try_from(after - self.0.first).unwrap_or(usize::MAX);
        Some(self.lock_state().events.iter().skip(skip).take(PAGE_SIZE as usize).cloned().collect())
    }

    /// Returns when there is something to save, or false when there never will be.
    pub(super) async fn wait_for_unsaved(&self) -> bool {
        let mut changed = self.0.changed.subscribe();
        let has_news = |(last, is_over): &(u64, bool)| *last > self.last_saved() || *is_over;
        changed.wait_for(has_news).await.is_ok_and(|news| !news.1)
    }

    /// Returns when nothing more is told.
    pub(super) async fn wait_closed(&self) {
        let mut changed = self.0.changed.subscribe();
        let _ = changed.wait_for(|(_, is_over)| *is_over).await;
    }

    pub(super) fn unsaved_events(&self) -> Vec<RunEvent> {
        let told = self.lock_state();
        told.events[told.saved..].to_vec()
    }

    /// Events up to `last` are in the file.
    pub(super) fn mark_saved(&self, last: Option<u64>) {
        let Some(last) = last else { return };
        let mut told = self.lock_state();
        let count = usize::try_from(last - self.0.first).unwrap_or(usize::MAX);
        told.saved = told.saved.max(count);
    }

    fn last_saved(&self) -> u64 {
        self.0.first + self.lock_state().saved as u64
    }

    fn lock_state(&self) -> MutexGuard<'_, FeedState> {
        self.0.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the numbers of a process begin that takes up a run of which `last` is in the file. Its watchers may have been
/// told more than that, and come back with a number that was never written down.
pub(super) fn next_sequence_base(last: u64) -> u64 {
    (last / SEQUENCE_GAP + 1) * SEQUENCE_GAP
}

/// Of one run. An answer of a million words has fewer.
pub const MAX_EVENTS: usize = 20_000;

/// What one process has to number a run's events with: more than a run can have.
const SEQUENCE_GAP: u64 = 100_000;

/// Of one run's details: as much as a run's output is kept by default.
pub const MAX_DETAIL_BYTES: usize = 1 << 20;

/// Events that a watcher is given at once.
pub(super) const PAGE_SIZE: u32 = 256;

/// Events are gathered for so long before they are written together.
pub(super) const BATCH_INTERVAL: Duration = Duration::from_millis(50);

/// How long they are gathered at most, where they cannot be written.
pub(super) const MAX_BATCH_INTERVAL: Duration = Duration::from_secs(30);
