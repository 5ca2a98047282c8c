//! The bound of a run's workspace, if the workspace is a directory that was made for the run.
//!
//! Not every file system has quotas, and a directory has no quota of its own. So the runner measures the workspace:
//! before a run in a persistent workspace, periodically until the run's last call has ended, and then once more. A
//! job of a tool may write to the workspace after the program has ended. A measurement does not prevent a write between
//! two measurements. It does not count a deleted file that a process still has open.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::base::dir_tree;
use crate::gateway::process::RunShutdown;
use crate::gateway::run::AgentRun;
use crate::sandbox::{SandboxError, SandboxExit, StopReason};

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
                Ok(took) => sleep(pause_after(took)).await,
                Err(exceeded) => return exceeded,
            }
        }
    }
}

/// Waits until the last call of the run has ended, and adds the last measurements of the workspace to the run's end. A
/// job of a tool may write to the workspace until then. A workspace that exceeds its bound ends the open calls. A run
/// that was stopped for another reason keeps that reason.
pub(super) async fn check_drained(
    ended: Result<SandboxExit, SandboxError>,
    quota: Option<&WorkspaceQuota>,
    closing: &RunShutdown,
    run: Option<&AgentRun>,
) -> Result<SandboxExit, SandboxError> {
    let Some(quota) = quota else {
        closing.calls_ended.cancelled().await;
        return ended;
    };
    let (mut is_full, mut pause) = (false, MIN_POLL_INTERVAL);
    while timeout(pause, closing.calls_ended.cancelled()).await.is_err() {
        if let Ok(took) = quota.measure().await {
            pause = pause_after(took);
        } else {
            is_full = true;
            // A call that begins after the others were aborted is aborted in the next turn.
            if let Some(run) = run {
                run.control.abort_calls();
            }
        }
    }
    // The periodic measurements missed what was written last.
    is_full = is_full || quota.check().await.is_err();
    match ended {
        Ok(ended @ SandboxExit { cause: None, .. }) if is_full => {
            Ok(SandboxExit { cause: Some(StopReason::WorkspaceFull), ..ended })
        }
        ended => ended,
    }
}

/// Returns the pause after a measurement. An expensive measurement is followed by a longer pause, within the two bounds.
fn pause_after(took: Duration) -> Duration {
    (took * POLL_BACKOFF_FACTOR).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL)
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
