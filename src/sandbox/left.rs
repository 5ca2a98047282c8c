//! What this process was to take away, and could not: a container, a run's directory, a group of processes.
//!
//! All of it says that this process answers for it, and as long as this process lives no sweep would touch it. So whoever
//! gives something up says so here, and this process's own sweep takes it for a dead one's. When this process has ended,
//! it is one.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One of them, in the hands of whoever tries once more. It stays noted, unless that is [forgotten](Taken::forget).
#[derive(Debug)]
pub struct Taken(Option<String>);

/// Notes a name, or an engine's id. More than there is room for push out the oldest.
pub fn note(name: impl Into<String>) {
    let (mut all, name) = (all(), name.into());
    if all.contains(&name) {
        return;
    }
    if all.len() >= MOST
        && let Some(name) = all.pop_front()
    {
        tracing::warn!(name, "so much is left behind that this waits for the end of the process");
    }
    all.push_back(name);
}

pub fn is_noted(name: &str) -> bool {
    all().iter().any(|noted| noted == name)
}

/// Whether it was noted; it is no more.
pub fn forget(name: &str) -> bool {
    take(name).map(Taken::forget).is_some()
}

/// Nobody else has it meanwhile: by the time that it is removed, there may be another of its name.
pub fn take(name: &str) -> Option<Taken> {
    let mut all = all();
    let index = all.iter().position(|noted| noted == name)?;
    Some(Taken(all.remove(index)))
}

impl Taken {
    pub fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(name) = self.0.take() {
            note(name);
        }
    }
}

fn all() -> MutexGuard<'static, VecDeque<String>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process's, as their owner is one.
static LEFT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

const MOST: usize = 1024;
