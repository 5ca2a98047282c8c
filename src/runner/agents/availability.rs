//! Whether an agent can run here: its image is there, or its programs can be run by ourselves, and so is the first
//! process of its sandbox.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{AgentDefinition, DriverChoice};
use crate::sandbox::docker::DockerEngine;
use crate::sandbox::init_binary::InitInstallError;
use crate::sandbox::{self, InitBinary, embedded};

/// What this machine has for agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCapabilities {
    pub docker_socket: PathBuf,
    /// Who makes sandboxes for agents that do not say.
    pub driver: DriverChoice,
    /// What sandboxes have as their first process.
    pub init: InitBinary,
    /// Whether a sandbox of our own may do without limits on memory, processes and processors.
    pub may_be_unlimited: bool,
}

/// Why an agent cannot run here.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AgentUnavailableError {
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
    NotInstalled(#[from] Arc<InitInstallError>),
}

/// What was found out, for some seconds: an engine is not asked for each who wants to know.
#[derive(Debug)]
pub struct AvailabilityCache {
    machine: HostCapabilities,
    max_age: Duration,
    found: Mutex<HashMap<String, CachedAvailability>>,
}

/// What was found out about one agent, by its digest.
#[derive(Clone, Debug)]
struct CachedAvailability {
    since: Instant,
    result: Result<(), AgentUnavailableError>,
}

/// Whether the agent can run here, now. An engine has some seconds to answer.
///
/// # Errors
/// Why not.
pub async fn check_available(
    entry: &AgentDefinition,
    machine: &HostCapabilities,
) -> Result<(), AgentUnavailableError> {
    match (&entry.image, entry.driver.or(machine.driver)) {
        (Some(image), DriverChoice::Auto | DriverChoice::Docker) => has_image(image, machine).await,
        (Some(image), DriverChoice::Embedded) => {
            Err(AgentUnavailableError::NoImages(image.clone()))
        }
        (None, DriverChoice::Docker) => Err(AgentUnavailableError::ImageNeeded),
        (None, DriverChoice::Auto | DriverChoice::Embedded) => check_embedded(entry, machine),
    }?;
    match machine.init.install_file().map_err(Arc::new)? {
        Some(init) if !init.is_file() => Err(AgentUnavailableError::NoInit(init)),
        None if entry.program.is_some() => Err(AgentUnavailableError::NoProgram),
        _ => Ok(()),
    }
}

async fn has_image(image: &str, machine: &HostCapabilities) -> Result<(), AgentUnavailableError> {
    let socket = &machine.docker_socket;
    if !socket.exists() {
        return Err(AgentUnavailableError::NoEngine {
            image: image.to_owned(),
            socket: socket.clone(),
        });
    }
    let silent = |why: String| AgentUnavailableError::Silent { image: image.to_owned(), why };
    let asked = async { DockerEngine::connect(socket).await?.image_id(image).await };
    match timeout(PROBE_TIMEOUT, Box::pin(asked)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(sandbox::SandboxError::NoImage(image))) => {
            Err(AgentUnavailableError::NoImage(image))
        }
        Ok(Err(error)) => Err(silent(format!("{:#}", anyhow::Error::from(error)))),
        Err(_) => {
            let patience = humantime::format_duration(PROBE_TIMEOUT);
            Err(silent(format!("nothing is heard for {patience}")))
        }
    }
}

fn check_embedded(
    entry: &AgentDefinition,
    machine: &HostCapabilities,
) -> Result<(), AgentUnavailableError> {
    if let Some(root) = entry.rootfs.as_ref().filter(|root| !root.is_dir()) {
        return Err(AgentUnavailableError::NoRoot(root.clone()));
    }
    let settings = embedded::EmbeddedDriverConfig {
        may_be_unlimited: machine.may_be_unlimited,
        ..embedded::EmbeddedDriverConfig::default()
    };
    embedded::check_limits_available(&settings)
        .map_err(|error| AgentUnavailableError::NoSandbox(error.to_string()))
}

impl AvailabilityCache {
    /// Looks at each agent again when its answer is older than `max_age`, usually [`CACHE_TTL`].
    pub fn new(machine: HostCapabilities, max_age: Duration) -> Self {
        Self { machine, max_age, found: Mutex::default() }
    }

    /// As [`check_available`], some seconds ago at most.
    ///
    /// # Errors
    /// Why not.
    pub async fn check_cached(&self, entry: &AgentDefinition) -> Result<(), AgentUnavailableError> {
        let key = entry.digest();
        let known = self.lock().get(&key).filter(|found| self.is_fresh(found)).cloned();
        if let Some(found) = known {
            return found.result;
        }
        let result = check_available(entry, &self.machine).await;
        let mut known = self.lock();
        // What belongs to entries that are no more goes with the rest.
        known.retain(|_, found| self.is_fresh(found));
        known.insert(key, CachedAvailability { since: Instant::now(), result: result.clone() });
        result
    }

    fn is_fresh(&self, found: &CachedAvailability) -> bool {
        found.since.elapsed() < self.max_age
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CachedAvailability>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine that is well answers in milliseconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// The age of an answer that is still told to the next caller: shorter than a person waits before looking again.
pub const CACHE_TTL: Duration = Duration::from_secs(5);
