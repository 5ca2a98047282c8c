//! Proofs of audit logs: a limit on the proofs that run at the same time, and a cache of proofs of closed logs.
//!
//! A proof reads and hashes a whole log, up to a gigabyte. Reading order: [`ProofCache::find_proof`] answers from
//! memory; [`ProofCache::run_proof`] waits for a place and does the work on a thread that may block.
//!
//! **Invariant:** a place is taken until its proof has ended, even if the client that asked for the proof has left.

use std::collections::VecDeque;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;

use super::work_limiter::GrantWorkPermit;
use crate::telemetry::audit::seal::AuditLogSeal;

/// The cached proofs of a service, and the places for proofs that are being made.
#[derive(Debug)]
pub struct ProofCache<T> {
    permits: Arc<Semaphore>,
    /// The cached proofs of closed logs, the latest last.
    known: Mutex<VecDeque<(ProofKey, T)>>,
}

/// The facts that a proof of a closed log depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProofKey {
    pub(super) run: String,
    pub(super) seal: AuditLogSeal,
    pub(super) file: FileFingerprint,
}

/// The identity and times of a file, as its file system reports them. Every write and every replacement of the file
/// changes the fingerprint: a program cannot set the time of the last change (`ctime`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileFingerprint {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl<T: Clone> ProofCache<T> {
    /// Creates an empty cache that allows `places` proofs at the same time.
    pub fn new(places: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(places)), known: Mutex::default() }
    }

    /// Returns the cached proof of a log, if the log has not changed since.
    pub(super) fn find_proof(&self, key: &ProofKey) -> Option<T> {
        let known = self.lock_proofs();
        known.iter().find(|(other, _)| other == key).map(|(_, proof)| proof.clone())
    }

    /// Stores a proof of a closed log. It is not stored if the file changed so recently that another change could get
    /// the same timestamp.
    pub(super) fn store_proof(&self, key: ProofKey, proof: T, now: SystemTime) {
        if !key.file.is_unambiguous(now) {
            return;
        }
        let mut known = self.lock_proofs();
        // One proof for each run: a proof of an earlier state of the log is useless.
        known.retain(|(other, _)| other.run != key.run);
        if known.len() >= MAX_CACHED_PROOFS {
            known.pop_front();
        }
        known.push_back((key, proof));
    }

    /// Waits for a free place, and executes `work` on a thread that may block. The place and the grant's `turn` are
    /// released when the work has ended, not earlier.
    ///
    /// # Errors
    /// Returns an error if the work panics.
    pub(super) async fn run_proof<P: Send + 'static>(
        &self,
        turn: Option<GrantWorkPermit>,
        work: impl FnOnce() -> P + Send + 'static,
    ) -> Result<P, tokio::task::JoinError> {
        let place = Arc::clone(&self.permits).acquire_owned().await;
        tokio::task::spawn_blocking(move || {
            // The blocking thread owns both permits. If the client leaves, this future is dropped, but the thread and
            // its permits go on.
            let _held = (turn, place);
            work()
        })
        .await
    }

    fn lock_proofs(&self) -> MutexGuard<'_, VecDeque<(ProofKey, T)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileFingerprint {
    pub(super) fn from_metadata(file: &Metadata) -> Self {
        Self {
            device: file.dev(),
            inode: file.ino(),
            length: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    /// Returns true if the last change is so long ago that a further change would have another timestamp.
    fn is_unambiguous(&self, now: SystemTime) -> bool {
        let (seconds, _) = self.changed;
        let changed = Duration::from_secs(seconds.max(0).cast_unsigned());
        now.duration_since(SystemTime::UNIX_EPOCH + changed)
            .is_ok_and(|age| age >= MTIME_RESOLUTION)
    }
}

/// The maximum number of cached proofs, of less than a kilobyte each. Our choice: more than the runs that people look
/// at in an hour.
const MAX_CACHED_PROOFS: usize = 256;

/// The age from which a change time is unambiguous. File systems count time in steps of some milliseconds, the coarsest
/// in steps of two seconds.
const MTIME_RESOLUTION: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::mpsc;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::service::api::work_limiter::GrantWorkLimiter;

    /// A client that repeatedly requests a proof and disconnects occupies no more places than a client that waits.
    #[tokio::test]
    async fn a_place_is_taken_until_its_proof_has_ended() {
        let proofs = Arc::new(ProofCache::<u32>::new(1));
        let turns = GrantWorkLimiter::new(1);
        let turn = turns.acquire_permit("one").await;
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, may_end) = mpsc::channel::<()>();
        let ours = Arc::clone(&proofs);
        let work = move || {
            begun.send(()).unwrap();
            may_end.recv()
        };
        tokio::select! {
            biased;
            _ = ours.run_proof(turn, work) => panic!("it cannot end yet"),
            begun = has_begun => begun.unwrap(),
        }
        assert_eq!(proofs.permits.available_permits(), 0);
        assert!(
            turns.acquire_permit("one").now_or_never().is_none(),
            "the grant has its turn back"
        );
        end.send(()).unwrap();
        assert_eq!(proofs.run_proof(None, || 7).await.unwrap(), 7);
    }

    #[test]
    fn a_log_that_has_changed_is_proved_again() {
        let folder = tempfile::tempdir().unwrap();
        let (log, other) = (folder.path().join("log"), folder.path().join("other"));
        fs::write(&log, "one").unwrap();
        fs::write(&other, "two").unwrap();
        let later = SystemTime::now() + Duration::from_mins(1);
        let proofs = ProofCache::new(1);
        let key = |path| {
            key(
                "run-1",
                FileFingerprint::from_metadata(&File::open(path).unwrap().metadata().unwrap()),
            )
        };
        proofs.store_proof(key(&log), 1, SystemTime::now());
        assert_eq!(proofs.find_proof(&key(&log)), None, "it may change within the same tick");
        proofs.store_proof(key(&log), 1, later);
        assert_eq!(proofs.find_proof(&key(&log)), Some(1));
        assert_eq!(proofs.find_proof(&key(&other)), None);
        let sealed = key(&log);
        let rewritten =
            ProofKey { seal: AuditLogSeal { records: 8, ..sealed.seal.clone() }, ..sealed };
        assert_eq!(proofs.find_proof(&rewritten), None);

        fs::rename(&other, &log).unwrap();
        assert_eq!(proofs.find_proof(&key(&log)), None, "another file has its name");
        proofs.store_proof(key(&log), 2, later);
        assert_eq!(proofs.lock_proofs().len(), 1, "one proof of each run");
        let before = key(&log);
        let written = fs::metadata(&log).unwrap().modified().unwrap();
        while FileFingerprint::from_metadata(&fs::metadata(&log).unwrap()) == before.file {
            fs::write(&log, "six").unwrap();
            // A forger of a log would set this time back.
            File::options().append(true).open(&log).unwrap().set_modified(written).unwrap();
        }
        assert_eq!(proofs.find_proof(&key(&log)), None);
    }

    #[test]
    fn a_bounded_number_of_proofs_is_kept() {
        let proofs = ProofCache::new(1);
        let file =
            FileFingerprint { device: 1, inode: 1, length: 1, modified: (1, 0), changed: (1, 0) };
        for run in 0..=MAX_CACHED_PROOFS {
            proofs.store_proof(key(&format!("run-{run}"), file), run, SystemTime::now());
        }
        assert_eq!(proofs.lock_proofs().len(), MAX_CACHED_PROOFS);
        assert_eq!(proofs.find_proof(&key("run-0", file)), None);
        assert_eq!(proofs.find_proof(&key("run-1", file)), Some(1));
    }

    fn key(run: &str, file: FileFingerprint) -> ProofKey {
        let seal = AuditLogSeal { records: 7, head: String::new(), public_key: String::new() };
        ProofKey { run: run.to_owned(), seal, file }
    }
}
