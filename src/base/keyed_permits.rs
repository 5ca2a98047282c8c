//! Permits for work that many owners start: a limit for each key, and one for all keys together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The permits of a process.
#[derive(Debug)]
pub struct KeyedPermits {
    /// The number of permits that are held for each key; a key without a permit has no entry.
    held: Mutex<BTreeMap<Box<str>, usize>>,
    max_held: usize,
    max_per_key: usize,
}

/// A permit for one piece of work. Its drop gives the permit back.
#[derive(Debug)]
pub struct KeyedPermit {
    permits: Arc<KeyedPermits>,
    key: Box<str>,
}

impl KeyedPermits {
    /// Creates permits: at most `max_held` at one time, and at most `max_per_key` of them for one key.
    pub const fn new(max_held: usize, max_per_key: usize) -> Self {
        Self { held: Mutex::new(BTreeMap::new()), max_held, max_per_key }
    }

    /// Takes a permit; `None` if a limit is reached.
    pub fn try_take(self: &Arc<Self>, key: &str) -> Option<KeyedPermit> {
        let mut held = self.lock_held();
        let (all, own) = (held.values().sum::<usize>(), held.get(key).copied().unwrap_or_default());
        if all >= self.max_held || own >= self.max_per_key {
            return None;
        }
        *held.entry(key.into()).or_default() += 1;
        Some(KeyedPermit { permits: Arc::clone(self), key: key.into() })
    }

    fn lock_held(&self) -> MutexGuard<'_, BTreeMap<Box<str>, usize>> {
        // No code under this lock panics, and a permit must not be lost.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeyedPermit {
    fn drop(&mut self) {
        let mut held = self.permits.lock_held();
        if let Some(count) = held.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_and_all_keys_are_limited() {
        let permits = Arc::new(KeyedPermits::new(3, 2));
        let first = permits.try_take("a").unwrap();
        let _second = permits.try_take("a").unwrap();
        assert!(permits.try_take("a").is_none(), "the key has its two");
        let _other = permits.try_take("b").unwrap();
        assert!(permits.try_take("c").is_none(), "three are held");
        drop(first);
        assert!(permits.try_take("c").is_some() && permits.try_take("a").is_some());
        assert_eq!(permits.lock_held().len(), 2, "a key without a permit is forgotten");
    }
}
