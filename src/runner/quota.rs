//! How much a run's workspace may hold, where it is a directory that is made for it.
//!
//! Not every file system has quotas, and a directory has none of its own. So it is measured: before a run, and from time
//! to time while it runs, and when its program has ended. What is written between two looks is not prevented, and what was deleted while it is open is not
//! seen, until the run ends.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::base::dir_tree;

/// A workspace, and its bound.
#[derive(Clone, Debug)]
pub(super) struct WorkspaceQuota {
    path: PathBuf,
    most: u64,
}

/// It holds more than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the workspace holds more than {}, which is as much as it may (`max_workspace` of the limits)", HumanBytes(*most))]
pub struct QuotaExceededError {
    pub(super) most: u64,
}

impl WorkspaceQuota {
    pub(super) fn new(path: PathBuf, most: u64) -> Self {
        Self { path, most }
    }

    /// # Errors
    /// It holds more than it may. What cannot be measured is told, and let be.
    pub(super) async fn check(&self) -> Result<(), QuotaExceededError> {
        self.measure().await.map(drop)
    }

    /// As [`check`](Self::check); returns the processor time that it took. How long it waited for a thread or for a
    /// processor is not the workspace's doing, and no reason to look less often.
    async fn measure(&self) -> Result<Duration, QuotaExceededError> {
        let Self { path, most } = self.clone();
        let measure = move || {
            let begun = thread_time();
            let measured = dir_tree::disk_usage(&path, most);
            (measured, thread_time().saturating_sub(begun))
        };
        let (measured, took) = match spawn_blocking(measure).await {
            Ok((measured, took)) => (measured, took),
            Err(error) => (Err(error.into()), Duration::ZERO),
        };
        match measured {
            Ok(bytes) if bytes > most => Err(QuotaExceededError { most }),
            Ok(_) => Ok(took),
            Err(error) => {
                tracing::warn!(%error, path = %self.path.display(), "a workspace cannot be measured");
                Ok(took)
            }
        }
    }

    /// Returns when it holds more than it may.
    pub(super) async fn wait_until_exceeded(&self) -> QuotaExceededError {
        loop {
            match self.measure().await {
                Ok(took) => {
                    sleep((took * POLL_BACKOFF_FACTOR).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL))
                        .await;
                }
                Err(exceeded) => return exceeded,
            }
        }
    }
}

/// The processor time of this thread.
fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// For people: `4 GiB`, `1.5 MiB`.
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

/// Between two looks.
const MIN_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A look at a million files takes its time; the pause after it is so many times that,
const POLL_BACKOFF_FACTOR: u32 = 20;

/// and never longer than this.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(5);
