//! The thread that makes records survive a power cut.
//!
//! One `fdatasync` covers all records that were written before it began, and all their callers wait for it together.
//! While it runs, the next group of records gathers. This is group commit.
//!
//! **Invariant:** after a failed `fdatasync` no record counts as durable any more. The kernel may have dropped the
//! pages and would report success the next time. Only a new process that reads the file again can continue.

use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::watch;

/// A thread that syncs one file whenever the file has new bytes.
#[derive(Debug)]
pub(super) struct FsyncThread {
    shared: Arc<FsyncShared>,
    progress: watch::Receiver<FsyncProgress>,
    thread: Option<JoinHandle<()>>,
}

/// An error for a failed `fdatasync`, this one or an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FsyncError;

type FsyncProgress = Result<u64, FsyncError>;

#[derive(Debug, Default)]
struct FsyncShared {
    wanted: Mutex<FsyncRequest>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct FsyncRequest {
    /// The end of the written records, in bytes from the start of the file.
    written: u64,
    stopping: bool,
}

impl FsyncThread {
    /// Starts the thread, which waits at least `pause` between two syncs.
    pub(super) fn start_thread(file: Arc<File>, pause: Duration) -> io::Result<Self> {
        let shared = Arc::new(FsyncShared::default());
        let (sender, progress) = watch::channel(Ok(0));
        let worker_shared = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("audit-sync".into())
            .spawn(move || run_fsync_loop(&worker_shared, &file, pause, &sender))?;
        Ok(Self { shared, progress, thread: Some(thread) })
    }

    /// Requests a sync of the first `end` bytes. Does not wait.
    pub(super) fn request_sync(&self, end: u64) {
        let mut wanted = self.shared.lock();
        if end > wanted.written {
            wanted.written = end;
            drop(wanted);
            self.shared.wake.notify_one();
        }
    }

    /// Returns once the first `end` bytes are on disk.
    pub(super) async fn wait_synced(&self, end: u64) -> Result<(), FsyncError> {
        let mut progress = self.progress.clone();
        let arrived =
            |progress: &FsyncProgress| progress.is_err() || progress.is_ok_and(|at| at >= end);
        // The thread sends its last result before it drops the sender.
        progress.wait_for(arrived).await.map_or(Err(FsyncError), |progress| progress.map(drop))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.progress.borrow().is_err()
    }
}

impl Drop for FsyncThread {
    /// Waits for the last sync.
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic, and a destructor has no caller to report to.
            let _ = thread.join();
        }
    }
}

impl FsyncShared {
    fn lock(&self) -> MutexGuard<'_, FsyncRequest> {
        // The state is two plain values, so a panic cannot leave it inconsistent.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for bytes to sync. Returns `None` if all bytes are synced and the thread should end.
    fn wait_for_request(&self, done: u64) -> Option<u64> {
        let idle = |wanted: &mut FsyncRequest| wanted.written <= done && !wanted.stopping;
        let wanted =
            self.wake.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        (wanted.written > done).then_some(wanted.written)
    }

    fn sleep_between_syncs(&self, pause: Duration) {
        // The thread continues after a timeout and after a wake-up, so the result does not matter.
        drop(self.wake.wait_timeout_while(self.lock(), pause, |wanted| !wanted.stopping));
    }
}

/// Syncs the file whenever there are new records, until the log is closed or a sync fails.
fn run_fsync_loop(
    shared: &FsyncShared,
    file: &File,
    pause: Duration,
    progress: &watch::Sender<FsyncProgress>,
) {
    let mut done = 0;
    while let Some(end) = shared.wait_for_request(done) {
        if let Err(error) = file.sync_data() {
            tracing::error!(%error, "the audit log cannot be synced; nothing more is admitted");
            progress.send_modify(|progress| *progress = Err(FsyncError));
            return;
        }
        // Records that arrived during the sync are in the next one.
        done = end;
        progress.send_modify(|progress| *progress = Ok(done));
        if !pause.is_zero() {
            shared.sleep_between_syncs(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_reports_how_far_the_file_is_durable() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        let syncer = FsyncThread::start_thread(Arc::new(file), Duration::ZERO).unwrap();
        syncer.request_sync(10);
        assert_eq!(syncer.wait_synced(10).await, Ok(()));
        assert!(!syncer.has_failed());
    }

    /// `/dev/null` exists everywhere, can be opened, and cannot be synced.
    #[tokio::test]
    async fn a_failed_sync_fails_everyone_from_then_on() {
        let file = File::options().write(true).open("/dev/null").unwrap();
        let syncer = FsyncThread::start_thread(Arc::new(file), Duration::ZERO).unwrap();
        syncer.request_sync(10);
        assert_eq!(syncer.wait_synced(10).await, Err(FsyncError));
        syncer.request_sync(20);
        assert_eq!(syncer.wait_synced(20).await, Err(FsyncError));
        assert!(syncer.has_failed());
    }

    #[tokio::test]
    async fn what_was_written_last_is_synced_before_the_thread_ends() {
        let syncer =
            FsyncThread::start_thread(Arc::new(tempfile::tempfile().unwrap()), PAUSE).unwrap();
        syncer.request_sync(1);
        syncer.wait_synced(1).await.unwrap();
        syncer.request_sync(2);
        let progress = syncer.progress.clone();
        drop(syncer);
        assert_eq!(*progress.borrow(), Ok(2));
    }

    /// The pause is longer than any test: only the end of the log can end it.
    const PAUSE: Duration = Duration::from_hours(1);
}
