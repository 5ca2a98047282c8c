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

use crate::sandbox::output::{OutputCapture, OutputStream, join_with_output};
use crate::sandbox::{SandboxError, SandboxExit, StopReason};

/// Created, and not started yet.
#[derive(Clone, Debug)]
pub(super) struct CreatedContainer {
    client: bollard::Docker,
    id: String,
}

/// What became of a start.
pub(super) enum ContainerStartOutcome {
    Running(RunningContainer),
    /// The program is not there, or is none: what a shell says with these exit codes.
    Not {
        exit_code: i64,
        message: String,
    },
}

/// Running, with its output attached.
pub(super) struct RunningContainer {
    container: CreatedContainer,
    frames: Pin<Box<dyn Frames<Item = Result<LogOutput, EngineError>> + Send>>,
}

impl CreatedContainer {
    pub(super) fn new(client: bollard::Docker, id: String) -> Self {
        Self { client, id }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Attaches first, so that the first line is not missed.
    pub(super) async fn start(self) -> Result<ContainerStartOutcome, SandboxError> {
        let engine = |doing| move |source| SandboxError::Engine { doing, source };
        let options =
            AttachContainerOptionsBuilder::default().stream(true).stdout(true).stderr(true).build();
        let attached = self.client.attach_container(&self.id, Some(options)).await;
        let attached = attached.map_err(engine("attach to the container"))?;
        match self.client.start_container(&self.id, None::<StartContainerOptions>).await {
            Ok(()) => Ok(ContainerStartOutcome::Running(RunningContainer {
                container: self,
                frames: attached.output,
            })),
            Err(source) => {
                let code = self.inspect_state().await.ok().and_then(|state| state.exit_code);
                match (code, source) {
                    (
                        Some(exit_code @ (EXIT_CANNOT_EXECUTE | EXIT_NOT_FOUND)),
                        EngineError::DockerResponseServerError { message, .. },
                    ) => Ok(ContainerStartOutcome::Not { exit_code, message }),
                    (_, source) => Err(engine("start the container")(source)),
                }
            }
        }
    }

    async fn inspect_state(&self) -> Result<ContainerState, SandboxError> {
        let engine = |source| SandboxError::Engine { doing: "look at the container", source };
        let inspect = self.client.inspect_container(&self.id, None::<InspectContainerOptions>);
        let found = timeout(INSPECT_TIMEOUT, inspect).await;
        let found =
            found.map_err(|_| SandboxError::Silent("look at a container"))?.map_err(engine)?;
        Ok(found.state.unwrap_or_default())
    }

    /// The engine hears of a kill for want of memory on another way than of the exit, and on a busy machine later: where
    /// a program was killed and not by us, it is asked again.
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

    /// Waits for the exit code.
    pub(super) async fn wait_for_exit(&self) -> Result<i64, SandboxError> {
        let engine = |source| SandboxError::Engine { doing: "wait for the container", source };
        match self.client.wait_container(&self.id, None::<WaitContainerOptions>).next().await {
            Some(Ok(exit)) => Ok(exit.status_code),
            // Every exit code but zero comes as an error.
            Some(Err(EngineError::DockerContainerWaitError { code, .. })) => Ok(code),
            Some(Err(source)) => Err(engine(source)),
            None => self
                .inspect_state()
                .await?
                .exit_code
                .ok_or(SandboxError::Silent("wait for a container")),
        }
    }

    /// Best effort: what cannot be killed is removed by force.
    async fn send_signal(&self, signal: &str) {
        let options = KillContainerOptionsBuilder::default().signal(signal).build();
        let kill = self.client.kill_container(&self.id, Some(options));
        match timeout(INSPECT_TIMEOUT, kill).await {
            Ok(Ok(())) => (),
            Ok(Err(error)) => tracing::debug!(%error, signal, "cannot signal the container"),
            Err(_) => tracing::warn!(signal, "the engine does not answer to a signal"),
        }
    }
}

impl RunningContainer {
    /// Follows the container to its end. From `until` on it is told to end, and has `grace` for it.
    pub(super) async fn follow_until_exit<W: AsyncWrite + Unpin>(
        self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let Self { container, mut frames } = self;
        let hurry = output.detach_token();
        let mut following = pin!(join_with_output(
            container.wait_for_exit(),
            copy_output(&mut frames, output),
            &hurry
        ));
        let (exit_code, cause) = tokio::select! {
            exit_code = &mut following => (Some(exit_code?), None),
            cause = until => {
                let exit_code = tokio::select! {
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
    // An error is an end as well: the exit code says more about it.
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

/// Asks politely, then not, then gives up: the removal that follows has the last word.
async fn stop_container(container: &CreatedContainer, grace: impl Future<Output = ()>) {
    container.send_signal("SIGTERM").await;
    grace.await;
    container.send_signal("SIGKILL").await;
    sleep(INSPECT_TIMEOUT).await;
}

/// What a shell says of a file that it may not execute, and of one that is not there.
const EXIT_CANNOT_EXECUTE: i64 = 126;
const EXIT_NOT_FOUND: i64 = 127;

/// 128 and SIGKILL.
const EXIT_SIGKILL: i64 = 137;

/// How often, and how far apart, the engine is asked whether it was for want of memory.
const OOM_POLL_ATTEMPTS: u32 = 6;
const OOM_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// For an answer that only makes the result better.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(5);
