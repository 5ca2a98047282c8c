//! Bounded numbers of things that stay open: so many of each grant, and so many of all grants together. No grant may have
//! all connections, or all files, of a service.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The open things of one kind, counted by grant.
#[derive(Debug)]
pub struct Shares {
    per_grant: usize,
    total: usize,
    open: Arc<Mutex<Open>>,
}

/// Counts as open until it is dropped.
#[derive(Debug)]
pub(super) struct ShareGuard {
    grant: String,
    open: Arc<Mutex<Open>>,
}

/// The bound that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SharesFull {
    /// The grant has as many as this.
    Grant(usize),
    /// All grants together have as many as they may.
    All,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    grants: HashMap<String, usize>,
}

impl Shares {
    /// Allows so many of each grant, and so many of all grants together.
    pub fn new(per_grant: usize, total: usize) -> Self {
        Self { per_grant, total, open: Arc::default() }
    }

    /// Counts one more of a grant.
    ///
    /// # Errors
    /// Which bound is reached.
    pub(super) fn enter(&self, grant: &str) -> Result<ShareGuard, SharesFull> {
        let mut open = lock(&self.open);
        if open.grants.get(grant).is_some_and(|count| *count >= self.per_grant) {
            return Err(SharesFull::Grant(self.per_grant));
        }
        if open.total >= self.total {
            return Err(SharesFull::All);
        }
        open.total += 1;
        *open.grants.entry(grant.to_owned()).or_default() += 1;
        Ok(ShareGuard { grant: grant.to_owned(), open: Arc::clone(&self.open) })
    }
}

impl Drop for ShareGuard {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.total -= 1;
        if let Some(count) = open.grants.get_mut(&self.grant) {
            *count -= 1;
            if *count == 0 {
                open.grants.remove(&self.grant);
            }
        }
    }
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_has_its_share_and_all_have_theirs() {
        let shares = Shares::new(2, 3);
        let one = [shares.enter("one").unwrap(), shares.enter("one").unwrap()];
        assert_eq!(shares.enter("one").unwrap_err(), SharesFull::Grant(2));
        let two = shares.enter("two").unwrap();
        assert_eq!(shares.enter("two").unwrap_err(), SharesFull::All);
        drop(one);
        let again = [shares.enter("two").unwrap(), shares.enter("one").unwrap()];
        assert_eq!(shares.enter("one").unwrap_err(), SharesFull::All);
        drop((two, again));
        let open = lock(&shares.open);
        assert_eq!((open.total, open.grants.len()), (0, 0));
    }
}
