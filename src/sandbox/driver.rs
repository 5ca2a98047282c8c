//! Who makes a sandbox. What it is, and how it may end, is the same whoever makes it.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::io::AsyncWrite;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::output::Output;
use super::slot::Claim;
use super::spec::{Root, RunSpec, Stamp};
use super::{Cause, Ended, Error, docker, embedded};

/// A way to make sandboxes on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A container of the engine that listens there.
    Docker { socket: PathBuf },
    /// A container of our own, with nothing else installed.
    Embedded(embedded::Settings),
}

/// What is to be run, for whom, and how it is ended.
#[derive(Clone, Debug)]
pub struct Order {
    pub spec: RunSpec,
    pub stamp: Stamp,
    /// The run's own directory on this machine.
    pub directory: PathBuf,
}

impl Driver {
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
    pub fn check(&self, spec: &RunSpec) -> Result<(), Error> {
        let wrong = |what, given: String, rule| Err(Error::Spec { what, given, rule });
        match (self, &spec.root) {
            (Self::Docker { .. }, Root::Directory(_) | Root::Host) => {
                wrong("the root", spec.root.to_string(), "the driver `docker` needs an image")
            }
            (Self::Embedded(_), Root::Image(image)) => wrong(
                "the root",
                image.clone(),
                "the driver `embedded` knows no images; give an unpacked root, or none",
            ),
            (Self::Embedded(settings), Root::Directory(_) | Root::Host) => {
                match spec.volumes.first() {
                    Some(volume) => wrong(
                        "a volume",
                        volume.name.clone(),
                        "the driver `embedded` has none; give a directory as a mount",
                    ),
                    None => embedded::check(settings),
                }
            }
            (Self::Docker { .. }, Root::Image(_)) => Ok(()),
        }
    }

    /// Makes a sandbox and [runs](Sandbox::run) it.
    ///
    /// # Errors
    /// It could not be made, or was lost on the way.
    pub async fn run<W: AsyncWrite + Unpin>(
        &self,
        order: &Order,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, Error> {
        Box::pin(Sandbox::new(self, order.clone())?.run(output, until)).await
    }
}

/// A sandbox, from before it is made until nothing is left of it.
pub struct Sandbox {
    made: Made,
    order: Order,
    /// What is still to be told to one that was started ahead.
    claim: Option<Claim>,
    hurry: CancellationToken,
}

/// By whom it is made.
enum Made {
    Docker(docker::Sandbox),
    Embedded(embedded::Sandbox),
}

/// What became of a start.
pub(super) enum Started {
    Running,
    /// The program is not there, or is none: what a shell says with these exit codes.
    Not {
        exit_code: i64,
        message: String,
    },
}

impl Sandbox {
    /// Nothing is made yet.
    ///
    /// # Errors
    /// The driver does not make such sandboxes.
    pub fn new(driver: &Driver, order: Order) -> Result<Self, Error> {
        driver.check(&order.spec)?;
        let made = match (driver, &order.spec.root) {
            (Driver::Docker { socket }, Root::Image(image)) => {
                Made::Docker(docker::Sandbox::new(socket, image))
            }
            (Driver::Embedded(settings), _) => Made::Embedded(embedded::Sandbox::new(settings)),
            (Driver::Docker { .. }, _) => unreachable!("it has been checked"),
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
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, Error> {
        let begun = Instant::now();
        let mut until = pin!(until);
        let started = if let Err(error) = Box::pin(self.prepare()).await {
            Ok(Err(error))
        } else {
            tokio::select! {
                biased;
                cause = &mut until => Err(cause),
                started = Box::pin(self.begin()) => Ok(started),
            }
        };
        let ended = match started {
            Err(cause) => Ok(Ended { cause: Some(cause), ..Ended::default() }),
            Ok(Ok(Started::Running)) => {
                let start = begun.elapsed();
                tracing::info!(run = self.order.spec.run, ?start, "the sandbox runs");
                let ended = Box::pin(self.watch(output, until)).await;
                ended.map(|ended| Ended { start: Some(start), ..ended })
            }
            Ok(Ok(Started::Not { exit_code, message })) => Ok(Ended {
                exit_code: Some(exit_code),
                not_started: Some(message),
                ..Ended::default()
            }),
            Ok(Err(error)) => Err(error),
        };
        Box::pin(self.remove()).await;
        ended
    }

    pub(super) async fn start(&mut self) -> Result<Started, Error> {
        self.prepare().await?;
        self.begin().await
    }

    /// What is done in any case, because it takes no time.
    async fn prepare(&mut self) -> Result<(), Error> {
        match (&mut self.made, &self.claim) {
            // An engine refuses the name of a container that is there; of a slot that is the slot's. For what a slot of an
            // engine's is claimed for, only the run's directory refuses another, in the same process.
            (Made::Docker(_), _) => Ok(()),
            (Made::Embedded(made), Some(claim)) => made.take_name(claim.run()).await,
            (Made::Embedded(made), None) => made.prepare(&self.order).await,
        }
    }

    async fn begin(&mut self) -> Result<Started, Error> {
        match (&mut self.made, self.claim.take()) {
            (_, Some(claim)) => claim.tell().await.map(|()| Started::Running),
            (Made::Docker(made), None) => made.start(&self.order).await,
            (Made::Embedded(made), None) => made.start().await,
        }
    }

    async fn watch<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, Error> {
        let grace = async {
            let _ = timeout(self.order.spec.grace, self.hurry.cancelled()).await;
        };
        match &mut self.made {
            Made::Docker(made) => made.watch(output, until, grace).await,
            Made::Embedded(made) => made.watch(output, until, grace).await,
        }
    }

    pub(super) async fn remove(self) {
        match self.made {
            Made::Docker(made) => made.remove(&self.order).await,
            Made::Embedded(made) => made.remove().await,
        }
    }

    /// Ends its grace before the time, once it has begun.
    pub fn hurry(&self) -> CancellationToken {
        self.hurry.clone()
    }

    /// From here on it is this run's, as soon as it has been told.
    pub(super) fn claimed(mut self, claim: Claim, grace: Duration) -> Self {
        self.claim = Some(claim);
        self.order.spec.grace = grace;
        self
    }

    pub(super) fn order(&self) -> &Order {
        &self.order
    }
}
