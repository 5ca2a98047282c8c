//! Permits for work that many owners start: a limit for each key, and one for all keys together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The permits of a process.
#[derive(Debug)]
pub struct KeyedPermits {
    /// The number of permits that are held for each key; a key without a permit has no entry.
    held: Mutex<BTreeMap<Option<Box<str>>, usize>>,
    max_held: usize,
    max_per_key: usize,
}

/// A permit for one piece of work. Its drop gives the permit back.
#[derive(Debug)]
pub struct KeyedPermit {
    permits: Arc<KeyedPermits>,
    key: Option<Box<str>>,
}

impl KeyedPermits {
    /// Creates permits: at most `max_held` at one time, and at most `max_per_key` of them for one key.
    pub const fn new(max_held: usize, max_per_key: usize) -> Self {
        Self { held: Mutex::new(BTreeMap::new()), max_held, max_per_key }
    }

    /// Takes a permit; `None` if a limit is reached. Work without a key has the limit of all keys only.
    pub fn try_take(self: &Arc<Self>, key: Option<&str>) -> Option<KeyedPermit> {
        let key: Option<Box<str>> = key.map(Into::into);
        let mut held = self.lock_held();
        let (all, own) =
            (held.values().sum::<usize>(), held.get(&key).copied().unwrap_or_default());
        if all >= self.max_held || (key.is_some() && own >= self.max_per_key) {
            return None;
        }
        held.insert(key.clone(), own + 1);
        Some(KeyedPermit { permits: Arc::clone(self), key })
    }

    fn lock_held(&self) -> MutexGuard<'_, BTreeMap<Option<Box<str>>, usize>> {
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
        let first = permits.try_take(Some("a")).unwrap();
        let _second = permits.try_take(Some("a")).unwrap();
        assert!(permits.try_take(Some("a")).is_none(), "the key has its two");
        let _other = permits.try_take(Some("b")).unwrap();
        assert!(permits.try_take(Some("c")).is_none(), "three are held");
        assert!(permits.try_take(None).is_none(), "three are held");
        drop(first);
        assert!(permits.try_take(Some("c")).is_some() && permits.try_take(Some("a")).is_some());
        assert_eq!(permits.lock_held().len(), 2, "a key without a permit is forgotten");
    }

    #[test]
    fn work_without_a_key_has_the_limit_of_all_keys() {
        let permits = Arc::new(KeyedPermits::new(3, 1));
        let held: Vec<_> = (0..3).map(|_| permits.try_take(None).unwrap()).collect();
        assert!(permits.try_take(None).is_none());
        drop(held);
        assert!(permits.lock_held().is_empty());
    }
}
