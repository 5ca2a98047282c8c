//! Bounded work of each grant: what one grant asks for beyond its share waits, and nobody else waits with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The work of one kind that grants do at the same time.
#[derive(Debug)]
pub struct Turns {
    /// Per grant.
    limit: usize,
    grants: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Turns {
    /// Lets each grant do so many at the same time.
    pub fn new(limit: usize) -> Self {
        Self { limit, grants: Mutex::default() }
    }

    /// Waits for a turn of the grant, which ends when the permit is dropped. None is given when the service ends.
    pub(super) async fn wait(&self, grant: &str) -> Option<OwnedSemaphorePermit> {
        let turns = {
            let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
            if grants.len() >= MAX_IDLE {
                grants.retain(|_, turns| Arc::strong_count(turns) > 1);
            }
            let new = || Arc::new(Semaphore::new(self.limit));
            Arc::clone(grants.entry(grant.to_owned()).or_insert_with(new))
        };
        turns.acquire_owned().await.ok()
    }
}

/// Grants that are remembered; those that ask for nothing are forgotten beyond this.
const MAX_IDLE: usize = 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_grant_waits_for_its_own_turns_only() {
        let turns = Turns::new(2);
        let held = [turns.wait("one").await, turns.wait("one").await];
        let is_free = async |grant| timeout(Duration::from_millis(20), turns.wait(grant)).await;
        assert!(is_free("one").await.is_err());
        assert!(is_free("two").await.is_ok());
        drop(held);
        assert!(is_free("one").await.is_ok());
    }
}
