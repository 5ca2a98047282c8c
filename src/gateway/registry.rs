//! The runs that share a process, by their ids.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::Gateway;

/// One gateway for each worker, all of them of one run.
pub type Gateways = Arc<[Arc<Gateway>]>;

/// Read for each request and written when a run begins or ends.
#[derive(Default)]
pub struct Registry(RwLock<HashMap<Box<str>, Gateways>>);

impl Registry {
    pub fn find(&self, run: &str) -> Option<Gateways> {
        self.read().get(run).cloned()
    }

    /// Adds a run, or puts it in the place of another of that name.
    pub fn insert(&self, run: &str, gateways: Gateways) {
        self.write().insert(run.into(), gateways);
    }

    /// Takes a run out: from now on its calls are strangers.
    pub fn remove(&self, run: &str) -> Option<Gateways> {
        self.write().remove(run)
    }

    /// All runs, in no order.
    pub fn all(&self) -> Vec<Gateways> {
        self.read().values().cloned().collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<Box<str>, Gateways>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Box<str>, Gateways>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
