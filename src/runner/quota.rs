//! The bound of a run's workspace, if the workspace is a directory that was made for the run.
//!
//! Not every file system has quotas, and a directory has no quota of its own. So the runner measures the workspace:
//! before a run in a persistent workspace, periodically during the run, and after the program has ended. A measurement
//! does not prevent a write between two measurements. It does not count a deleted file that a process still has open.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::base::dir_tree;

/// A workspace and its bound in bytes.
#[derive(Clone, Debug)]
pub(super) struct WorkspaceQuota {
    path: PathBuf,
    max_bytes: u64,
}

/// The error of a workspace that exceeds its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the workspace holds more than {}, which is as much as it may (`max_workspace` of the limits)", HumanBytes(*max_bytes))]
pub struct QuotaExceededError {
    pub(super) max_bytes: u64,
}

impl WorkspaceQuota {
    pub(super) fn new(path: PathBuf, max_bytes: u64) -> Self {
        Self { path, max_bytes }
    }

    /// Checks the size of the workspace. Logs a failed measurement and treats the workspace as within its bound.
    ///
    /// # Errors
    /// Returns an error if the workspace exceeds its bound.
    pub(super) async fn check(&self) -> Result<(), QuotaExceededError> {
        self.measure().await.map(drop)
    }

    /// Checks the size as [`check`](Self::check) does, and returns the processor time of the measurement. The time
    /// spent waiting for a thread or a processor does not count: a busy machine is no reason to measure less often.
    async fn measure(&self) -> Result<Duration, QuotaExceededError> {
        let Self { path, max_bytes } = self.clone();
        let measure = move || {
            let start = thread_time();
            let measured = dir_tree::disk_usage(&path, max_bytes);
            (measured, thread_time().saturating_sub(start))
        };
        let (measured, took) = match spawn_blocking(measure).await {
            Ok((measured, took)) => (measured, took),
            Err(error) => (Err(error.into()), Duration::ZERO),
        };
        match measured {
            Ok(bytes) if bytes > max_bytes => Err(QuotaExceededError { max_bytes }),
            Ok(_) => Ok(took),
            Err(error) => {
                tracing::warn!(%error, path = %self.path.display(), "a workspace cannot be measured");
                Ok(took)
            }
        }
    }

    /// Waits until the workspace exceeds its bound.
    pub(super) async fn wait_until_exceeded(&self) -> QuotaExceededError {
        loop {
            match self.measure().await {
                Ok(took) => {
                    // An expensive measurement is followed by a longer pause, within the two bounds.
                    sleep((took * POLL_BACKOFF_FACTOR).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL))
                        .await;
                }
                Err(exceeded) => return exceeded,
            }
        }
    }
}

/// Returns the processor time of this thread.
fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// A number of bytes, displayed with a unit and at most one digit after the point: `4 GiB`, `1.5 MiB`.
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    #[expect(clippy::cast_precision_loss, reason = "one digit after the point is shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0 as f64, "bytes");
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if number < 1024.0 {
                break;
            }
            (number, unit) = (number / 1024.0, larger);
        }
        let shown = format!("{number:.1}");
        write!(f, "{} {unit}", shown.strip_suffix(".0").unwrap_or(&shown))
    }
}

/// The minimum time between two measurements (our choice).
const MIN_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The ratio of the pause after a measurement to the measurement's processor time (our choice). Measuring a million
/// files takes a noticeable time.
const POLL_BACKOFF_FACTOR: u32 = 20;

/// The maximum time between two measurements (our choice).
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(5);
