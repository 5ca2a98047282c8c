//! What this process was to take away, and could not: a container, a run's directory, a group of processes.
//!
//! All of it says that this process answers for it, and as long as this process lives no sweep would touch it. So whoever
//! gives something up says so here, and this process's own sweep takes it for a dead one's. When this process has ended,
//! it is one.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One of them, in the hands of whoever tries once more. It stays noted, unless that is [forgotten](unregister).
#[derive(Debug)]
pub struct LeftoverClaim(Option<String>);

/// Notes a name, or an engine's id. More than there is room for push out the oldest.
pub fn register(name: impl Into<String>) {
    let (mut all, name) = (lock_registry(), name.into());
    if all.contains(&name) {
        return;
    }
    if all.len() >= MAX_LEFTOVERS
        && let Some(name) = all.pop_front()
    {
        tracing::warn!(name, "so much is left behind that this waits for the end of the process");
    }
    all.push_back(name);
}

pub fn is_registered(name: &str) -> bool {
    lock_registry().iter().any(|noted| noted == name)
}

/// Whether it was noted; it is no more.
pub fn unregister(name: &str) -> bool {
    claim(name).map(LeftoverClaim::complete).is_some()
}

/// Nobody else has it meanwhile: by the time that it is removed, there may be another of its name.
pub fn claim(name: &str) -> Option<LeftoverClaim> {
    let mut all = lock_registry();
    let index = all.iter().position(|noted| noted == name)?;
    Some(LeftoverClaim(all.remove(index)))
}

impl LeftoverClaim {
    pub fn complete(mut self) {
        self.0 = None;
    }
}

impl Drop for LeftoverClaim {
    fn drop(&mut self) {
        if let Some(name) = self.0.take() {
            register(name);
        }
    }
}

fn lock_registry() -> MutexGuard<'static, VecDeque<String>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process's, as their owner is one.
static LEFTOVERS: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

const MAX_LEFTOVERS: usize = 1024;
