//! The events of an unfinished run in memory, with one writer and any number of watchers.
//!
//! **Invariant:** a run has at most [`MAX_EVENTS`] events and [`MAX_DETAIL_BYTES`] of details here. The feed drops the
//! details that come after; the events of the run's end are always published.
//!
//! **Invariant:** no two events of a run have the same number, even if the first event was lost with its process and
//! another process published the second. Each process [begins](next_sequence_base) with numbers that no earlier process
//! can have used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;

use super::RunStore;
use super::event::{RunEvent, RunEventKind};

/// A handle to the events of one run.
#[derive(Clone, Debug)]
pub struct EventFeed(Arc<EventFeedShared>);

#[derive(Debug)]
struct EventFeedShared {
    run: String,
    /// The number of the last event before the events in memory.
    first: u64,
    state: Mutex<FeedState>,
    /// The number of the last published event, and true once the feed is closed.
    changed: watch::Sender<(u64, bool)>,
}

#[derive(Debug, Default)]
struct FeedState {
    events: Vec<RunEvent>,
    /// The number of leading entries of `events` that are in the database.
    saved: usize,
    bytes: usize,
    dropped: u64,
}

impl RunStore {
    /// Publishes an event of a run, if the run has not ended.
    pub fn publish_event(&self, run: &str, kind: RunEventKind, data: &Value) {
        let feed = self.lock_live().get(run).cloned();
        if let Some(feed) = feed {
            feed.publish(kind, data);
        }
    }
}

impl EventFeed {
    pub(crate) fn new(run: &str, first: u64) -> Self {
        let changed = watch::Sender::new((first, false));
        Self(Arc::new(EventFeedShared {
            run: run.to_owned(),
            first,
            state: Mutex::default(),
            changed,
        }))
    }

    pub fn run_id(&self) -> &str {
        &self.0.run
    }

    /// Publishes an event to the watchers. A detail above the run's bounds is dropped and counted.
    pub fn publish(&self, kind: RunEventKind, data: &Value) {
        let mut told = self.lock_state();
        // The number comes from the length under the lock, so numbers are dense and published in order.
        let seq = self.0.first + told.events.len() as u64 + 1;
        let event = RunEvent::created_now(seq, kind, data);
        if kind.is_droppable() {
            // Only details are bounded. The events that every client needs are few and always pass.
            if told.events.len() >= MAX_EVENTS || told.bytes + event.data.len() > MAX_DETAIL_BYTES {
                told.dropped += 1;
                return;
            }
            told.bytes += event.data.len();
        }
        told.events.push(event);
        // The lock is released before the notification, so that a woken watcher does not wait for the lock.
        drop(told);
        self.0.changed.send_modify(|(last, _)| *last = seq);
    }

    /// Returns true if this process has published an event of this kind for the run.
    pub fn has_published(&self, kind: RunEventKind) -> bool {
        self.lock_state().events.iter().rev().any(|event| event.kind == kind)
    }

    /// Counts a detail that the parser dropped without reading.
    pub fn count_dropped(&self) {
        self.lock_state().dropped += 1;
    }

    /// Returns the number of dropped details.
    pub fn dropped_count(&self) -> u64 {
        self.lock_state().dropped
    }

    pub(super) fn first_sequence(&self) -> u64 {
        self.0.first
    }

    /// Returns the run's last events with their numbers, for writing them to the database. The caller publishes nothing
    /// between this call and [`close`](Self::close).
    pub(super) fn prepare_final(&self, words: &[(RunEventKind, Value)]) -> Vec<RunEvent> {
        // The numbers are fixed now and must still be free at `close`, hence the rule above.
        let next = self.0.first + self.lock_state().events.len() as u64 + 1;
        let numbered = (next..).zip(words);
        numbered.map(|(seq, (kind, data))| RunEvent::created_now(seq, *kind, data)).collect()
    }

    /// Publishes the last events and closes the feed. All events are in the database at that time.
    pub(super) fn close(&self, last: Vec<RunEvent>) {
        let mut told = self.lock_state();
        // `finish_run` has stored all events of the feed, so `persist_events` must write none of them again.
        told.events.extend(last);
        told.saved = told.events.len();
        let last = self.0.first + told.saved as u64;
        drop(told);
        self.0.changed.send_modify(|changed| *changed = (last, true));
    }

    /// Returns a page of events after the number `after`, as soon as there are any; `None` when the feed is closed and
    /// has no more.
    pub(super) async fn next_page(&self, after: u64) -> Option<Vec<RunEvent>> {
        let mut changed = self.0.changed.subscribe();
        // `wait_for` checks the current value first, so an event between two pages is never missed.
        let news = changed.wait_for(|(last, is_over)| *last > after || *is_over).await;
        let (last, _) = *news.ok()?;
        if last <= after {
            return None;
        }
        // Numbers are dense within a feed, so the number is also the index.
        let skip = usize::try_from(after - self.0.first).unwrap_or(usize::MAX);
        Some(self.lock_state().events.iter().skip(skip).take(PAGE_SIZE as usize).cloned().collect())
    }

    /// Waits for an unsaved event. Returns false if the feed is closed.
    pub(super) async fn wait_for_unsaved(&self) -> bool {
        let mut changed = self.0.changed.subscribe();
        // `last_saved` is read at each change, not once, because a batch may have been stored since.
        let has_news = |(last, is_over): &(u64, bool)| *last > self.last_saved() || *is_over;
        changed.wait_for(has_news).await.is_ok_and(|news| !news.1)
    }

    /// Waits until the feed is closed.
    pub(super) async fn wait_closed(&self) {
        let mut changed = self.0.changed.subscribe();
        let _ = changed.wait_for(|(_, is_over)| *is_over).await;
    }

    pub(super) fn unsaved_events(&self) -> Vec<RunEvent> {
        let told = self.lock_state();
        told.events[told.saved..].to_vec()
    }

    /// Marks the events up to `last` as stored in the database.
    pub(super) fn mark_saved(&self, last: Option<u64>) {
        let Some(last) = last else { return };
        let mut told = self.lock_state();
        let count = usize::try_from(last - self.0.first).unwrap_or(usize::MAX);
        // `close` may have marked all events meanwhile; the mark never moves back.
        told.saved = told.saved.max(count);
    }

    fn last_saved(&self) -> u64 {
        self.0.first + self.lock_state().saved as u64
    }

    fn lock_state(&self) -> MutexGuard<'_, FeedState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the number after which a process numbers its events, for a run of which `last` is stored. Watchers may have
/// received later numbers that were never stored, and may resume from such a number.
pub(super) fn next_sequence_base(last: u64) -> u64 {
    (last / SEQUENCE_GAP + 1) * SEQUENCE_GAP
}

/// The maximum number of events of one run. Our choice: an answer of a million words has fewer.
pub const MAX_EVENTS: usize = 20_000;

/// The range of numbers that one process has for a run's events. Our choice: more than a run can have.
const SEQUENCE_GAP: u64 = 100_000;

/// The maximum size of one run's details, in bytes: the default limit of a run's output.
pub const MAX_DETAIL_BYTES: usize = 1 << 20;

/// The number of events that a watcher receives at once. Our choice.
pub(super) const PAGE_SIZE: u32 = 256;

/// The time for which events are collected before they are written together. Our choice.
pub(super) const BATCH_INTERVAL: Duration = Duration::from_millis(50);

/// The longest time between two attempts to write events that cannot be written. Our choice.
pub(super) const MAX_BATCH_INTERVAL: Duration = Duration::from_secs(30);
