//! A limit for the number of units that are held at one time: one atomic counter without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter of held units with a limit. A holder must return the units that it has taken.
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

    /// Takes `count` units. Returns false and takes nothing if fewer units are free.
    #[must_use]
    pub fn try_take(&self, count: u64) -> bool {
        self.try_take_if(count, |_| true)
    }

    /// Takes `count` units if the limit and `allows` permit it; otherwise it takes nothing and returns false. `allows`
    /// receives the number of units that would be held then. `allows` may be called several times.
    #[must_use]
    pub fn try_take_if(&self, count: u64, allows: impl Fn(u64) -> bool) -> bool {
        // A failed attempt must not change the counter: otherwise other tasks would find fewer free units than there
        // are.
        let take =
            |held: u64| held.checked_add(count).filter(|held| *held <= self.limit && allows(*held));
        self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    pub fn return_count(&self, count: u64) {
        self.held.fetch_sub(count, Ordering::AcqRel);
    }

    /// Returns the number of units that are held now.
    pub fn held_count(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    /// An attempt that fails never takes free units away from another attempt.
    #[test]
    fn a_take_that_fails_hides_no_room() {
        let counter = BoundedCounter::new(10);
        let is_over = AtomicBool::new(false);
        let taken = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(!counter.try_take(11));
                }
            });
            let take_all = |_: &u32| {
                let is_taken = counter.try_take(10);
                if is_taken {
                    counter.return_count(10);
                }
                is_taken
            };
            let taken = (0..ROUNDS).filter(take_all).count();
            is_over.store(true, Ordering::Relaxed);
            taken
        });
        assert_eq!((taken, counter.held_count()), (ROUNDS as usize, 0));
    }

    const ROUNDS: u32 = 300_000;
}
