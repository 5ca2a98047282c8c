//! Whether an agent can run here: its image is there, or its programs can be run by ourselves, and so is the first process
//! of its sandbox.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{Entry, Maker};
use crate::sandbox::docker::Docker;
use crate::sandbox::first::InstallError;
use crate::sandbox::{self, First, embedded};

/// What this machine has for agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub docker_socket: PathBuf,
    /// Who makes sandboxes for agents that do not say.
    pub driver: Maker,
    /// What sandboxes have as their first process.
    pub init: First,
    /// Whether a sandbox of our own may do without limits on memory, processes and processors.
    pub may_be_unlimited: bool,
}

/// Why an agent cannot run here.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Reason {
    #[error("it needs the image `{image}`, and there is no Docker Engine at `{}`", socket.display())]
    NoEngine { image: String, socket: PathBuf },
    #[error("it needs the image `{image}`, and Docker Engine does not answer: {why}")]
    Silent { image: String, why: String },
    #[error("image `{0}` is not on this machine; build or load it")]
    NoImage(String),
    #[error("it needs the image `{0}`, and the driver `embedded` knows no images")]
    NoImages(String),
    #[error("it has no image, and the driver `docker` needs one")]
    ImageNeeded,
    #[error("its root `{}` is no directory of this machine", .0.display())]
    NoRoot(PathBuf),
    #[error("{0}")]
    NoSandbox(String),
    #[error("its program is in the file of cogni-init, and `--init none` leaves that out")]
    NoProgram,
    #[error("there is no cogni-init at `{}`", .0.display())]
    NoInit(PathBuf),
    #[error(transparent)]
    NotInstalled(#[from] Arc<InstallError>),
}

/// What was found out, for some seconds: an engine is not asked for each who wants to know.
#[derive(Debug)]
pub struct Availability {
    machine: Machine,
    max_age: Duration,
    found: Mutex<HashMap<String, Found>>,
}

/// What was found out about one agent, by its digest.
#[derive(Clone, Debug)]
struct Found {
    since: Instant,
    result: Result<(), Reason>,
}

/// Whether the agent can run here, now. An engine has some seconds to answer.
///
/// # Errors
/// Why not.
pub async fn available(entry: &Entry, machine: &Machine) -> Result<(), Reason> {
    match (&entry.image, entry.driver.or(machine.driver)) {
        (Some(image), Maker::Auto | Maker::Docker) => has_image(image, machine).await,
        (Some(image), Maker::Embedded) => Err(Reason::NoImages(image.clone())),
        (None, Maker::Docker) => Err(Reason::ImageNeeded),
        (None, Maker::Auto | Maker::Embedded) => can_embed(entry, machine),
    }?;
    match machine.init.file().map_err(Arc::new)? {
        Some(init) if !init.is_file() => Err(Reason::NoInit(init)),
        None if entry.program.is_some() => Err(Reason::NoProgram),
        _ => Ok(()),
    }
}

async fn has_image(image: &str, machine: &Machine) -> Result<(), Reason> {
    let socket = &machine.docker_socket;
    if !socket.exists() {
        return Err(Reason::NoEngine { image: image.to_owned(), socket: socket.clone() });
    }
    let silent = |why: String| Reason::Silent { image: image.to_owned(), why };
    let asked = async { Docker::connect(socket).await?.image_id(image).await };
    match timeout(PATIENCE, Box::pin(asked)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(sandbox::Error::NoImage(image))) => Err(Reason::NoImage(image)),
        Ok(Err(error)) => Err(silent(format!("{:#}", anyhow::Error::from(error)))),
        Err(_) => {
            let patience = humantime::format_duration(PATIENCE);
            Err(silent(format!("nothing is heard for {patience}")))
        }
    }
}

fn can_embed(entry: &Entry, machine: &Machine) -> Result<(), Reason> {
    if let Some(root) = entry.rootfs.as_ref().filter(|root| !root.is_dir()) {
        return Err(Reason::NoRoot(root.clone()));
    }
    let settings = embedded::Settings {
        may_be_unlimited: machine.may_be_unlimited,
        ..embedded::Settings::default()
    };
    embedded::check(&settings).map_err(|error| Reason::NoSandbox(error.to_string()))
}

impl Availability {
    /// Looks at each agent again when its answer is older than `max_age`, usually [`MAX_AGE`].
    pub fn new(machine: Machine, max_age: Duration) -> Self {
        Self { machine, max_age, found: Mutex::default() }
    }

    /// As [`available`], some seconds ago at most.
    ///
    /// # Errors
    /// Why not.
    pub async fn of(&self, entry: &Entry) -> Result<(), Reason> {
        let key = entry.digest();
        let known = self.lock().get(&key).filter(|found| self.is_fresh(found)).cloned();
        if let Some(found) = known {
            return found.result;
        }
        let result = available(entry, &self.machine).await;
        let mut known = self.lock();
        // What belongs to entries that are no more goes with the rest.
        known.retain(|_, found| self.is_fresh(found));
        known.insert(key, Found { since: Instant::now(), result: result.clone() });
        result
    }

    fn is_fresh(&self, found: &Found) -> bool {
        found.since.elapsed() < self.max_age
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine that is well answers in milliseconds.
const PATIENCE: Duration = Duration::from_secs(3);

/// The age of an answer that is still told to the next caller: shorter than a person waits before looking again.
pub const MAX_AGE: Duration = Duration::from_secs(5);
