//! The check that an agent can run on this host: its image or root exists, its driver works, and its sandbox's first
//! process exists.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{AgentDefinition, DriverChoice};
use crate::sandbox::docker::DockerEngine;
use crate::sandbox::init_binary::InitInstallError;
use crate::sandbox::{self, InitBinary, embedded};

/// The properties of this machine that an agent's availability depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCapabilities {
    pub docker_socket: PathBuf,
    /// The driver for agents whose definition names no driver.
    pub driver: DriverChoice,
    /// The first process of the sandboxes.
    pub init: InitBinary,
    /// True if the embedded driver may run a sandbox without limits on memory, processes and processors.
    pub may_be_unlimited: bool,
}

/// The reason why an agent cannot run on this host.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AgentUnavailableError {
    #[error("it needs the image `{image}`, and there is no Docker Engine at `{}`", socket.display())]
    NoEngine { image: String, socket: PathBuf },
    #[error("it needs the image `{image}`, and Docker Engine does not answer: {why}")]
    EngineUnresponsive { image: String, why: String },
    #[error("image `{0}` is not on this machine; build or load it")]
    NoImage(String),
    #[error("it needs the image `{0}`, and the driver `embedded` knows no images")]
    ImagesUnsupported(String),
    #[error("it has no image, and the driver `docker` needs one")]
    ImageRequired,
    #[error("its root `{}` is no directory of this machine", .0.display())]
    NoRoot(PathBuf),
    #[error("{0}")]
    NoSandbox(String),
    #[error("its program is part of cogni-init, which `--init none` disables")]
    NoProgram,
    #[error("there is no cogni-init at `{}`", .0.display())]
    NoInit(PathBuf),
    #[error(transparent)]
    NotInstalled(#[from] Arc<InitInstallError>),
}

/// A cache of availability results. The cache saves a request to the engine for every caller.
#[derive(Debug)]
pub struct AvailabilityCache {
    host: HostCapabilities,
    max_age: Duration,
    found: Mutex<HashMap<String, CachedAvailability>>,
}

/// The result of one agent's check.
#[derive(Clone, Debug)]
struct CachedAvailability {
    since: Instant,
    result: Result<(), AgentUnavailableError>,
}

/// Checks that the agent can run on this host now. The engine has `PROBE_TIMEOUT` to answer.
///
/// # Errors
/// Returns the reason if the agent cannot run.
pub async fn check_available(
    entry: &AgentDefinition,
    machine: &HostCapabilities,
) -> Result<(), AgentUnavailableError> {
    // The cases follow the driver's choice for a run: an image needs Docker Engine, and Docker Engine needs an image.
    match (&entry.image, entry.driver.or(machine.driver)) {
        (Some(image), DriverChoice::Auto | DriverChoice::Docker) => has_image(image, machine).await,
        (Some(image), DriverChoice::Embedded) => {
            Err(AgentUnavailableError::ImagesUnsupported(image.clone()))
        }
        (None, DriverChoice::Docker) => Err(AgentUnavailableError::ImageRequired),
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
    let silent =
        |why: String| AgentUnavailableError::EngineUnresponsive { image: image.to_owned(), why };
    let check = async {
        let engine = DockerEngine::connect(socket).await?;
        tokio::try_join!(engine.image_id(image), engine.check_cgroup_namespaces())
    };
    match timeout(PROBE_TIMEOUT, Box::pin(check)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(sandbox::SandboxError::NoImage(image))) => {
            Err(AgentUnavailableError::NoImage(image))
        }
        Ok(Err(error @ sandbox::SandboxError::SharedCgroupNamespace { .. })) => {
            Err(AgentUnavailableError::NoSandbox(error.to_string()))
        }
        Ok(Err(error)) => Err(silent(format!("{:#}", anyhow::Error::from(error)))),
        Err(_) => {
            let time = humantime::format_duration(PROBE_TIMEOUT);
            Err(silent(format!("no answer within {time}")))
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
    /// Makes an empty cache. The cache checks an agent again when the result is older than `max_age`, usually
    /// [`CACHE_TTL`].
    pub fn new(host: HostCapabilities, max_age: Duration) -> Self {
        Self { host, max_age, found: Mutex::default() }
    }

    /// Returns the result of [`check_available`], which may be as old as the cache's maximum age.
    ///
    /// # Errors
    /// Returns the reason if the agent cannot run.
    pub async fn check_cached(&self, entry: &AgentDefinition) -> Result<(), AgentUnavailableError> {
        let key = entry.digest();
        // The lock is not held across the check: a slow engine must not block the results of other agents. So two
        // callers may check the same agent at the same time, which is harmless.
        let known = self.lock().get(&key).filter(|found| self.is_fresh(found)).cloned();
        if let Some(found) = known {
            return found.result;
        }
        let result = check_available(entry, &self.host).await;
        let mut known = self.lock();
        // Expired results are removed here, also those of agents that no longer exist.
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

/// The maximum time of a request to the engine (our choice). A healthy engine answers within milliseconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// The usual maximum age of a cached result (our choice): shorter than a person waits before the next look.
pub const CACHE_TTL: Duration = Duration::from_secs(5);
