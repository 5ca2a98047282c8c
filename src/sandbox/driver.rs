//! The drivers that make a sandbox, and one handle over both. A sandbox and its possible ends are the same for every
//! driver.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::io::AsyncWrite;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::output::OutputCapture;
use super::slot_claim::SlotClaim;
use super::spec::{RootSource, SandboxSpec};
use super::{
    SandboxError, SandboxExit, SandboxRequest, SandboxStartOutcome, StopReason, docker, embedded,
};

/// A driver that makes sandboxes on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxDriver {
    /// Makes a container of the engine that listens on this socket.
    Docker { socket: PathBuf },
    /// Makes a container without an engine; the machine needs nothing else installed.
    Embedded(embedded::EmbeddedDriverConfig),
}

impl SandboxDriver {
    /// Returns the name by which the operator chooses the driver.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Docker { .. } => "docker",
            Self::Embedded(_) => "embedded",
        }
    }

    /// Checks that this driver can make a sandbox of this specification.
    ///
    /// # Errors
    /// Returns [`SandboxError::InvalidSpec`] if the driver does not support a part of `spec`, and the error of
    /// [`embedded::check_limits_available`] if the embedded driver cannot set the limits.
    pub fn check(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
        let wrong = |subject, value: String, rule| {
            Err(SandboxError::InvalidSpec { what: subject, value, rule })
        };
        match (self, &spec.root) {
            (Self::Docker { .. }, RootSource::Directory(_) | RootSource::Host) => {
                wrong("the root", spec.root.to_string(), "the driver `docker` needs an image")
            }
            (Self::Embedded(_), RootSource::Image(image)) => wrong(
                "the root",
                image.clone(),
                "the driver `embedded` knows no images; give an unpacked root, or none",
            ),
            (Self::Embedded(settings), RootSource::Directory(_) | RootSource::Host) => {
                match spec.volumes.first() {
                    Some(volume) => wrong(
                        "a volume",
                        volume.name.clone(),
                        "the driver `embedded` has none; give a directory as a mount",
                    ),
                    None => embedded::check_limits_available(settings),
                }
            }
            (Self::Docker { .. }, RootSource::Image(_)) => Ok(()),
        }
    }

    /// Makes a sandbox and [runs](SandboxHandle::run) the sandbox.
    ///
    /// # Errors
    /// Returns an error if the sandbox cannot be made, or is lost before its end is known.
    pub async fn run<W: AsyncWrite + Unpin>(
        &self,
        request: &SandboxRequest,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        Box::pin(SandboxHandle::new(self, request.clone())?.run(output, until)).await
    }
}

/// A sandbox, from before its creation until its removal.
pub struct SandboxHandle {
    sandbox: DriverSandbox,
    request: SandboxRequest,
    /// The claim that is still to be sent, if the sandbox was started ahead as a warm slot.
    claim: Option<SlotClaim>,
    force_stop: CancellationToken,
}

/// The sandbox's state in the driver that makes it.
enum DriverSandbox {
    Docker(docker::DockerSandbox),
    Embedded(embedded::EmbeddedSandbox),
}

impl SandboxHandle {
    /// Creates a handle; the sandbox itself is not made yet.
    ///
    /// # Errors
    /// Returns an error if the driver does not make such sandboxes.
    pub fn new(driver: &SandboxDriver, request: SandboxRequest) -> Result<Self, SandboxError> {
        driver.check(&request.spec)?;
        let sandbox = match (driver, &request.spec.root) {
            (SandboxDriver::Docker { socket }, RootSource::Image(image)) => {
                DriverSandbox::Docker(docker::DockerSandbox::new(socket, image))
            }
            (SandboxDriver::Embedded(settings), _) => {
                DriverSandbox::Embedded(embedded::EmbeddedSandbox::new(settings))
            }
            (SandboxDriver::Docker { .. }, _) => unreachable!("`check` refuses this root"),
        };
        Ok(Self { sandbox, request, claim: None, force_stop: CancellationToken::new() })
    }

    /// Runs the sandbox until it exits, or until `until` returns a reason to stop it, and then removes it. The embedded
    /// driver leaves the files in the run's directory.
    ///
    /// The first poll of `until` comes before the first request to an engine. So an engine that does not answer cannot
    /// cost more than the run's time. The embedded driver's helper has its request by then, and has made no container.
    ///
    /// # Errors
    /// Returns an error if the sandbox cannot be made, or is lost before its end is known.
    pub async fn run<W: AsyncWrite + Unpin>(
        mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let launch_time = Instant::now();
        // `until` is polled in two places: during the launch, and then while the sandbox runs.
        let mut until = pin!(until);
        let started = if let Err(error) = Box::pin(self.prepare_driver()).await {
            Ok(Err(error))
        } else {
            tokio::select! {
                // The select is biased, so that `until` is polled before the launch sends its first request.
                biased;
                cause = &mut until => Err(cause),
                started = Box::pin(self.launch()) => Ok(started),
            }
        };
        // The outer `Err` is a stop reason that came first; the inner `Err` is a failed start.
        let ended = match started {
            Err(cause) => Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() }),
            Ok(Ok(SandboxStartOutcome::Running)) => {
                let start = launch_time.elapsed();
                let start_ms = u64::try_from(start.as_millis()).unwrap_or(u64::MAX);
                tracing::info!(run = self.request.spec.run, start_ms, "the sandbox runs");
                let ended = Box::pin(self.follow_until_exit(output, until)).await;
                ended.map(|ended| SandboxExit { start: Some(start), ..ended })
            }
            Ok(Ok(SandboxStartOutcome::NotStarted { exit_code, message })) => Ok(SandboxExit {
                exit_code: Some(exit_code),
                not_started: Some(message),
                ..SandboxExit::default()
            }),
            Ok(Err(error)) => Err(error),
        };
        // The removal follows every outcome, also a failed start: the driver may have made something on the way.
        Box::pin(self.remove()).await;
        ended
    }

    pub(super) async fn start(&mut self) -> Result<SandboxStartOutcome, SandboxError> {
        self.prepare_driver().await?;
        self.launch().await
    }

    /// Prepares what needs no time, and so is done before `until` is polled.
    async fn prepare_driver(&mut self) -> Result<(), SandboxError> {
        match (&mut self.sandbox, &self.claim) {
            // Docker Engine itself refuses a second container of a name. A claimed slot's container has the slot's
            // name, so there only the run's directory refuses a second sandbox of the run, and only within this
            // process.
            (DriverSandbox::Docker(_), _) => Ok(()),
            (DriverSandbox::Embedded(made), Some(claim)) => made.lock_name(claim.run_id()).await,
            (DriverSandbox::Embedded(made), None) => made.prepare_helper(&self.request).await,
        }
    }

    async fn launch(&mut self) -> Result<SandboxStartOutcome, SandboxError> {
        let claim = self.claim.take();
        if claim.is_some() && !self.is_output_attached() {
            return Err(SandboxError::SlotFailed("its output has ended".to_owned()));
        }
        match (&mut self.sandbox, claim) {
            (_, Some(claim)) => claim.send_claim().await.map(|()| SandboxStartOutcome::Running),
            (DriverSandbox::Docker(made), None) => made.start(&self.request).await,
            (DriverSandbox::Embedded(made), None) => made.start().await,
        }
    }

    /// Returns true if the output of a started sandbox still comes, as far as this process knows without waiting. An
    /// engine that restarts breaks the connection, and the container may live on.
    pub(super) fn is_output_attached(&self) -> bool {
        match &self.sandbox {
            DriverSandbox::Docker(made) => made.is_attached(),
            // The pipes of an embedded sandbox last as long as the sandbox.
            DriverSandbox::Embedded(_) => true,
        }
    }

    async fn follow_until_exit<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        // The grace ends early when the caller cancels the token of `force_kill_token`.
        let grace = async {
            let _ = timeout(self.request.spec.grace, self.force_stop.cancelled()).await;
        };
        match &mut self.sandbox {
            DriverSandbox::Docker(made) => made.follow_until_exit(output, until, grace).await,
            DriverSandbox::Embedded(made) => made.follow_until_exit(output, until, grace).await,
        }
    }

    pub(super) async fn remove(self) {
        match self.sandbox {
            DriverSandbox::Docker(made) => made.remove(&self.request).await,
            DriverSandbox::Embedded(made) => made.remove().await,
        }
    }

    /// Returns the token that ends the sandbox's grace early, once the grace has begun.
    pub fn force_kill_token(&self) -> CancellationToken {
        self.force_stop.clone()
    }

    /// Assigns the sandbox to a run; the claim is sent when the sandbox is launched.
    pub(super) fn with_claim(mut self, claim: SlotClaim, grace: Duration) -> Self {
        self.claim = Some(claim);
        self.request.spec.grace = grace;
        self
    }

    pub(super) fn request(&self) -> &SandboxRequest {
        &self.request
    }
}
