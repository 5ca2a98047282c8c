//! Keeps requests that cost nothing from filling the disk with lines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Counts what comes in one second. Threads that meet at the end of a second may write some lines more.
#[derive(Debug, Default)]
pub(super) struct LineFloodLimiter {
    /// Since 1970.
    second: AtomicU64,
    /// Those of this second.
    lines: AtomicU64,
    /// Those without a line that no line has counted yet.
    repeats: AtomicU64,
}

impl LineFloodLimiter {
    /// Counts a line; tells whether it is to be written, and how many before it were not.
    pub(super) fn count_line(&self, time: SystemTime) -> (bool, u64) {
        let second = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if self.second.swap(second, Ordering::Relaxed) != second {
            self.lines.store(1, Ordering::Relaxed);
            return (true, self.take_suppressed());
        }
        let is_written = self.lines.fetch_add(1, Ordering::Relaxed) < LINES_PER_SECOND;
        if !is_written {
            self.repeats.fetch_add(1, Ordering::Relaxed);
        }
        (is_written, 0)
    }

    /// Takes the number of those that were not written.
    pub(super) fn take_suppressed(&self) -> u64 {
        self.repeats.swap(0, Ordering::Relaxed)
    }
}

/// Lines a second of requests that made no call. Ours: more than all health checks, and 10 KB.
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
