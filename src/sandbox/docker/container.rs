//! One container, from its start to its end.

use std::pin::{Pin, pin};
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::errors::Error as EngineError;
use bollard::models::ContainerState;
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, InspectContainerOptions, KillContainerOptionsBuilder,
    StartContainerOptions, WaitContainerOptions,
};
use futures_util::{Stream as Frames, StreamExt};
use tokio::io::AsyncWrite;
use tokio::time::{sleep, timeout};

use super::DockerEngine;
use crate::sandbox::output::{OutputCapture, OutputStream, join_with_output};
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
    frames: Pin<Box<dyn Frames<Item = Result<LogOutput, EngineError>> + Send>>,
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
                frames: attached.output,
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
    /// Follows the container until its exit. Once `until` returns, the container receives SIGTERM, and SIGKILL after
    /// `grace`.
    pub(super) async fn follow_until_exit<W: AsyncWrite + Unpin>(
        self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let Self { container, mut frames } = self;
        let detach_token = output.detach_token();
        // The wait and the output are joined, so that the last bytes are read after the exit.
        let mut following = pin!(join_with_output(
            container.wait_for_exit(),
            copy_output(&mut frames, output),
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
        let oom_killed = container.was_oom_killed(exit_code, cause).await;
        Ok(SandboxExit { exit_code, cause, oom_killed, ..SandboxExit::default() })
    }
}

async fn copy_output<W: AsyncWrite + Unpin>(
    frames: &mut (impl Frames<Item = Result<LogOutput, EngineError>> + Unpin),
    output: &mut OutputCapture<W>,
) {
    // An error of the stream counts as its end: the exit code says more about it.
    while let Some(Ok(frame)) = frames.next().await {
        match frame {
            LogOutput::StdErr { message } => output.push(OutputStream::Stderr, &message).await,
            LogOutput::StdOut { message } | LogOutput::Console { message } => {
                output.push(OutputStream::Stdout, &message).await;
            }
            LogOutput::StdIn { .. } => (),
        }
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

/// The time for an answer that the result does not depend on.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(5);
