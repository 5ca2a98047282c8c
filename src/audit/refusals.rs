//! Keeps a flood of refusals from filling the disk.
//!
//! The first [`SINGLY`] of each code are recorded one by one. After that they are counted, and a
//! record with the count is written at most once a second.

use std::time::{Duration, Instant};

use super::record::{Refused, Repeated};

/// One entry per code that has occurred. Codes are part of the program, so there are few.
#[derive(Debug, Default)]
pub(super) struct Refusals(Vec<Count>);

#[derive(Debug)]
struct Count {
    code: &'static str,
    /// How many more are recorded one by one.
    singly: u32,
    /// Counted since the last record, and the status of the last of them.
    repeats: u64,
    status: u16,
    recorded: Option<Instant>,
}

impl Refusals {
    /// Counts a refusal; `true` if it is to be recorded by itself.
    pub(super) fn count(&mut self, refused: &Refused<'_>) -> bool {
        let count = self.entry(refused.code);
        if count.singly > 0 {
            count.singly -= 1;
            return true;
        }
        count.repeats += 1;
        count.status = refused.status;
        false
    }

    /// Takes out what was counted and is due: not recorded within the last second, or `all`.
    pub(super) fn due(&mut self, now: Instant, all: bool) -> impl Iterator<Item = Repeated> {
        self.0.iter_mut().filter_map(move |count| {
            let waits = count.recorded.is_some_and(|last| now.duration_since(last) < PAUSE);
            if count.repeats == 0 || (waits && !all) {
                return None;
            }
            count.recorded = Some(now);
            let repeats = std::mem::take(&mut count.repeats);
            Some(Repeated { code: count.code, status: count.status, repeats })
        })
    }

    /// Whether something was counted that is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.0.iter().any(|count| count.repeats > 0)
    }

    fn entry(&mut self, code: &'static str) -> &mut Count {
        let known = self.0.iter().position(|count| count.code == code);
        let at = known.unwrap_or_else(|| {
            self.0.push(Count { code, singly: SINGLY, repeats: 0, status: 0, recorded: None });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

/// Refusals of one code that are recorded one by one: enough to see what an agent tried. Ours.
const SINGLY: u32 = 64;

/// Between two records of one code after that. Ours: a day of flooding is 86,400 lines, 30 MB.
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_recorded_once_a_second() {
        let mut refusals = Refusals::default();
        let singly = (0..100).filter(|_| refusals.count(&refused())).count();
        assert_eq!(singly, 64);
        let start = Instant::now();
        let mut repeats = |millis: u64, all: bool| {
            let due = refusals.due(start + Duration::from_millis(millis), all);
            let repeats: Vec<_> = due.map(|repeated| repeated.repeats).collect();
            refusals.count(&refused());
            repeats
        };
        assert_eq!(repeats(0, false), [36]);
        assert!(repeats(1, false).is_empty());
        assert!(repeats(999, false).is_empty());
        assert_eq!(repeats(1000, false), [3]);
        assert_eq!(repeats(1001, true), [1], "the end does not wait");
    }

    fn refused() -> Refused<'static> {
        Refused {
            request: "call-1",
            code: "rate_limited",
            status: 429,
            method: "POST",
            route: "messages",
            model: None,
            request_bytes: 0,
        }
    }
}
