//! The bounds of open questions: for each owner of runs, and for all of them. The questions of one owner cannot fill the
//! list that people read.

use std::pin::Pin;
use std::sync::Arc;

use crate::base::keyed_permits::KeyedPermits;

/// The future of the owner of a run; `None` for a run without one.
pub type RunOwnerFuture = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

/// Creates the places of open questions. The key is the owner; the questions of runs without an owner have the bound of
/// the process only.
pub(super) fn question_places() -> Arc<KeyedPermits> {
    Arc::new(KeyedPermits::new(MAX_OPEN_QUESTIONS, MAX_OPEN_QUESTIONS_PER_GRANT))
}

/// The most open questions of the runs of one grant. Our choice: a person reads no more with care.
pub const MAX_OPEN_QUESTIONS_PER_GRANT: usize = 128;

/// The most open questions of a process. Our choice: each may hold arguments of 256 KiB on disk.
const MAX_OPEN_QUESTIONS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    /// A grant at its bound leaves room for the others, until all have reached the bound of the process.
    #[test]
    fn open_questions_are_bounded_for_a_grant_and_for_all() {
        let places = question_places();
        let take = |owner: usize| places.try_take(Some(&owner.to_string()));
        let mut held: Vec<_> =
            (0..MAX_OPEN_QUESTIONS_PER_GRANT).map(|_| take(0).unwrap()).collect();
        assert!(take(0).is_none());
        held.pop();
        held.push(take(0).unwrap());
        for owner in 1..MAX_OPEN_QUESTIONS / MAX_OPEN_QUESTIONS_PER_GRANT {
            held.extend((0..MAX_OPEN_QUESTIONS_PER_GRANT).map(|_| take(owner).unwrap()));
        }
        assert!(take(1000).is_none() && places.try_take(None).is_none());
        held.clear();
        assert!(take(0).is_some());
    }
}
