//! The runs that share a process, by their ids.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::RunGateway;

/// One gateway for each worker, all of them of one run.
pub type PerWorkerGateways = Arc<[Arc<RunGateway>]>;

/// Read for each request and written when a run begins or ends.
#[derive(Default)]
pub struct GatewayRegistry(RwLock<HashMap<Box<str>, PerWorkerGateways>>);

impl GatewayRegistry {
    pub fn find_run(&self, run: &str) -> Option<PerWorkerGateways> {
        self.read_lock().get(run).cloned()
    }

    /// Adds a run, or puts it in the place of another of that name.
    pub fn insert(&self, run: &str, gateways: PerWorkerGateways) {
        self.write_lock().insert(run.into(), gateways);
    }

    /// Takes a run out: from now on its calls are strangers.
    pub fn remove(&self, run: &str) -> Option<PerWorkerGateways> {
        self.write_lock().remove(run)
    }

    /// All runs, in no order.
    pub fn all_runs(&self) -> Vec<PerWorkerGateways> {
        self.read_lock().values().cloned().collect()
    }

    fn read_lock(&self) -> RwLockReadGuard<'_, HashMap<Box<str>, PerWorkerGateways>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, HashMap<Box<str>, PerWorkerGateways>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
