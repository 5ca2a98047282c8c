//! The runs that share a process, by their IDs.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::RunGateway;

/// The gateways of one run, one for each worker.
pub type PerWorkerGateways = Arc<[Arc<RunGateway>]>;

/// The table of all runs, read for each request and written when a run begins or ends.
#[derive(Default)]
pub struct GatewayRegistry(RwLock<HashMap<Box<str>, PerWorkerGateways>>);

impl GatewayRegistry {
    pub fn find_run(&self, run: &str) -> Option<PerWorkerGateways> {
        self.read_lock().get(run).cloned()
    }

    /// Adds a run. A run of the same ID is replaced.
    pub fn insert(&self, run: &str, gateways: PerWorkerGateways) {
        self.write_lock().insert(run.into(), gateways);
    }

    /// Removes a run. From then on its calls are unauthenticated.
    pub fn remove(&self, run: &str) -> Option<PerWorkerGateways> {
        self.write_lock().remove(run)
    }

    /// Returns all runs, in no particular order.
    pub fn all_runs(&self) -> Vec<PerWorkerGateways> {
        self.read_lock().values().cloned().collect()
    }

    fn read_lock(&self) -> RwLockReadGuard<'_, HashMap<Box<str>, PerWorkerGateways>> {
        // A panic of another thread cannot leave the map half changed, so a poisoned lock is still
        // usable.
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, HashMap<Box<str>, PerWorkerGateways>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
