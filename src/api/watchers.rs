//! Who watches runs, counted by grant: each has a connection for as long as the run goes on, and no grant may have all of
//! them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::Error;

/// The watchers of a service.
#[derive(Debug)]
pub struct Watchers {
    /// Of one grant.
    most: usize,
    now: Arc<Mutex<HashMap<String, usize>>>,
}

/// Counts as watching until it is dropped.
pub(super) struct Watcher {
    grant: String,
    now: Arc<Mutex<HashMap<String, usize>>>,
}

impl Watchers {
    /// At most so many of each grant.
    pub fn new(most: usize) -> Self {
        Self { most, now: Arc::default() }
    }

    /// # Errors
    /// The grant has as many as it may.
    pub(super) fn enter(&self, grant: &str) -> Result<Watcher, Error> {
        let mut now = lock(&self.now);
        let watching = now.entry(grant.to_owned()).or_default();
        if *watching >= self.most {
            return Err(Error::TooManyWatchers(self.most));
        }
        *watching += 1;
        Ok(Watcher { grant: grant.to_owned(), now: Arc::clone(&self.now) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut now = lock(&self.now);
        if let Some(watching) = now.get_mut(&self.grant) {
            *watching -= 1;
            if *watching == 0 {
                now.remove(&self.grant);
            }
        }
    }
}

fn lock(now: &Mutex<HashMap<String, usize>>) -> MutexGuard<'_, HashMap<String, usize>> {
    now.lock().unwrap_or_else(PoisonError::into_inner)
}
