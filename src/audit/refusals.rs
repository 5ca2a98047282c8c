//! Refusals by code, of which each may come in floods.

use std::time::Instant;

use super::flood::Flood;
use super::record::{Refused, Repeated};

/// One entry per code that has occurred. Codes are part of the program, so there are few.
#[derive(Debug, Default)]
pub(super) struct Refusals(Vec<Count>);

#[derive(Debug)]
struct Count {
    code: &'static str,
    /// The status of the last of them.
    status: u16,
    flood: Flood,
}

impl Refusals {
    /// Counts a refusal; `true` if it is to be recorded by itself.
    pub(super) fn count(&mut self, refused: &Refused<'_>) -> bool {
        let count = self.entry(refused.code);
        count.status = refused.status;
        count.flood.count()
    }

    /// Takes out what was counted and is due, or `all` of it.
    pub(super) fn due(&mut self, now: Instant, all: bool) -> impl Iterator<Item = Repeated> {
        self.0.iter_mut().filter_map(move |Count { code, status, flood }| {
            let repeats = flood.due(now, all)?;
            Some(Repeated { code, status: *status, repeats })
        })
    }

    /// Whether something was counted that is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.0.iter().any(|count| count.flood.is_counting())
    }

    fn entry(&mut self, code: &'static str) -> &mut Count {
        let known = self.0.iter().position(|count| count.code == code);
        let at = known.unwrap_or_else(|| {
            self.0.push(Count { code, status: 0, flood: Flood::default() });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}
