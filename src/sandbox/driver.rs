//! Who makes a sandbox. What it is, and how it may end, is the same whoever makes it.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::io::AsyncWrite;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::output::OutputCapture;
use super::spec::{OwnerLabels, RootSource, SandboxSpec};
use super::warm_slot::SlotClaim;
use super::{SandboxError, SandboxExit, StopReason, docker, embedded};

/// A way to make sandboxes on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxDriver {
    /// A container of the engine that listens there.
    Docker { socket: PathBuf },
    /// A container of our own, with nothing else installed.
    Embedded(embedded::EmbeddedDriverConfig),
}

/// What is to be run, for whom, and how it is ended.
#[derive(Clone, Debug)]
pub struct SandboxRequest {
    pub spec: SandboxSpec,
    pub stamp: OwnerLabels,
    /// The run's own directory on this machine.
    pub directory: PathBuf,
}

impl SandboxDriver {
    /// As it is chosen by.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Docker { .. } => "docker",
            Self::Embedded(_) => "embedded",
        }
    }

    /// Whether this driver makes such sandboxes at all.
    ///
    /// # Errors
    /// What it does not know, and who does.
    pub fn check(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
        let wrong = |what, given: String, rule| Err(SandboxError::Spec { what, given, rule });
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

    /// Makes a sandbox and [runs](SandboxHandle::run) it.
    ///
    /// # Errors
    /// It could not be made, or was lost on the way.
    pub async fn run<W: AsyncWrite + Unpin>(
        &self,
        order: &SandboxRequest,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        Box::pin(SandboxHandle::new(self, order.clone())?.run(output, until)).await
    }
}

/// A sandbox, from before it is made until nothing is left of it.
pub struct SandboxHandle {
    made: DriverSandbox,
    order: SandboxRequest,
    /// What is still to be told to one that was started ahead.
    claim: Option<SlotClaim>,
    hurry: CancellationToken,
}

/// By whom it is made.
enum DriverSandbox {
    Docker(docker::DockerSandbox),
    Embedded(embedded::EmbeddedSandbox),
}

/// What became of a start.
pub(super) enum SandboxStartOutcome {
    Running,
    /// The program is not there, or is none: what a shell says with these exit codes.
    Not {
        exit_code: i64,
        message: String,
    },
}

impl SandboxHandle {
    /// Nothing is made yet.
    ///
    /// # Errors
    /// The driver does not make such sandboxes.
    pub fn new(driver: &SandboxDriver, order: SandboxRequest) -> Result<Self, SandboxError> {
        driver.check(&order.spec)?;
        let made = match (driver, &order.spec.root) {
            (SandboxDriver::Docker { socket }, RootSource::Image(image)) => {
                DriverSandbox::Docker(docker::DockerSandbox::new(socket, image))
            }
            (SandboxDriver::Embedded(settings), _) => {
                DriverSandbox::Embedded(embedded::EmbeddedSandbox::new(settings))
            }
            (SandboxDriver::Docker { .. }, _) => unreachable!("it has been checked"),
        };
        Ok(Self { made, order, claim: None, hurry: CancellationToken::new() })
    }

    /// Runs it to its end, or until `until` says why it must end before; then nothing is left of it, but with the
    /// driver `embedded` what is in the run's directory.
    ///
    /// `until` counts from its first poll, which is before the first word to an engine: one that does not answer costs
    /// no more than the time there is. A helper of our own has its order by then, and no container yet.
    ///
    /// # Errors
    /// It could not be made, or was lost on the way.
    pub async fn run<W: AsyncWrite + Unpin>(
        mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let begun = Instant::now();
        let mut until = pin!(until);
        let started = if let Err(error) = Box::pin(self.prepare_driver()).await {
            Ok(Err(error))
        } else {
            tokio::select! {
                biased;
                cause = &mut until => Err(cause),
                started = Box::pin(self.launch()) => Ok(started),
            }
        };
        let ended = match started {
            Err(cause) => Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() }),
            Ok(Ok(SandboxStartOutcome::Running)) => {
                let start = begun.elapsed();
                tracing::info!(run = self.order.spec.run, ?start, "the sandbox runs");
                let ended = Box::pin(self.follow_until_exit(output, until)).await;
                ended.map(|ended| SandboxExit { start: Some(start), ..ended })
            }
            Ok(Ok(SandboxStartOutcome::Not { exit_code, message })) => Ok(SandboxExit {
                exit_code: Some(exit_code),
                not_started: Some(message),
                ..SandboxExit::default()
            }),
            Ok(Err(error)) => Err(error),
        };
        Box::pin(self.remove()).await;
        ended
    }

    pub(super) async fn start(&mut self) -> Result<SandboxStartOutcome, SandboxError> {
        self.prepare_driver().await?;
        self.launch().await
    }

    /// What is done in any case, because it takes no time.
    async fn prepare_driver(&mut self) -> Result<(), SandboxError> {
        match (&mut self.made, &self.claim) {
            // An engine refuses the name of a container that is there; of a slot that is the slot's. For what a slot of an
            // engine's is claimed for, only the run's directory refuses another, in the same process.
            (DriverSandbox::Docker(_), _) => Ok(()),
            (DriverSandbox::Embedded(made), Some(claim)) => made.lock_name(claim.run_id()).await,
            (DriverSandbox::Embedded(made), None) => made.prepare_helper(&self.order).await,
        }
    }

    async fn launch(&mut self) -> Result<SandboxStartOutcome, SandboxError> {
        match (&mut self.made, self.claim.take()) {
            (_, Some(claim)) => claim.send_claim().await.map(|()| SandboxStartOutcome::Running),
            (DriverSandbox::Docker(made), None) => made.start(&self.order).await,
            (DriverSandbox::Embedded(made), None) => made.start().await,
        }
    }

    async fn follow_until_exit<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let grace = async {
            let _ = timeout(self.order.spec.grace, self.hurry.cancelled()).await;
        };
        match &mut self.made {
            DriverSandbox::Docker(made) => made.follow_until_exit(output, until, grace).await,
            DriverSandbox::Embedded(made) => made.follow_until_exit(output, until, grace).await,
        }
    }

    pub(super) async fn remove(self) {
        match self.made {
            DriverSandbox::Docker(made) => made.remove(&self.order).await,
            DriverSandbox::Embedded(made) => made.remove().await,
        }
    }

    /// Ends its grace before the time, once it has begun.
    pub fn force_kill_token(&self) -> CancellationToken {
        self.hurry.clone()
    }

    /// From here on it is this run's, as soon as it has been told.
    pub(super) fn with_claim(mut self, claim: SlotClaim, grace: Duration) -> Self {
        self.claim = Some(claim);
        self.order.spec.grace = grace;
        self
    }

    pub(super) fn request(&self) -> &SandboxRequest {
        &self.order
    }
}
