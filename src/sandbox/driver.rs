//! Who makes a sandbox. What it is, and how it may end, is the same whoever makes it.

use std::path::PathBuf;
use std::time::Duration;

use tokio::io::AsyncWrite;

use super::output::Output;
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
    /// Between SIGTERM and SIGKILL.
    pub grace: Duration,
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

    /// Runs one sandbox to its end, or until `until` says why it must end before; then nothing is left of it.
    ///
    /// # Errors
    /// The sandbox could not be made, or was lost on the way.
    pub async fn run<W: AsyncWrite + Unpin>(
        &self,
        order: &Order,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, Error> {
        self.check(&order.spec)?;
        match (self, &order.spec.root) {
            (Self::Docker { socket }, Root::Image(image)) => {
                Box::pin(docker::run(socket, image, order, output, until)).await
            }
            (Self::Embedded(settings), _) => {
                Box::pin(embedded::run(settings, order, output, until)).await
            }
            (Self::Docker { .. }, _) => unreachable!("it has been checked"),
        }
    }
}
