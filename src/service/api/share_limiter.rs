//! Limits on resources that stay open: a number for each grant, and a number for all grants together. No grant can take
//! all connections or all open files of a service.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The limits for one kind of open resource, such as connections or files, and the number of open resources of each
/// grant.
#[derive(Debug)]
pub struct GrantShareLimiter {
    per_grant: usize,
    total: usize,
    open: Arc<Mutex<OpenShareCounts>>,
}

/// A guard that counts one open resource of a grant until the guard is dropped.
#[derive(Debug)]
pub(super) struct GrantShareGuard {
    grant: String,
    open: Arc<Mutex<OpenShareCounts>>,
}

/// The limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantShareError {
    /// The grant has reached its limit of open resources; the value is that limit.
    GrantLimit(usize),
    /// All grants together have reached the limit of open resources.
    TotalLimit,
}

#[derive(Debug, Default)]
struct OpenShareCounts {
    total: usize,
    grants: HashMap<String, usize>,
}

impl GrantShareLimiter {
    /// Creates a limiter with a maximum for each grant and a maximum for all grants together.
    pub fn new(per_grant: usize, total: usize) -> Self {
        Self { per_grant, total, open: Arc::default() }
    }

    /// Counts one more open resource of a grant.
    ///
    /// # Errors
    /// Returns [`GrantShareError::GrantLimit`] if the grant has its maximum, and [`GrantShareError::TotalLimit`] if all
    /// grants together have theirs.
    pub(super) fn acquire_share(&self, grant: &str) -> Result<GrantShareGuard, GrantShareError> {
        let mut open = lock_counts(&self.open);
        if open.grants.get(grant).is_some_and(|count| *count >= self.per_grant) {
            return Err(GrantShareError::GrantLimit(self.per_grant));
        }
        if open.total >= self.total {
            return Err(GrantShareError::TotalLimit);
        }
        // Both counters change under one lock, and only after both checks have passed.
        open.total += 1;
        *open.grants.entry(grant.to_owned()).or_default() += 1;
        Ok(GrantShareGuard { grant: grant.to_owned(), open: Arc::clone(&self.open) })
    }
}

impl Drop for GrantShareGuard {
    fn drop(&mut self) {
        let mut open = lock_counts(&self.open);
        open.total -= 1;
        if let Some(count) = open.grants.get_mut(&self.grant) {
            *count -= 1;
            // A grant without open resources leaves the map, so the map has at most as many entries as there are open
            // resources.
            if *count == 0 {
                open.grants.remove(&self.grant);
            }
        }
    }
}

fn lock_counts(open: &Mutex<OpenShareCounts>) -> MutexGuard<'_, OpenShareCounts> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_has_its_share_and_all_have_theirs() {
        let shares = GrantShareLimiter::new(2, 3);
        let one = [shares.acquire_share("one").unwrap(), shares.acquire_share("one").unwrap()];
        assert_eq!(shares.acquire_share("one").unwrap_err(), GrantShareError::GrantLimit(2));
        let two = shares.acquire_share("two").unwrap();
        assert_eq!(shares.acquire_share("two").unwrap_err(), GrantShareError::TotalLimit);
        drop(one);
        let again = [shares.acquire_share("two").unwrap(), shares.acquire_share("one").unwrap()];
        assert_eq!(shares.acquire_share("one").unwrap_err(), GrantShareError::TotalLimit);
        drop((two, again));
        let open = lock_counts(&shares.open);
        assert_eq!((open.total, open.grants.len()), (0, 0));
    }
}
