//! The objects that this process had to remove and could not: containers, directories of runs, cgroups.
//!
//! Their labels name this process as the owner, and no sweep removes an object whose owner is alive. So the code that
//! gives up on an object registers the object here. This process's own sweep then treats the object as a dead
//! process's. When this process has ended, every sweep does.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A leftover that one task tries to remove. A drop registers the name again, unless the claim is
/// [completed](Self::complete).
#[derive(Debug)]
pub struct LeftoverClaim(Option<String>);

/// Registers a name, or an engine's id. A full list drops its oldest name.
pub fn register(name: impl Into<String>) {
    let (mut all, name) = (lock_registry(), name.into());
    if all.contains(&name) {
        return;
    }
    if all.len() >= MAX_LEFTOVERS
        && let Some(name) = all.pop_front()
    {
        tracing::warn!(
            name,
            "too many objects could not be removed; this process stops tracking the oldest, and a sweep removes it after this process has ended"
        );
    }
    all.push_back(name);
}

/// Returns true if the name is registered.
pub fn is_registered(name: &str) -> bool {
    lock_registry().iter().any(|noted| noted == name)
}

/// Removes a name from the list, and returns true if the name was on the list.
pub fn unregister(name: &str) -> bool {
    claim(name).map(LeftoverClaim::complete).is_some()
}

/// Takes a name from the list, so that no other task removes the object. A later object may have the same name.
pub fn claim(name: &str) -> Option<LeftoverClaim> {
    let mut all = lock_registry();
    let index = all.iter().position(|noted| noted == name)?;
    Some(LeftoverClaim(all.remove(index)))
}

impl LeftoverClaim {
    /// Ends the claim: the object is removed, or its name is in use by a new object.
    pub fn complete(mut self) {
        self.0 = None;
    }
}

impl Drop for LeftoverClaim {
    fn drop(&mut self) {
        // The removal did not complete, so a later sweep has to try again.
        if let Some(name) = self.0.take() {
            register(name);
        }
    }
}

fn lock_registry() -> MutexGuard<'static, VecDeque<String>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The list of this process, as the owner of an object is a process.
static LEFTOVERS: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// The maximum length of the list: our choice.
const MAX_LEFTOVERS: usize = 1024;
