//! A limit on the lines of a log that a client or a server can cause: one line an interval for each kind of event.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A limiter of log lines. The number of kinds is bounded, because each kind is a word of the program.
#[derive(Debug, Default)]
pub struct LogLineLimiter(Mutex<BTreeMap<&'static str, LoggedKind>>);

/// A kind of event that was logged at least once.
#[derive(Debug)]
struct LoggedKind {
    at: Instant,
    /// The number of events of this kind since `at` that were not logged.
    more: u64,
}

impl LogLineLimiter {
    /// Returns the number of unlogged events of this kind if this event is to be logged; `None` if it is only counted.
    pub fn count_event(&self, kind: &'static str) -> Option<u64> {
        let now = Instant::now();
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match logged.get_mut(kind) {
            // A line of this kind is younger than the interval: count, and report the count with the next line.
            Some(last) if now.duration_since(last.at) < LINE_INTERVAL => {
                last.more += 1;
                None
            }
            // The first event of this kind, or the interval is over.
            last => {
                let unlogged = last.map_or(0, |last| last.more);
                logged.insert(kind, LoggedKind { at: now, more: 0 });
                Some(unlogged)
            }
        }
    }
}

/// The interval between two log lines of one kind. Our choice: an operator who watches sees a failure, and a client
/// that calls in a loop cannot fill the log.
const LINE_INTERVAL: Duration = Duration::from_mins(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_logged_once_a_minute_and_kind() {
        let limiter = LogLineLimiter::default();
        assert_eq!(limiter.count_event("closed"), Some(0));
        assert_eq!((limiter.count_event("closed"), limiter.count_event("auth")), (None, Some(0)));
        let mut logged = limiter.0.lock().expect("no thread has panicked");
        let last = logged.get_mut("closed").expect("it was logged");
        last.at = last.at.checked_sub(LINE_INTERVAL).expect("the clock has run so long");
        drop(logged);
        assert_eq!(limiter.count_event("closed"), Some(1), "and how many were not logged");
    }
}
