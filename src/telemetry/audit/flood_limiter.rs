//! Keeps events that a client can repeat without end from filling the disk.
//!
//! The first [`MAX_RECORDED_SINGLY`] events are recorded one by one. Later events are counted, and a record with the
//! count is written at most once a second.

use std::time::{Duration, Instant};

/// The limiter for one kind of event.
#[derive(Debug)]
pub(super) struct RecordFloodLimiter {
    /// The number of further events that are recorded one by one.
    singly: u32,
    /// The number of events that were counted since the last record.
    repeats: u64,
    recorded: Option<Instant>,
}

impl RecordFloodLimiter {
    /// Counts an event. Returns true if the event is to be recorded by itself, which a log without room does not do.
    pub(super) fn count_one(&mut self, has_room: bool) -> bool {
        if has_room && self.singly > 0 {
            self.singly -= 1;
            return true;
        }
        self.repeats += 1;
        false
    }

    /// Returns the number of counted events and resets it, if a record is due: the last one is older than
    /// [`SUMMARY_INTERVAL`], or `all` is true.
    pub(super) fn take_due(&mut self, now: Instant, all: bool) -> Option<u64> {
        let waits = self.recorded.is_some_and(|last| now.duration_since(last) < SUMMARY_INTERVAL);
        if self.repeats == 0 || (waits && !all) {
            return None;
        }
        self.recorded = Some(now);
        Some(std::mem::take(&mut self.repeats))
    }

    /// Returns true if an event was counted and is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.repeats > 0
    }
}

impl Default for RecordFloodLimiter {
    fn default() -> Self {
        Self { singly: MAX_RECORDED_SINGLY, repeats: 0, recorded: None }
    }
}

/// The largest number of events that are recorded one by one. Our choice: it is enough to see what an agent tried.
const MAX_RECORDED_SINGLY: u32 = 64;

/// The shortest time between two records with a count. Our choice: a day of flooding is 86,400 lines, 30 MB.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_recorded_once_a_second() {
        let mut flood = RecordFloodLimiter::default();
        assert_eq!((0..100).filter(|_| flood.count_one(true)).count(), 64);
        let start = Instant::now();
        let mut repeats = |millis: u64, all: bool| {
            let due = flood.take_due(start + Duration::from_millis(millis), all);
            flood.count_one(true);
            due
        };
        assert_eq!(repeats(0, false), Some(36));
        assert_eq!(repeats(1, false), None);
        assert_eq!(repeats(999, false), None);
        assert_eq!(repeats(1000, false), Some(3));
        assert_eq!(repeats(1001, true), Some(1), "the end does not wait");
    }
}
