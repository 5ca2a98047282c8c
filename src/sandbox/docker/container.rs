//! One container, from its start to its end.

use std::pin::pin;
use std::time::Duration;

use bollard::errors::Error as EngineError;
use bollard::models::ContainerState;
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, InspectContainerOptions, KillContainerOptionsBuilder,
    StartContainerOptions, WaitContainerOptions,
};
use futures_util::StreamExt;
use tokio::io::AsyncWrite;
use tokio::time::{sleep, timeout};

use super::DockerEngine;
use super::attached_output::{AttachedOutput, OutputEnd, OutputEndSlot, parse_engine_time};
use crate::sandbox::output::{OutputCapture, join_with_output};
use crate::sandbox::{SandboxError, SandboxExit, StopReason};

/// A container that is created, and not started yet.
#[derive(Clone, Debug)]
pub(super) struct CreatedContainer {
    docker: DockerEngine,
    id: String,
}

/// The outcome of a start.
pub(super) enum ContainerStartOutcome {
    Running(RunningContainer),
    /// The program does not exist or cannot be executed; the exit code is the one that a shell uses (127 or 126).
    NotStarted {
        exit_code: i64,
        message: String,
    },
}

/// A running container with its output attached.
pub(super) struct RunningContainer {
    container: CreatedContainer,
    output: AttachedOutput,
}

impl CreatedContainer {
    pub(super) fn new(docker: DockerEngine, id: String) -> Self {
        Self { docker, id }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Starts the container. The output is attached first, so that its first line is not missed.
    pub(super) async fn start(self) -> Result<ContainerStartOutcome, SandboxError> {
        let options =
            AttachContainerOptionsBuilder::default().stream(true).stdout(true).stderr(true).build();
        let attached = self.docker.client.attach_container(&self.id, Some(options)).await;
        let attached = attached.map_err(self.docker.failure("attach to the container"))?;
        match self.docker.client.start_container(&self.id, None::<StartContainerOptions>).await {
            Ok(()) => Ok(ContainerStartOutcome::Running(RunningContainer {
                container: self,
                output: AttachedOutput::new(attached.output),
            })),
            Err(source) => {
                // The engine refuses the start of a missing program; the exit code tells this case from the
                // engine's own errors.
                let code = self.inspect_state().await.ok().and_then(|state| state.exit_code);
                match (code, source) {
                    (
                        Some(exit_code @ (EXIT_CANNOT_EXECUTE | EXIT_NOT_FOUND)),
                        EngineError::DockerResponseServerError { message, .. },
                    ) => Ok(ContainerStartOutcome::NotStarted { exit_code, message }),
                    (_, source) => Err(self.docker.failure("start the container")(source)),
                }
            }
        }
    }

    async fn inspect_state(&self) -> Result<ContainerState, SandboxError> {
        let inspect =
            self.docker.client.inspect_container(&self.id, None::<InspectContainerOptions>);
        let found = timeout(INSPECT_TIMEOUT, inspect).await;
        let found = found.map_err(|_| self.docker.timeout_error("inspect a container"))?;
        let found = found.map_err(self.docker.failure("inspect the container"))?;
        Ok(found.state.unwrap_or_default())
    }

    /// Returns true if the kernel killed the container for lack of memory. The engine learns of such a kill through
    /// another channel than of the exit, and on a busy machine later. So the engine is asked several times if the
    /// program was killed without a stop reason.
    async fn was_oom_killed(&self, exit_code: Option<i64>, cause: Option<StopReason>) -> bool {
        let tries =
            if exit_code == Some(EXIT_SIGKILL) && cause.is_none() { OOM_POLL_ATTEMPTS } else { 1 };
        for again in 1..=tries {
            if self.inspect_state().await.is_ok_and(|state| state.oom_killed == Some(true)) {
                return true;
            }
            if again < tries {
                sleep(OOM_POLL_INTERVAL).await;
            }
        }
        false
    }

    /// Waits for the container's end, and returns its exit code.
    pub(super) async fn wait_for_exit(&self) -> Result<i64, SandboxError> {
        match self.docker.client.wait_container(&self.id, None::<WaitContainerOptions>).next().await
        {
            Some(Ok(exit)) => Ok(exit.status_code),
            // The client library reports every exit code but zero as an error.
            Some(Err(EngineError::DockerContainerWaitError { code, .. })) => Ok(code),
            Some(Err(source)) => Err(self.docker.failure("wait for the container")(source)),
            None => self
                .inspect_state()
                .await?
                .exit_code
                .ok_or_else(|| self.docker.timeout_error("wait for a container")),
        }
    }

    /// Waits for the container's end as [`wait_for_exit`](Self::wait_for_exit) does, and returns earlier, with an error, if
    /// the output ends and the container runs on.
    async fn wait_for_exit_with_output(&self, slot: &OutputEndSlot) -> Result<i64, SandboxError> {
        // The box keeps the future of every run small.
        let lost = Box::pin(async {
            slot.wait_ended().await;
            loop {
                sleep(OUTPUT_END_TIMEOUT).await;
                // Without an answer the engine is asked again; the request for the exit code fails meanwhile.
                if self.inspect_state().await.is_ok_and(|state| state.running == Some(true)) {
                    return self.output_lost("it has ended, and the sandbox runs on".to_owned());
                }
            }
        });
        tokio::select! {
            biased;
            exit_code = self.wait_for_exit() => exit_code,
            error = lost => Err(error),
        }
    }

    /// Checks the output of a container that has just ended by itself. The container's first process keeps the output
    /// open until its own end, so an earlier end of the output is a loss. The engine has no copy of what was lost.
    async fn check_output(&self, end: Option<&OutputEnd>) -> Result<(), SandboxError> {
        let Some(OutputEnd { at, time, broken }) = end else { return Ok(()) };
        if let Some(why) = broken {
            return Err(self.output_lost(why.clone()));
        }
        if at.elapsed() <= MAX_END_SKEW {
            return Ok(());
        }
        // A slow engine reports the exit late, too. So the engine's own time of the exit counts.
        let finished = self.inspect_state().await?.finished_at;
        let finished = finished.and_then(|text| parse_engine_time(&text));
        let after = finished.and_then(|finished| finished.duration_since(*time).ok());
        match after {
            Some(after) if after > MAX_END_SKEW => {
                let after = humantime::format_duration(Duration::from_secs(after.as_secs()));
                Err(self.output_lost(format!("it has ended {after} before the sandbox")))
            }
            _ => Ok(()),
        }
    }

    fn output_lost(&self, why: String) -> SandboxError {
        SandboxError::OutputLost { engine: self.docker.name, why }
    }

    /// Sends a signal to the container, as far as possible: the removal that follows kills every container.
    async fn send_signal(&self, signal: &str) {
        let options = KillContainerOptionsBuilder::default().signal(signal).build();
        let kill = self.docker.client.kill_container(&self.id, Some(options));
        match timeout(INSPECT_TIMEOUT, kill).await {
            Ok(Ok(())) => (),
            Ok(Err(error)) => tracing::debug!(%error, signal, "cannot signal the container"),
            Err(_) => tracing::warn!(signal, "the engine does not answer to a signal"),
        }
    }
}

impl RunningContainer {
    /// Returns true if the engine still sends the container's output, as far as this process knows without waiting.
    pub(super) fn is_attached(&self) -> bool {
        self.output.is_open()
    }

    /// Follows the container until its exit. Once `until` returns, the container receives SIGTERM, and SIGKILL after
    /// `grace`.
    pub(super) async fn follow_until_exit<W: AsyncWrite + Unpin>(
        self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let Self { container, output: attached } = self;
        let (detach_token, slot) = (output.detach_token(), OutputEndSlot::default());
        // The wait and the output are joined, so that the last bytes are read after the exit.
        let mut following = pin!(join_with_output(
            container.wait_for_exit_with_output(&slot),
            attached.copy_to(output, &slot),
            &detach_token
        ));
        let (exit_code, cause) = tokio::select! {
            exit_code = &mut following => (Some(exit_code?), None),
            cause = until => {
                let exit_code = tokio::select! {
                    // The output is still read while the container stops, or a full pipe could delay its end.
                    exit_code = &mut following => exit_code.ok(),
                    () = stop_container(&container, grace) => None,
                };
                (exit_code, Some(cause))
            }
        };
        // A run that was stopped has an error code already.
        if cause.is_none() {
            Box::pin(container.check_output(slot.end())).await?;
        }
        let oom_killed = container.was_oom_killed(exit_code, cause).await;
        Ok(SandboxExit { exit_code, cause, oom_killed, ..SandboxExit::default() })
    }
}

/// Sends SIGTERM, after the grace SIGKILL, and then waits a limited time: the removal that follows kills the container.
async fn stop_container(container: &CreatedContainer, grace: impl Future<Output = ()>) {
    container.send_signal("SIGTERM").await;
    grace.await;
    container.send_signal("SIGKILL").await;
    sleep(INSPECT_TIMEOUT).await;
}

/// The exit code of a shell for a file that it may not execute.
const EXIT_CANNOT_EXECUTE: i64 = 126;
/// The exit code of a shell for a file that does not exist.
const EXIT_NOT_FOUND: i64 = 127;

/// The exit code after SIGKILL: 128 and the signal's number 9.
const EXIT_SIGKILL: i64 = 137;

/// The maximum number of requests for the OOM state after a kill.
const OOM_POLL_ATTEMPTS: u32 = 6;
/// The interval between these requests for the OOM state.
const OOM_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The time after the end of the output in which an engine has to notice the exit. Our choice: an engine on a busy machine
/// takes a second or two.
const OUTPUT_END_TIMEOUT: Duration = Duration::from_secs(10);

/// The time by which the output of a container may end before the container, by the clocks of this process and of the
/// engine. Our choice.
const MAX_END_SKEW: Duration = Duration::from_secs(1);

/// The time for an answer that the result does not depend on.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(5);
