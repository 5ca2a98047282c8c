//! A limit on the work of each grant. Work beyond a grant's share waits, and the work of other grants does not wait
//! with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The limit for one kind of work that grants do at the same time.
#[derive(Debug)]
pub struct GrantWorkLimiter {
    /// The maximum number of pieces of work of one grant at the same time.
    limit: usize,
    grants: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// The permits of all grants together.
    all: Arc<Semaphore>,
}

/// A permit for one piece of work. Dropping it ends the work's share.
#[derive(Debug)]
pub(super) struct GrantWorkPermit {
    _of_grant: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl GrantWorkLimiter {
    /// Creates a limiter that lets each grant do `limit` pieces of work at the same time.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            grants: Mutex::default(),
            all: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
        }
    }

    /// Limits the work of all grants together to `all` pieces at the same time.
    #[must_use]
    pub fn with_total_limit(self, all: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), ..self }
    }

    /// Waits for a permit of the grant and for a permit of all grants. Returns `None` if the semaphores are closed.
    pub(super) async fn acquire_permit(&self, grant: &str) -> Option<GrantWorkPermit> {
        let turns = {
            let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
            // A count of 1 means that only the map holds the semaphore: the grant has no work and no waiter.
            if grants.len() >= MAX_IDLE_GRANTS {
                grants.retain(|_, turns| Arc::strong_count(turns) > 1);
            }
            let new = || Arc::new(Semaphore::new(self.limit));
            Arc::clone(grants.entry(grant.to_owned()).or_insert_with(new))
        };
        // The grant's own permit comes first: a grant that waits for it holds no permit that another grant needs.
        let of_grant = turns.acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(GrantWorkPermit { _of_grant: of_grant, _of_all: of_all })
    }
}

/// The number of remembered grants above which idle grants are forgotten. Our choice.
const MAX_IDLE_GRANTS: usize = 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_grant_waits_for_its_own_turns_only() {
        let turns = GrantWorkLimiter::new(2);
        let held = [turns.acquire_permit("one").await, turns.acquire_permit("one").await];
        let is_free =
            async |grant| timeout(Duration::from_millis(20), turns.acquire_permit(grant)).await;
        assert!(is_free("one").await.is_err());
        assert!(is_free("two").await.is_ok());
        drop(held);
        assert!(is_free("one").await.is_ok());
    }

    #[tokio::test]
    async fn all_grants_together_have_so_many_turns() {
        let turns = GrantWorkLimiter::new(2).with_total_limit(3);
        let _one = [turns.acquire_permit("one").await, turns.acquire_permit("one").await];
        let two = turns.acquire_permit("two").await;
        let is_free =
            async |grant| timeout(Duration::from_millis(20), turns.acquire_permit(grant)).await;
        assert!(is_free("three").await.is_err());
        drop(two);
        assert!(is_free("three").await.is_ok());
    }
}
