//! Keeps requests that cost nothing from filling the disk with lines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A counter of the lines in the current second. Threads that race at the end of a second may write a few lines more.
#[derive(Debug, Default)]
pub(super) struct LineFloodLimiter {
    /// The current second, since 1970.
    second: AtomicU64,
    /// The number of lines of the current second, written or not.
    lines: AtomicU64,
    /// The number of suppressed lines that no line reports yet.
    repeats: AtomicU64,
}

impl LineFloodLimiter {
    /// Counts a line. Returns true if the line is to be written, and the number of suppressed lines to report before
    /// it.
    pub(super) fn count_line(&self, time: SystemTime) -> (bool, u64) {
        let second = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // A new second. Only the thread that stores it first reports the count of the second before.
        if self.second.swap(second, Ordering::Relaxed) != second {
            self.lines.store(1, Ordering::Relaxed);
            return (true, self.take_suppressed());
        }
        // `Relaxed` is enough: an exact limit is not needed, and no other memory depends on these counters.
        let is_written = self.lines.fetch_add(1, Ordering::Relaxed) < LINES_PER_SECOND;
        if !is_written {
            self.repeats.fetch_add(1, Ordering::Relaxed);
        }
        (is_written, 0)
    }

    /// Returns the number of suppressed lines and resets the number.
    pub(super) fn take_suppressed(&self) -> u64 {
        self.repeats.swap(0, Ordering::Relaxed)
    }
}

/// The number of lines a second for requests that made no call. Our choice: more than all health checks need, and about
/// 10 KB.
const LINES_PER_SECOND: u64 = 32;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_first_of_each_second_are_written_and_the_others_counted() {
        let flood = LineFloodLimiter::default();
        let at = |second: u64| UNIX_EPOCH + Duration::from_secs(second);
        let written = (0..100).filter(|_| flood.count_line(at(7)).0).count();
        assert_eq!(written, 32);
        assert_eq!(flood.count_line(at(8)), (true, 68));
        assert_eq!(flood.count_line(at(9)), (true, 0));
        assert_eq!(flood.take_suppressed(), 0);
    }
}
