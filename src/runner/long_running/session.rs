//! One run's time in a resident sandbox.

use std::pin::pin;

use tokio::io::AsyncWrite;
use tokio::time::Instant;

use super::{LongRunningEntry, LongRunningEntryGuard, LongRunningPoolLimits};
use crate::sandbox::output::OutputCapture;
use crate::sandbox::{LongRunningSandbox, SandboxError, SandboxExit, SandboxSpec, StopReason};

/// As long as it lives, the key's sandbox and workspace are this run's.
pub(in crate::runner) struct SandboxSession {
    held: LongRunningEntryGuard,
    terms: LongRunningPoolLimits,
    spec: SandboxSpec,
}

impl SandboxSession {
    pub(super) fn new(
        held: LongRunningEntryGuard,
        terms: LongRunningPoolLimits,
        spec: SandboxSpec,
    ) -> Self {
        Self { held, terms, spec }
    }

    /// Runs it, in a sandbox that is made first if there is none that is well. As with a sandbox of the run's own, the
    /// time for that is the run's.
    pub(in crate::runner) async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let begun = Instant::now();
        let mut until = pin!(until);
        let Self { held, terms, spec } = self;
        let stay = held.as_mut().expect("a turn is in a stay");
        let mut cause = None;
        let stop = async { cause = Some(until.as_mut().await) };
        let made = stay.ensure_sandbox(terms, spec.limits.max_runtime, stop).await;
        if let Some(cause) = cause {
            return Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() });
        }
        made?;
        let made = begun.elapsed();
        let resident = stay.resident.as_mut().expect("it was made");
        let ended = Box::pin(resident.run(spec, output, until)).await;
        // The kernel may have killed something that is not the run's own to lose.
        let is_oom = ended.as_ref().is_ok_and(|ended| ended.oom_killed);
        stay.finish_run(terms, is_oom).await;
        ended.map(|ended| SandboxExit { start: ended.start.map(|start| made + start), ..ended })
    }
}

impl LongRunningEntry {
    /// What is no good for another run is taken away at once, but for the directory: the run's gateway still has its
    /// socket there.
    async fn finish_run(&mut self, terms: &LongRunningPoolLimits, is_oom: bool) {
        self.runs += 1;
        self.used = Instant::now();
        self.home.mark_used();
        let is_ready = self.resident.as_ref().is_some_and(LongRunningSandbox::is_ready);
        let is_good = is_ready && !is_oom;
        if is_good && !self.is_expired(terms) {
            return;
        }
        if let Some(resident) = self.resident.take() {
            tracing::info!(resident = self.id, is_good, "a resident sandbox has had its time");
            Box::pin(resident.remove()).await;
        }
        self.seat = None;
    }
}
