//! The driver for Docker Engine: makes a container, watches it to its end, and takes it away again.
//!
//! **Invariant:** whatever has become of its start, [`Sandbox::remove`] asks for the container's removal. What an engine
//! does not do within its time is left to the sweep, which knows the container by its labels: this process's own finds
//! it in what it has [`left`].

mod brought;
mod container;
pub mod proxy;

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

use super::driver::Started;
use super::output::Output;
use super::owner::State;
use super::spec::docker::{DEADLINE_LABEL, DIR_LABEL, OWNER_LABEL, RUN_LABEL, create_body, podman};
use super::spec::{SECCOMP, Stamp};
use super::{Cause, Ended, Error, Order, Owner, left, name_of};
use container::{Container, Outcome, Running};

/// A connection to an engine.
#[derive(Clone, Debug)]
pub struct Docker {
    client: bollard::Docker,
}

/// A container that carries our labels.
#[derive(Clone, Debug)]
pub struct Found {
    pub id: String,
    pub name: String,
    pub owner: String,
    pub run: String,
    /// Of its installation.
    pub run_dir: String,
    /// Until when it was to be good.
    pub deadline: Option<SystemTime>,
}

impl Docker {
    /// Connects, and agrees on the API's version: an engine of 2020 is as good as this year's.
    ///
    /// # Errors
    /// Nobody answers at `socket`.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let unreachable =
            |error| Error::NoEngine { socket: socket.to_owned(), why: innermost(&error) };
        let path = socket.display().to_string();
        let client = bollard::Docker::connect_with_unix(&path, ANSWER_SECONDS, API_DEFAULT_VERSION);
        let client = client.map_err(unreachable)?.negotiate_version().await.map_err(unreachable)?;
        Ok(Self { client })
    }

    /// The id of an image that is here. Nothing is pulled.
    ///
    /// # Errors
    /// There is no such image.
    pub async fn image_id(&self, name: &str) -> Result<String, Error> {
        id_of(self.image(name).await?.id, name)
    }

    async fn image(&self, name: &str) -> Result<ImageInspect, Error> {
        match self.client.inspect_image(name).await {
            Ok(found) => Ok(found),
            Err(error) if is_status(&error, NOT_FOUND) => Err(Error::NoImage(name.to_owned())),
            Err(source) => Err(Error::Engine { doing: "look at the image", source }),
        }
    }

    /// Whether the engine is Podman, which knows Docker Engine's API and some other words.
    async fn is_podman(&self) -> Result<bool, Error> {
        let version = self.client.version().await;
        let version =
            version.map_err(|source| Error::Engine { doing: "say what it is", source })?;
        let is_podman = |part: &SystemVersionComponents| part.name == "Podman Engine";
        Ok(version.components.unwrap_or_default().iter().any(is_podman))
    }

    /// All containers with our labels, in every state; with `run_dir`, those of its installation.
    ///
    /// # Errors
    /// The engine does not say.
    pub async fn ours(&self, run_dir: Option<&Path>) -> Result<Vec<Found>, Error> {
        let dir = run_dir.map(|run_dir| format!("{DIR_LABEL}={}", run_dir.display()));
        let labels = std::iter::once(OWNER_LABEL).chain(dir.as_deref()).collect();
        let filters = HashMap::from([("label", labels)]);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        let listed = self.client.list_containers(Some(options)).await;
        let listed = listed.map_err(|source| Error::Engine { doing: "list containers", source })?;
        let found = listed.into_iter().map(|found| {
            let mut labels = found.labels.unwrap_or_default();
            let name = found.names.unwrap_or_default().pop().unwrap_or_default();
            Found {
                id: found.id.unwrap_or_default(),
                name: name.trim_start_matches('/').to_owned(),
                owner: labels.remove(OWNER_LABEL).unwrap_or_default(),
                run: labels.remove(RUN_LABEL).unwrap_or_default(),
                run_dir: labels.remove(DIR_LABEL).unwrap_or_default(),
                deadline: labels.remove(DEADLINE_LABEL).and_then(|deadline| time(&deadline)),
            }
        });
        Ok(found.collect())
    }

    /// Removes a container, running or not, with its anonymous volumes; one that is not there is as good as removed,
    /// and one that somebody else is removing is waited for.
    ///
    /// # Errors
    /// It is still there.
    pub async fn remove(&self, container: &str) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            match self.client.remove_container(container, Some(options)).await {
                Ok(()) => return Ok(()),
                Err(error) if is_status(&error, NOT_FOUND) => return Ok(()),
                Err(error) if is_status(&error, CONFLICT) && begun.elapsed() < REMOVAL => (),
                Err(source) => return Err(Error::Engine { doing: "remove the container", source }),
            }
            sleep(PAUSE).await;
        }
    }

    /// Creates the container, which does not run yet. An image may be given by name: it is asked for once, and then
    /// goes by its id.
    async fn create(&self, image: &str, order: &Order) -> Result<Container, Error> {
        let Order { spec, stamp, directory } = order;
        let (image, is_podman, ()) = tokio::try_join!(
            self.image_for(image, spec),
            self.is_podman(),
            self.check_volumes(&spec.volumes)
        )?;
        let mut body = create_body(spec, &image, stamp);
        if is_podman {
            let seccomp = directory.join("seccomp.json");
            fs::write(&seccomp, SECCOMP).map_err(|error| Error::HostPath {
                path: seccomp.clone(),
                why: error.to_string(),
            })?;
            podman::translate(&mut body, &seccomp, processes());
        }
        Box::pin(self.make(&name_of(&spec.run), body, stamp)).await
    }

    /// Creates a container of this name. One that a dead runner has left of the same run is taken away.
    async fn make(
        &self,
        name: &str,
        body: ContainerCreateBody,
        stamp: &Stamp,
    ) -> Result<Container, Error> {
        // From here on there may be another of this name.
        let was_left = left::forget(name);
        let mut tries = 0;
        loop {
            tries += 1;
            let options = CreateContainerOptionsBuilder::default().name(name).build();
            match self.client.create_container(Some(options), body.clone()).await {
                Ok(created) => return Ok(Container::new(self.client.clone(), created.id)),
                Err(error) if is_status(&error, CONFLICT) => {
                    let left = self.find(name, stamp, |owner| owner.state() == State::Dead).await;
                    match left.filter(|_| tries < CREATIONS) {
                        Some(left) => self.remove(&left).await?,
                        // A sweep, which begins with every run, was quicker.
                        None if tries < CREATIONS && self.is_gone(name).await => (),
                        None => {
                            if was_left {
                                left::note(name);
                            }
                            let run = body.labels.and_then(|mut labels| labels.remove(RUN_LABEL));
                            return Err(Error::Taken(run.unwrap_or_default()));
                        }
                    }
                }
                Err(source) => return Err(Error::Engine { doing: "create the container", source }),
            }
        }
    }

    /// The id of the container of this name, if there is one by now, in this installation and of such an owner.
    async fn find(
        &self,
        name: &str,
        stamp: &Stamp,
        is_it: impl Fn(&Owner) -> bool,
    ) -> Option<String> {
        let found = timeout(ANSWER, self.client.inspect_container(name, None)).await.ok()?.ok()?;
        let labels = found.config?.labels?;
        let is_ours = labels.get(DIR_LABEL).is_some_and(|dir| Path::new(dir) == stamp.run_dir);
        let owner = Owner::parse(labels.get(OWNER_LABEL)?)?;
        found.id.filter(|_| is_ours && is_it(&owner))
    }

    /// Whether there is no container of this name any more.
    async fn is_gone(&self, name: &str) -> bool {
        let found = timeout(ANSWER, self.client.inspect_container(name, None)).await;
        matches!(found, Ok(Err(error)) if is_status(&error, NOT_FOUND))
    }

    /// What an engine has made although nobody waited for its answer. One that was cut off in the middle gets some
    /// time to come out with it; what it makes after that is left behind.
    async fn late(&self, name: &str, stamp: &Stamp, was_cut: bool) -> Option<String> {
        let begun = Instant::now();
        loop {
            let found = self.find(name, stamp, |owner| *owner == stamp.owner).await;
            if found.is_some() || !was_cut {
                return found;
            }
            if begun.elapsed() > LATE {
                left::note(name);
                return None;
            }
            sleep(PAUSE).await;
        }
    }

    /// An engine that has just come back, or is busy, is asked more than once.
    async fn tidy_up(&self, id: &str) {
        let removed = timeout(REMOVAL, async {
            loop {
                match timeout(ANSWER, self.remove(id)).await {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => {
                        tracing::debug!(%error, container = id, "cannot remove the container yet");
                    }
                    Err(_) => tracing::debug!(container = id, "no answer to the removal yet"),
                }
                sleep(PAUSE).await;
            }
        });
        if removed.await.is_err() {
            let error = Error::Silent("remove a container");
            tracing::error!(%error, container = id, "the container is left behind");
            left::note(id);
        }
    }
}

/// One container of the engine, from before it is made until it is gone.
pub(super) struct Sandbox {
    socket: PathBuf,
    image: String,
    docker: Option<Docker>,
    id: Option<String>,
    running: Option<Running>,
    /// Some answer of the engine is not there yet, and may never have been waited for.
    is_starting: bool,
}

impl Sandbox {
    pub(super) fn new(socket: &Path, image: &str) -> Self {
        let (socket, image) = (socket.to_owned(), image.to_owned());
        Self { socket, image, docker: None, id: None, running: None, is_starting: false }
    }

    pub(super) async fn start(&mut self, order: &Order) -> Result<Started, Error> {
        self.is_starting = true;
        let started = self.create_and_start(order).await;
        self.is_starting = matches!(&started, Err(error) if !is_settled(error));
        started
    }

    async fn create_and_start(&mut self, order: &Order) -> Result<Started, Error> {
        let docker = self.docker.insert(Docker::connect(&self.socket).await?);
        let container = Box::pin(docker.create(&self.image, order)).await?;
        self.id = Some(container.id().to_owned());
        Ok(match container.start().await? {
            Outcome::Running(running) => {
                self.running = Some(running);
                Started::Running
            }
            Outcome::Not { exit_code, message } => Started::Not { exit_code, message },
        })
    }

    /// Follows what was started to its end. From `until` on it is told to end, and has `grace` for it.
    pub(super) async fn watch<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
        grace: impl Future<Output = ()>,
    ) -> Result<Ended, Error> {
        let running = self.running.take().expect("it was started, and is watched once");
        running.watch(output, until, grace).await
    }

    pub(super) async fn remove(self, order: &Order) {
        let Some(docker) = self.docker else { return };
        let id = match self.id {
            Some(id) => Some(id),
            None => docker.late(&name_of(&order.spec.run), &order.stamp, self.is_starting).await,
        };
        if let Some(id) = id {
            docker.tidy_up(&id).await;
        }
    }
}

/// Whether nothing may come any more of what has failed so: we have not asked for it, or the engine itself has said no.
fn is_settled(error: &Error) -> bool {
    match error {
        Error::Engine { source, .. } => {
            matches!(source, EngineError::DockerResponseServerError { .. })
        }
        Error::Silent(_) => false,
        _ => true,
    }
}

/// The first cause of an error: those above it only say that there was one.
fn innermost(error: &EngineError) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(below) = cause.source() {
        cause = below;
    }
    cause.to_string()
}

/// How many processes a user may have here, as far as we can tell.
fn processes() -> u64 {
    getrlimit(Resource::Nproc).maximum.unwrap_or(MANY).min(MANY)
}

fn time(label: &str) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(label.parse().ok()?))
}

fn id_of(found: Option<String>, name: &str) -> Result<String, Error> {
    found.ok_or_else(|| Error::NoImage(name.to_owned()))
}

fn is_status(error: &EngineError, status: u16) -> bool {
    matches!(error, EngineError::DockerResponseServerError { status_code, .. } if *status_code == status)
}

/// The time for one answer of the engine. Creating takes some 200 ms, and ten times that on a busy machine; the
/// run's deadline is over all of it.
const ANSWER_SECONDS: u64 = 60;

/// The time for an answer when nothing but the removal is left to be done, and it can be asked again.
const ANSWER: Duration = Duration::from_secs(5);

/// All the time that an engine has to remove a container.
const REMOVAL: Duration = Duration::from_secs(20);

/// From our giving up on an answer to the container that it was about.
const LATE: Duration = Duration::from_secs(3);

/// How often a container is created, where somebody else's stands in the way and then does not.
const CREATIONS: u32 = 4;

const PAUSE: Duration = Duration::from_millis(200);

/// The kernel's own first limit, to which Podman keeps itself.
const MANY: u64 = 32_768;

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
