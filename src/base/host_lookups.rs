//! The look-ups of hosts that the runs of a process ask for.
//!
//! A look-up holds a thread until this machine's resolver answers, whether its callers still wait or not. The threads
//! belong to the whole process. So callers share the look-up of a host that has not ended, and the look-ups of a run and
//! of the process are bounded. Each counts until its thread has ended.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use super::host_reach::{HostReach, HostReachError, resolve_addresses};
use super::keyed_permits::{KeyedPermit, KeyedPermits};

/// A look-up of a host's addresses, which blocks.
pub type HostLookup = Arc<dyn Fn(&str, u16) -> io::Result<Vec<IpAddr>> + Send + Sync>;

/// The look-ups of a process that have not ended.
#[derive(Debug)]
pub struct HostLookups {
    permits: Arc<KeyedPermits>,
    /// The look-ups by host, in small letters. A look-up that has ended has no entry.
    running: Mutex<BTreeMap<Arc<str>, RunningLookup>>,
}

/// The access of one run to the look-ups of its process.
#[derive(Clone)]
pub struct RunLookups {
    pub process: Arc<HostLookups>,
    /// The run's name, which counts its look-ups.
    pub run: Arc<str>,
    pub lookup: HostLookup,
}

/// The reason why a host's addresses are not known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HostLookupError {
    #[error(transparent)]
    Reach(#[from] Arc<HostReachError>),
    #[error("the run or its gateway looks up too many hosts")]
    Busy,
    #[error("the look-up broke off")]
    Lost,
}

/// The addresses of a host, for each reach. They are judged once, where blocking does no harm.
#[derive(Debug)]
struct ReachedAddresses {
    /// All addresses, whatever they are; none if the look-up failed.
    all: Vec<IpAddr>,
    public: Result<Vec<IpAddr>, Arc<HostReachError>>,
    named: Result<Vec<IpAddr>, Arc<HostReachError>>,
}

type RunningLookup = Shared<oneshot::Receiver<Arc<ReachedAddresses>>>;

/// The place of a look-up. Its drop ends the entry of the host and the permit.
struct LookupPlace {
    process: Arc<HostLookups>,
    host: Arc<str>,
    _permit: KeyedPermit,
}

impl HostLookups {
    /// Creates the look-ups of a process: at most `max_running` at one time, and at most `max_of_run` that one run has
    /// begun.
    pub fn new(max_running: usize, max_of_run: usize) -> Self {
        let permits = Arc::new(KeyedPermits::new(max_running, max_of_run));
        Self { permits, running: Mutex::default() }
    }

    fn lock_running(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, RunningLookup>> {
        // No code under this lock panics, and an entry must not be lost.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunLookups {
    /// Creates the access for a check of settings, which looks nothing up.
    pub fn for_check() -> Self {
        let process = Arc::new(HostLookups::new(0, 0));
        Self { process, run: Arc::from(""), lookup: system_lookup() }
    }

    /// Returns the addresses of a host that may be connected to; there is at least one. The result is of a look-up that
    /// had not ended when the caller asked.
    ///
    /// # Errors
    /// Returns [`HostLookupError::Busy`] at a bound, and otherwise the reason why the host has no such address.
    pub async fn find_addresses(
        &self,
        host: &str,
        port: u16,
        reach: HostReach,
    ) -> Result<Vec<IpAddr>, HostLookupError> {
        if let Ok(address) = host.parse() {
            // An address needs no thread, and so no place.
            let found = reach.filter_addresses(host, Ok(vec![address]));
            return found.map_err(|error| HostLookupError::Reach(Arc::new(error)));
        }
        let running = self.join_or_start(host, port)?;
        let found = running.await.map_err(|_| HostLookupError::Lost)?;
        let reached = match reach {
            HostReach::Public => &found.public,
            HostReach::Named => &found.named,
        };
        Ok(reached.clone()?)
    }

    /// Returns all addresses of a host, whatever they are; there is at least one.
    ///
    /// # Errors
    /// Returns [`HostLookupError::Busy`] at a bound, and otherwise the reason why the host has no address.
    pub async fn find_all_addresses(
        &self,
        host: &str,
        port: u16,
    ) -> Result<Vec<IpAddr>, HostLookupError> {
        if let Ok(address) = host.parse() {
            return Ok(vec![address]);
        }
        let running = self.join_or_start(host, port)?;
        let found = running.await.map_err(|_| HostLookupError::Lost)?;
        match &found.named {
            Err(error) if found.all.is_empty() => Err(Arc::clone(error).into()),
            _ => Ok(found.all.clone()),
        }
    }

    fn join_or_start(&self, host: &str, port: u16) -> Result<RunningLookup, HostLookupError> {
        let host: Arc<str> = host.to_ascii_lowercase().into();
        let mut running = self.process.lock_running();
        if let Some(open) = running.get(&host) {
            return Ok(open.clone());
        }
        let permit = self.process.permits.try_take(Some(&self.run));
        let permit = permit.ok_or(HostLookupError::Busy)?;
        let (sender, receiver) = oneshot::channel();
        let shared = receiver.shared();
        running.insert(Arc::clone(&host), shared.clone());
        drop(running);
        let place = LookupPlace { process: Arc::clone(&self.process), host, _permit: permit };
        let lookup = Arc::clone(&self.lookup);
        // The thread holds the place, because its callers come and go.
        tokio::task::spawn_blocking(move || {
            let found = lookup(&place.host, port);
            let reached = ReachedAddresses::filter_found(&place.host, found);
            // A caller that comes now begins a look-up of its own, since this result may be old by then.
            drop(place);
            let _ = sender.send(Arc::new(reached));
        });
        Ok(shared)
    }
}

impl ReachedAddresses {
    fn filter_found(host: &str, found: io::Result<Vec<IpAddr>>) -> Self {
        let copy = match &found {
            Ok(found) => Ok(found.clone()),
            Err(error) => Err(error.kind().into()),
        };
        let filter = |reach: HostReach, found| reach.filter_addresses(host, found);
        Self {
            all: found.as_ref().map_or_else(|_| vec![], Clone::clone),
            public: filter(HostReach::Public, copy).map_err(Arc::new),
            named: filter(HostReach::Named, found).map_err(Arc::new),
        }
    }
}

impl Drop for LookupPlace {
    fn drop(&mut self) {
        self.process.lock_running().remove(&self.host);
    }
}

impl fmt::Debug for RunLookups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunLookups").field("run", &self.run).finish_non_exhaustive()
    }
}

/// Returns the look-up by this machine's resolver.
pub fn system_lookup() -> HostLookup {
    Arc::new(resolve_addresses)
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    /// A resolver that is silent about the hosts `silent…` until the test lets it answer.
    #[derive(Default)]
    struct SlowResolver {
        started: AtomicUsize,
        is_open: Mutex<bool>,
        opened: Condvar,
    }

    impl SlowResolver {
        fn lookup(self: &Arc<Self>) -> HostLookup {
            let own = Arc::clone(self);
            Arc::new(move |host, _| {
                own.started.fetch_add(1, Ordering::Relaxed);
                let open = own.is_open.lock().unwrap();
                let is_silent = |open: &mut bool| host.starts_with("silent") && !*open;
                drop(own.opened.wait_while(open, is_silent).unwrap());
                Ok(vec!["127.0.0.1".parse().unwrap()])
            })
        }

        fn answer(&self) {
            *self.is_open.lock().unwrap() = true;
            self.opened.notify_all();
        }
    }

    impl RunLookups {
        async fn find(&self, host: &str) -> Result<Vec<IpAddr>, HostLookupError> {
            self.find_addresses(host, 443, HostReach::Named).await
        }

        /// Asks for a host, and leaves before the answer.
        async fn give_up(&self, host: &str) -> bool {
            let waited = tokio::time::timeout(Duration::from_millis(1), self.find(host)).await;
            !matches!(waited, Ok(Err(HostLookupError::Busy)))
        }
    }

    fn two_runs(resolver: &Arc<SlowResolver>, process: HostLookups) -> [RunLookups; 2] {
        let (process, lookup) = (Arc::new(process), resolver.lookup());
        ["a", "b"].map(|run| RunLookups {
            process: Arc::clone(&process),
            run: run.into(),
            lookup: Arc::clone(&lookup),
        })
    }

    /// G15: however many requests come and go, a silent host has one look-up, which runs share.
    #[tokio::test]
    async fn callers_of_a_host_share_a_lookup() {
        let resolver = Arc::<SlowResolver>::default();
        let [one, two] = two_runs(&resolver, HostLookups::new(8, 4));
        for _ in 0..50 {
            assert!(one.give_up("silent.example").await && two.give_up("SILENT.example").await);
        }
        let waiting = tokio::join!(one.find("silent.example"), two.find("silent.example"), async {
            // Both wait by now: the futures are polled in order.
            resolver.answer();
        });
        assert_eq!((waiting.0.unwrap().len(), waiting.1.unwrap().len()), (1, 1));
        assert_eq!(resolver.started.load(Ordering::Relaxed), 1);
        one.find("silent.example").await.unwrap();
        assert_eq!(resolver.started.load(Ordering::Relaxed), 2, "an old result is not used again");
        assert!(one.process.lock_running().is_empty());
    }

    /// G15: a look-up that its callers have left still counts. The bounds are of a run and of the process, and a run with
    /// silent hosts keeps no other run from its own.
    #[tokio::test]
    async fn lookups_at_once_are_bounded() {
        let resolver = Arc::<SlowResolver>::default();
        let [one, two] = two_runs(&resolver, HostLookups::new(3, 2));
        assert!(one.give_up("silent-1.example").await && one.give_up("silent-2.example").await);
        for host in ["silent-3.example", "other.example"] {
            assert!(matches!(one.find(host).await, Err(HostLookupError::Busy)), "{host}");
        }
        assert_eq!(two.find("other.example").await.unwrap().len(), 1);
        assert_eq!(one.find("127.0.0.1").await.unwrap().len(), 1, "an address is not looked up");
        assert!(two.give_up("silent-1.example").await, "a shared look-up needs no place");
        assert!(two.give_up("silent-4.example").await);
        assert!(matches!(two.find("other.example").await, Err(HostLookupError::Busy)));
        resolver.answer();
        while one.find("other.example").await.is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A look-up that panics ends its place, and the callers get an error.
    #[tokio::test]
    async fn a_lookup_that_breaks_off_ends_its_place() {
        let lookup: HostLookup = Arc::new(|_, _| panic!("no resolver"));
        let process = Arc::new(HostLookups::new(1, 1));
        let run = RunLookups { process, run: "a".into(), lookup };
        for _ in 0..3 {
            assert!(matches!(run.find("a.example").await, Err(HostLookupError::Lost)));
        }
    }

    /// T6: the addresses are judged for each caller's reach.
    #[tokio::test]
    async fn a_shared_lookup_is_judged_for_each_reach() {
        let resolver = Arc::<SlowResolver>::default();
        let [one, _] = two_runs(&resolver, HostLookups::new(1, 1));
        let public = one.find_addresses("a.example", 443, HostReach::Public).await;
        let is_refused =
            |error: &Arc<HostReachError>| matches!(**error, HostReachError::NotPublic { .. });
        assert!(matches!(public, Err(HostLookupError::Reach(error)) if is_refused(&error)));
        assert_eq!(one.find("a.example").await.unwrap().len(), 1);
    }
}
