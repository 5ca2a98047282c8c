//! A session: one run's exclusive use of a long-running sandbox.

use std::pin::pin;

use tokio::io::AsyncWrite;
use tokio::time::Instant;

use super::{LongRunningEntry, LongRunningEntryGuard, LongRunningPoolLimits};
use crate::sandbox::output::OutputCapture;
use crate::sandbox::{LongRunningSandbox, SandboxError, SandboxExit, SandboxSpec, StopReason};

/// The exclusive use of a key's sandbox and workspace by one run, as long as the value lives.
pub(in crate::runner) struct SandboxSession {
    entry: LongRunningEntryGuard,
    limits: LongRunningPoolLimits,
    spec: SandboxSpec,
}

impl SandboxSession {
    pub(super) fn new(
        entry: LongRunningEntryGuard,
        limits: LongRunningPoolLimits,
        spec: SandboxSpec,
    ) -> Self {
        Self { entry, limits, spec }
    }

    /// Runs the program. First starts a sandbox if no healthy sandbox exists. The start counts as part of the run's
    /// time, as with a sandbox of the run's own.
    pub(in crate::runner) async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let start_time = Instant::now();
        let mut until = pin!(until);
        let Self { entry, limits, spec } = self;
        let entry = entry.as_mut().expect("a turn is in a stay");
        // `until` may end the start of the sandbox, too. Then `cause` holds the reason, and the start's error, which
        // is only a consequence, is ignored.
        let mut cause = None;
        let stop = async { cause = Some(until.as_mut().await) };
        let started = entry.ensure_sandbox(limits, spec.limits.max_runtime, stop).await;
        if let Some(cause) = cause {
            return Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() });
        }
        started?;
        let started = start_time.elapsed();
        let sandbox = entry.sandbox.as_mut().expect("the session has made its sandbox");
        let ended = Box::pin(sandbox.run(spec, output, until)).await;
        // The kernel may have killed a process of the sandbox itself, so the sandbox is replaced after such a kill.
        let is_oom = ended.as_ref().is_ok_and(|ended| ended.oom_killed);
        entry.finish_run(limits, is_oom).await;
        ended.map(|ended| SandboxExit { start: ended.start.map(|start| started + start), ..ended })
    }
}

impl LongRunningEntry {
    /// Records the end of a run. Removes a dirty or expired sandbox at once, but not its directory, because the run's
    /// gateway still has its socket there.
    async fn finish_run(&mut self, terms: &LongRunningPoolLimits, is_oom: bool) {
        self.runs += 1;
        self.used = Instant::now();
        self.workspace.mark_used();
        let is_ready = self.sandbox.as_ref().is_some_and(LongRunningSandbox::is_ready);
        let is_good = is_ready && !is_oom;
        if is_good && !self.is_expired(terms) {
            return;
        }
        if let Some(sandbox) = self.sandbox.take() {
            tracing::info!(
                sandbox = self.id,
                is_good,
                "a long-running sandbox is removed after its run"
            );
            Box::pin(sandbox.remove()).await;
        }
        self.permit = None;
    }
}
