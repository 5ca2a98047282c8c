//! The bounds of open questions: for each owner of runs, and for all of them. The questions of one owner cannot fill the
//! list that people read.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The future of the owner of a run; `None` for a run without one.
pub type RunOwnerFuture = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

/// The number of open questions of each owner.
#[derive(Debug, Default)]
pub(super) struct OpenQuestions(Mutex<HashMap<Option<String>, usize>>);

/// A place for one open question. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct OpenQuestionPermit {
    owner: Option<String>,
    open: Arc<OpenQuestions>,
}

impl OpenQuestions {
    /// Takes a place; `None` if the owner, or all owners together, have no more.
    pub(super) fn take_place(
        self: &Arc<Self>,
        owner: Option<String>,
    ) -> Option<OpenQuestionPermit> {
        let mut open = self.lock_counts();
        let of_owner = open.get(&owner).copied().unwrap_or_default();
        let is_full = owner.is_some() && of_owner >= MAX_OPEN_QUESTIONS_PER_GRANT;
        if is_full || open.values().sum::<usize>() >= MAX_OPEN_QUESTIONS {
            return None;
        }
        open.insert(owner.clone(), of_owner + 1);
        Some(OpenQuestionPermit { owner, open: Arc::clone(self) })
    }

    fn lock_counts(&self) -> MutexGuard<'_, HashMap<Option<String>, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenQuestionPermit {
    fn drop(&mut self) {
        let mut open = self.open.lock_counts();
        if let Some(count) = open.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.owner);
            }
        }
    }
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
        let open = Arc::new(OpenQuestions::default());
        let take = |owner: usize| open.take_place(Some(owner.to_string()));
        let mut held: Vec<_> =
            (0..MAX_OPEN_QUESTIONS_PER_GRANT).map(|_| take(0).unwrap()).collect();
        assert!(take(0).is_none());
        held.pop();
        held.push(take(0).unwrap());
        for owner in 1..MAX_OPEN_QUESTIONS / MAX_OPEN_QUESTIONS_PER_GRANT {
            held.extend((0..MAX_OPEN_QUESTIONS_PER_GRANT).map(|_| take(owner).unwrap()));
        }
        assert!(take(1000).is_none() && open.take_place(None).is_none());
        held.clear();
        assert!(open.lock_counts().is_empty());
    }
}
