//! A bound on what is held at one time: one counter, no lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number of things that may be held, and how many are. The holder gives back what it takes.
#[derive(Debug)]
pub struct BoundedCounter {
    held: AtomicU64,
    limit: u64,
}

impl BoundedCounter {
    pub const fn new(limit: u64) -> Self {
        Self { held: AtomicU64::new(0), limit }
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes so many, or none; `false` if there is no room for all of them.
    #[must_use]
    pub fn try_take(&self, count: u64) -> bool {
        let held = self.held.fetch_add(count, Ordering::AcqRel);
        let has_room = held.checked_add(count).is_some_and(|held| held <= self.limit);
        if !has_room {
            self.return_count(count);
        }
        has_room
    }

    pub fn return_count(&self, count: u64) {
        self.held.fetch_sub(count, Ordering::AcqRel);
    }

    /// Returns the number of units that are held now.
    pub fn held_count(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }

    /// Returns the number of units that can still be taken.
    pub fn free_count(&self) -> u64 {
        self.limit.saturating_sub(self.held_count())
    }
}
