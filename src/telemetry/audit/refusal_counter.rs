//! Counts refusals by code, with a flood limiter for each code.

use std::time::Instant;

use super::flood_limiter::RecordFloodLimiter;

/// The counts of all codes that have occurred. Codes are part of the program, so there are few.
#[derive(Debug, Default)]
pub(super) struct RefusalCounter(Vec<RefusalCodeCount>);

#[derive(Debug)]
struct RefusalCodeCount {
    code: &'static str,
    /// The status of the last refusal.
    status: u16,
    flood: RecordFloodLimiter,
}

impl RefusalCounter {
    /// Counts a refusal. Returns true if it is to be recorded by itself.
    pub(super) fn count_refusal(
        &mut self,
        code: &'static str,
        status: u16,
        has_room: bool,
    ) -> bool {
        let count = self.count_for_code(code);
        count.status = status;
        count.flood.count_one(has_room)
    }

    /// Returns the code, the last status and the number of counted refusals for each record that is due, or for all
    /// records if `all` is true.
    pub(super) fn take_due(
        &mut self,
        now: Instant,
        all: bool,
    ) -> impl Iterator<Item = (&'static str, u16, u64)> {
        self.0.iter_mut().filter_map(move |RefusalCodeCount { code, status, flood }| {
            let repeats = flood.take_due(now, all)?;
            Some((*code, *status, repeats))
        })
    }

    /// Returns true if a refusal was counted and is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.0.iter().any(|count| count.flood.is_counting())
    }

    fn count_for_code(&mut self, code: &'static str) -> &mut RefusalCodeCount {
        let known = self.0.iter().position(|count| count.code == code);
        let at = known.unwrap_or_else(|| {
            self.0.push(RefusalCodeCount { code, status: 0, flood: RecordFloodLimiter::default() });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}
