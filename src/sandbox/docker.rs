//! The driver for Docker Engine: it creates a container, watches the container until its exit, and removes it.
//!
//! **Invariant:** [`DockerSandbox::remove`] requests the container's removal after every outcome of the start. An
//! engine may fail to remove the container in time. Then the sweep removes the container, which it finds by the
//! labels; this process's own sweep finds it in the [`leftovers`].

mod attached_output;
mod container;
pub mod gateway_container;
mod image_checks;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bollard::API_DEFAULT_VERSION;
use bollard::errors::Error as EngineError;
use bollard::models::{ContainerCreateBody, ImageInspect, SystemVersionComponents};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, ListContainersOptionsBuilder, RemoveContainerOptionsBuilder,
};
use rustix::process::{Resource, getrlimit};
use tokio::io::AsyncWrite;
use tokio::time::{Instant, sleep, timeout};

use super::output::OutputCapture;
use super::owner_process::OwnerState;
use super::spec::docker::{
    DEADLINE_LABEL, DIR_LABEL, OWNER_LABEL, RUN_LABEL, container_body, podman,
};
use super::spec::{OwnerLabels, SECCOMP_PROFILE};
use super::{
    ANY_ENGINE, OwnerProcess, SandboxError, SandboxExit, SandboxRequest, SandboxStartOutcome,
    StopReason, container_mark, leftovers, sandbox_name,
};
use container::{ContainerStartOutcome, CreatedContainer, RunningContainer};

/// A connection to an engine.
#[derive(Clone, Debug)]
pub struct DockerEngine {
    client: bollard::Docker,
    /// The engine's own name, for errors.
    name: &'static str,
}

/// A container that carries the gateway's labels.
#[derive(Clone, Debug)]
pub struct ManagedContainer {
    pub id: String,
    pub name: String,
    pub owner: String,
    pub run: String,
    /// The run directory of the installation that the container belongs to.
    pub run_dir: String,
    /// The deadline of the container's run, if the label is valid.
    pub deadline: Option<SystemTime>,
}

impl DockerEngine {
    /// Connects to the engine, and negotiates the API's version, so that an engine of 2020 works too.
    ///
    /// # Errors
    /// Returns [`SandboxError::NoEngine`] if no engine answers at `socket`.
    pub async fn connect(socket: &Path) -> Result<Self, SandboxError> {
        let unreachable =
            |error| SandboxError::NoEngine { socket: socket.to_owned(), why: innermost(&error) };
        let path = socket.display().to_string();
        let client =
            bollard::Docker::connect_with_unix(&path, REQUEST_TIMEOUT_SECONDS, API_DEFAULT_VERSION);
        let client = client.map_err(unreachable)?.negotiate_version().await.map_err(unreachable)?;
        let version = client.version().await.map_err(|source| SandboxError::Engine {
            engine: ANY_ENGINE,
            doing: "report its version",
            source,
        })?;
        let is_podman = |part: &SystemVersionComponents| part.name == PODMAN_COMPONENT;
        let is_podman = version.components.unwrap_or_default().iter().any(is_podman);
        Ok(Self { client, name: if is_podman { PODMAN } else { DOCKER_ENGINE } })
    }

    /// Returns the conversion of the client library's error, with the engine's name and the failed request.
    fn failure(&self, doing: &'static str) -> impl FnOnce(EngineError) -> SandboxError + use<> {
        let engine = self.name;
        move |source| SandboxError::Engine { engine, doing, source }
    }

    fn timeout_error(&self, doing: &'static str) -> SandboxError {
        SandboxError::EngineTimeout { engine: self.name, doing }
    }

    /// Returns the id of a local image. No image is pulled.
    ///
    /// # Errors
    /// Returns [`SandboxError::NoImage`] if the engine has no such image.
    pub async fn image_id(&self, name: &str) -> Result<String, SandboxError> {
        require_id(self.inspect_image(name).await?.id, name)
    }

    async fn inspect_image(&self, name: &str) -> Result<ImageInspect, SandboxError> {
        match self.client.inspect_image(name).await {
            Ok(found) => Ok(found),
            Err(error) if has_status(&error, HTTP_NOT_FOUND) => {
                Err(SandboxError::NoImage(name.to_owned()))
            }
            Err(source) => Err(self.failure("inspect the image")(source)),
        }
    }

    /// Returns true if the engine is Podman, which serves Docker Engine's API with some differences.
    fn is_podman(&self) -> bool {
        self.name == PODMAN
    }

    /// Lists all containers with the gateway's labels, in every state; `run_dir` limits the list to one installation.
    ///
    /// # Errors
    /// Returns an error if the engine does not return the list.
    pub async fn list_managed(
        &self,
        run_dir: Option<&Path>,
    ) -> Result<Vec<ManagedContainer>, SandboxError> {
        let dir = run_dir.map(|run_dir| format!("{DIR_LABEL}={}", run_dir.display()));
        // The owner's label marks every container of the gateway; the directory's label selects one installation.
        let labels = std::iter::once(OWNER_LABEL).chain(dir.as_deref()).collect();
        let filters = HashMap::from([("label", labels)]);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        let listed = self.client.list_containers(Some(options)).await;
        let listed = listed.map_err(self.failure("list containers"))?;
        let found = listed.into_iter().map(|found| {
            let mut labels = found.labels.unwrap_or_default();
            let name = found.names.unwrap_or_default().pop().unwrap_or_default();
            ManagedContainer {
                id: found.id.unwrap_or_default(),
                name: name.trim_start_matches('/').to_owned(),
                owner: labels.remove(OWNER_LABEL).unwrap_or_default(),
                run: labels.remove(RUN_LABEL).unwrap_or_default(),
                run_dir: labels.remove(DIR_LABEL).unwrap_or_default(),
                deadline: labels
                    .remove(DEADLINE_LABEL)
                    .and_then(|deadline| parse_deadline(&deadline)),
            }
        });
        Ok(found.collect())
    }

    /// Removes a container, running or not, with its anonymous volumes. A container that does not exist counts as
    /// removed. If another client is removing the container, the call waits for that removal.
    ///
    /// # Errors
    /// Returns an error if the container still exists.
    pub async fn remove(&self, container: &str) -> Result<(), SandboxError> {
        let start = Instant::now();
        loop {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            match self.client.remove_container(container, Some(options)).await {
                Ok(()) => return Ok(()),
                Err(error) if has_status(&error, HTTP_NOT_FOUND) => return Ok(()),
                // A conflict means that another removal is in progress; the next try finds out how it ended.
                Err(error)
                    if has_status(&error, HTTP_CONFLICT) && start.elapsed() < REMOVE_TIMEOUT => {}
                Err(source) => return Err(self.failure("remove the container")(source)),
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// Creates the container, which does not run yet. The image may be given by name: the name is resolved once, and
    /// then only the image's id is used.
    async fn create_container(
        &self,
        image: &str,
        request: &SandboxRequest,
    ) -> Result<CreatedContainer, SandboxError> {
        let SandboxRequest { spec, labels, directory } = request;
        let (image, (), ()) = tokio::try_join!(
            self.resolve_image(image, spec),
            self.check_volumes(&spec.volumes),
            self.check_cgroup_namespaces()
        )?;
        let mut body = container_body(spec, &image, labels);
        // Podman reads the seccomp profile from a file; Docker Engine gets the text in the request.
        if self.is_podman() {
            let seccomp = directory.join("seccomp.json");
            fs::write(&seccomp, SECCOMP_PROFILE).map_err(|error| SandboxError::HostPath {
                path: seccomp.clone(),
                why: error.to_string(),
            })?;
            podman::translate_for_podman(&mut body, &seccomp, user_limits());
        }
        Box::pin(self.create_replacing_stale(&sandbox_name(&spec.run), body, labels)).await
    }

    /// Creates a container of this name, and removes a leftover container of the same run whose owner is dead.
    async fn create_replacing_stale(
        &self,
        name: &str,
        body: ContainerCreateBody,
        stamp: &OwnerLabels,
    ) -> Result<CreatedContainer, SandboxError> {
        // From here on the name may belong to a new container, which this process's sweep must not remove.
        let was_left = leftovers::unregister(name);
        let mut tries = 0;
        loop {
            tries += 1;
            let options = CreateContainerOptionsBuilder::default().name(name).build();
            match self.client.create_container(Some(options), body.clone()).await {
                Ok(created) => return Ok(CreatedContainer::new(self.clone(), created.id)),
                // The name is in use. There are three cases:
                // 1. A dead process's container of this installation holds the name: remove it and try again.
                // 2. Another sweep has removed the container since: try again.
                // 3. The container is in use, or the attempts are used up: the run has a sandbox already.
                Err(error) if has_status(&error, HTTP_CONFLICT) => {
                    let left = self
                        .find_container(name, stamp, |owner| owner.state() == OwnerState::Dead)
                        .await;
                    match left.filter(|_| tries < MAX_CREATE_ATTEMPTS) {
                        Some(left) => self.remove(&left).await?,
                        // Every run begins with a sweep, and such a sweep was quicker.
                        None if tries < MAX_CREATE_ATTEMPTS && self.is_removed(name).await => (),
                        None => {
                            // The leftover is still there, so it stays on the list.
                            if was_left {
                                leftovers::register(name);
                            }
                            let run = body.labels.and_then(|mut labels| labels.remove(RUN_LABEL));
                            return Err(SandboxError::AlreadyExists(run.unwrap_or_default()));
                        }
                    }
                }
                Err(source) => return Err(self.failure("create the container")(source)),
            }
        }
    }

    /// Returns the id of the container of this name, if it exists, belongs to this installation and has an accepted
    /// owner.
    async fn find_container(
        &self,
        name: &str,
        stamp: &OwnerLabels,
        is_it: impl Fn(&OwnerProcess) -> bool,
    ) -> Option<String> {
        let found = timeout(REMOVE_CALL_TIMEOUT, self.client.inspect_container(name, None))
            .await
            .ok()?
            .ok()?;
        let labels = found.config?.labels?;
        let is_ours = labels.get(DIR_LABEL).is_some_and(|dir| Path::new(dir) == stamp.run_dir);
        let owner = OwnerProcess::parse(labels.get(OWNER_LABEL)?)?;
        found.id.filter(|_| is_ours && is_it(&owner))
    }

    /// Returns true if the engine answers that it has no container of this name.
    async fn is_removed(&self, name: &str) -> bool {
        let found = timeout(REMOVE_CALL_TIMEOUT, self.client.inspect_container(name, None)).await;
        matches!(found, Ok(Err(error)) if has_status(&error, HTTP_NOT_FOUND))
    }

    /// Finds a container that an engine has created after its caller stopped waiting for the answer. If the start was
    /// cut off (`was_cut`), the engine gets some time to create the container; a later creation is registered as a
    /// leftover.
    async fn find_late_creation(
        &self,
        name: &str,
        stamp: &OwnerLabels,
        was_cut: bool,
    ) -> Option<String> {
        let start = Instant::now();
        loop {
            let found = self.find_container(name, stamp, |owner| *owner == stamp.owner).await;
            if found.is_some() || !was_cut {
                return found;
            }
            if start.elapsed() > LATE_CREATE_WAIT {
                leftovers::register(name);
                return None;
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// Removes a container, with more than one try, because the engine may be busy or may just have restarted.
    async fn remove_with_retries(&self, id: &str) {
        let removed = timeout(REMOVE_TIMEOUT, async {
            loop {
                match timeout(REMOVE_CALL_TIMEOUT, self.remove(id)).await {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => {
                        tracing::debug!(%error, container = id, "cannot remove the container yet");
                    }
                    Err(_) => tracing::debug!(container = id, "no answer to the removal yet"),
                }
                sleep(RETRY_INTERVAL).await;
            }
        });
        // The name stays known to this process's sweep, which tries again later.
        if removed.await.is_err() {
            let error = self.timeout_error("remove a container");
            tracing::error!(%error, container = id, "the container is left behind");
            leftovers::register(id);
        }
    }
}

/// One container of the engine, from before its creation until its removal.
pub(super) struct DockerSandbox {
    socket: PathBuf,
    image: String,
    docker: Option<DockerEngine>,
    id: Option<String>,
    running: Option<RunningContainer>,
    /// True while an answer of the engine is outstanding, even if the caller has stopped waiting for the answer.
    is_starting: bool,
}

impl DockerSandbox {
    pub(super) fn new(socket: &Path, image: &str) -> Self {
        let (socket, image) = (socket.to_owned(), image.to_owned());
        Self { socket, image, docker: None, id: None, running: None, is_starting: false }
    }

    pub(super) async fn start(
        &mut self,
        request: &SandboxRequest,
    ) -> Result<SandboxStartOutcome, SandboxError> {
        // The flag stays set if this future is dropped, so that the removal looks for a container that appears late.
        self.is_starting = true;
        let started = self.create_and_start(request).await;
        self.is_starting = matches!(&started, Err(error) if !is_definitive(error));
        started
    }

    async fn create_and_start(
        &mut self,
        request: &SandboxRequest,
    ) -> Result<SandboxStartOutcome, SandboxError> {
        let docker = self.docker.insert(DockerEngine::connect(&self.socket).await?);
        container_mark::write_above(&request.directory, &request.labels.run_dir)
            .map_err(SandboxError::MarkFailed)?;
        let container = Box::pin(docker.create_container(&self.image, request)).await?;
        self.id = Some(container.id().to_owned());
        Ok(match container.start().await? {
            ContainerStartOutcome::Running(running) => {
                self.running = Some(running);
                SandboxStartOutcome::Running
            }
            ContainerStartOutcome::NotStarted { exit_code, message } => {
                SandboxStartOutcome::NotStarted { exit_code, message }
            }
        })
    }

    /// Returns true if the container was started and its output has not ended, as far as this process knows without
    /// waiting.
    pub(super) fn is_attached(&self) -> bool {
        self.running.as_ref().is_some_and(RunningContainer::is_attached)
    }

    /// Follows the started container until its exit. Once `until` returns, the container receives SIGTERM, and SIGKILL
    /// after `grace`.
    pub(super) async fn follow_until_exit<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let running = self.running.take().expect("the container was started, and is watched once");
        running.follow_until_exit(output, until, grace).await
    }

    pub(super) async fn remove(self, request: &SandboxRequest) {
        let Some(docker) = self.docker else { return };
        // Without an id, the engine may still have created the container after the request was cut off.
        let id = match self.id {
            Some(id) => Some(id),
            None => {
                docker
                    .find_late_creation(
                        &sandbox_name(&request.spec.run),
                        &request.labels,
                        self.is_starting,
                    )
                    .await
            }
        };
        if let Some(id) = id {
            docker.remove_with_retries(&id).await;
        }
    }
}

/// Returns true if a failed request can have no later effect: it was never sent, or the engine itself refused it.
fn is_definitive(error: &SandboxError) -> bool {
    match error {
        SandboxError::Engine { source, .. } => {
            matches!(source, EngineError::DockerResponseServerError { .. })
        }
        SandboxError::EngineTimeout { .. } => false,
        _ => true,
    }
}

/// Returns the text of the innermost cause of an error: the errors around it only repeat that there was an error.
fn innermost(error: &EngineError) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(below) = cause.source() {
        cause = below;
    }
    cause.to_string()
}

/// Returns the numbers of processes and open files that a user may have here. Of processes at most the kernel's default.
fn user_limits() -> podman::UserLimits {
    let processes = getrlimit(Resource::Nproc).maximum.unwrap_or(DEFAULT_NPROC).min(DEFAULT_NPROC);
    let open_files = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    podman::UserLimits { processes, open_files }
}

fn parse_deadline(label: &str) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(label.parse().ok()?))
}

fn require_id(found: Option<String>, name: &str) -> Result<String, SandboxError> {
    found.ok_or_else(|| SandboxError::NoImage(name.to_owned()))
}

fn has_status(error: &EngineError, status: u16) -> bool {
    matches!(error, EngineError::DockerResponseServerError { status_code, .. } if *status_code == status)
}

/// The time for one answer of the engine, in seconds. A creation takes about 200 ms, and ten times that on a busy
/// machine. The run's deadline bounds all requests together.
const REQUEST_TIMEOUT_SECONDS: u64 = 60;

/// The time for one answer during a removal. It is short, because the request can be repeated.
const REMOVE_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for all tries to remove one container.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The time that a container may take to appear after its creation request was given up.
const LATE_CREATE_WAIT: Duration = Duration::from_secs(3);

/// The maximum number of tries to create a container while another container holds its name.
const MAX_CREATE_ATTEMPTS: u32 = 4;

const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The kernel's default process limit, which Podman uses too.
const DEFAULT_NPROC: u64 = 32_768;

/// The name of the part of Podman by which a client recognises Podman.
pub(super) const PODMAN_COMPONENT: &str = "Podman Engine";

const DOCKER_ENGINE: &str = "Docker Engine";
const PODMAN: &str = "Podman";

const HTTP_NOT_FOUND: u16 = 404;
const HTTP_CONFLICT: u16 = 409;
