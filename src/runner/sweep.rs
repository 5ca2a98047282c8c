//! What crashed processes, and engines that were away, have left behind: found by the owner that everything of ours
//! carries, and taken away.
//!
//! **Invariant:** nothing is touched whose owner may still live, but what this process itself has [`left`] behind, and
//! nothing that belongs to another installation: one that has its runs in another directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::directory::{owner_of, real, remove};
use crate::sandbox::docker::{self, Docker};
use crate::sandbox::embedded;
use crate::sandbox::left::{self, Taken};
use crate::sandbox::owner::State;
use crate::sandbox::{self, Owner, name_of, proxy_name_of};

/// What is to be swept, and how far it goes.
#[derive(Clone, Debug)]
pub struct Sweep {
    pub docker_socket: PathBuf,
    /// Where the installation's runs have their directories.
    pub run_dir: PathBuf,
    /// Removes what is orphaned; else it is only looked at.
    pub apply: bool,
    /// Looks at other installations' containers, too, and no more than that.
    pub all: bool,
}

/// What was found, and whether that is all.
#[derive(Debug)]
pub struct Swept {
    pub found: Vec<Found>,
    pub engine: Engine,
}

/// Whether there was an engine to be asked for containers.
#[derive(Debug)]
pub enum Engine {
    Asked,
    /// There is no such socket, and so there are no containers.
    Absent,
    /// It may have containers of ours.
    Failed(anyhow::Error),
}

/// One thing that carries our mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    pub name: String,
    pub fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Container,
    Directory,
    /// Of processes, in a container of our own.
    Group,
}

/// What is done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Its owner is alive.
    InUse,
    /// Nobody can tell whose it is, so it is kept.
    Unclear,
    /// It belongs to the installation with this directory.
    Elsewhere(String),
    /// Its owner is dead, or is this process and has left it behind.
    Orphaned,
    /// The same, and it is gone.
    Removed,
    /// The same, and it is still there.
    Stuck(String),
}

impl Sweep {
    /// Looks at the installation's containers and run directories, and does about them what there is to do.
    ///
    /// # Errors
    /// The directory cannot be read. What becomes of the engine is a part of what is found.
    pub async fn sweep(&self) -> anyhow::Result<Swept> {
        self.sweep_until(None).await
    }

    /// The same, for whoever waits no longer for directories than this: they hold what agents have left.
    ///
    /// # Errors
    /// As [`Sweep::sweep`].
    pub async fn sweep_within(&self, patience: Duration) -> anyhow::Result<Swept> {
        self.sweep_until(Some(patience)).await
    }

    async fn sweep_until(&self, patience: Option<Duration>) -> anyhow::Result<Swept> {
        let cannot = || format!("cannot read `{}`", self.run_dir.display());
        let run_dir = real(&self.run_dir).with_context(cannot)?;
        let mut found = vec![];
        let engine = self.containers(&run_dir, &mut found).await;
        // After them: a container's socket is not taken away while it runs.
        let is_silent = matches!(engine, Engine::Failed(_));
        let end = patience.map(|patience| Instant::now() + patience);
        for name in names(&run_dir).with_context(cannot)? {
            let left = left::take(&name);
            let mut fate = if left.is_some() { Fate::Orphaned } else { fate(owner_of(&name)) };
            let path = run_dir.join(&name);
            if self.apply && fate == Fate::Orphaned && is_silent && may_be_a_containers(&path) {
                fate =
                    Fate::Stuck("a container may have it, and the engine cannot be asked".into());
            }
            if self.apply && fate == Fate::Orphaned {
                let removal = remove_run(path, left);
                fate = match end {
                    None => removed(removal.await),
                    Some(end) if end <= Instant::now() => fate,
                    // It goes on behind us.
                    Some(end) => timeout_at(end, removal).await.map_or(fate, removed),
                };
            }
            found.push(Found { kind: Kind::Directory, name, fate });
        }
        found.extend(self.groups(run_dir).await.context("cannot read the groups of processes")?);
        Ok(Swept { found, engine })
    }

    /// Sweeps at once, and then `every` so often, until `stop`; what is being removed then is given a moment. Nothing
    /// waits for it, so what goes wrong is logged.
    pub async fn forever(&self, every: Duration, stop: CancellationToken) {
        let patience = async {
            stop.cancelled().await;
            sleep(AFTER_STOP).await;
        };
        let sweeps = async {
            while !stop.is_cancelled() {
                match self.sweep().await {
                    Ok(swept) => swept.log(),
                    Err(error) => tracing::warn!("cannot sweep: {error:#}"),
                }
                tokio::select! {
                    () = sleep(every) => (),
                    () = stop.cancelled() => (),
                }
            }
        };
        tokio::select! {
            () = sweeps => (),
            () = patience => tracing::debug!("the sweep is cut short"),
        }
    }

    /// Those whose directories have gone before them; the others went with these.
    async fn groups(&self, run_dir: PathBuf) -> io::Result<Vec<Found>> {
        let may_remove = self.apply;
        let found = spawn_blocking(move || {
            let ours = embedded::leftovers()?.into_iter().filter(|group| group.is_of(&run_dir));
            let found = ours.map(|group| {
                let name = group.name.display().to_string();
                let left = left::take(&name);
                let mut fate =
                    if left.is_some() { Fate::Orphaned } else { fate(group.owner.clone()) };
                if may_remove && fate == Fate::Orphaned {
                    fate = removed(remove_left(left, || embedded::remove(&group.name)));
                }
                Found { kind: Kind::Group, name, fate }
            });
            Ok(found.collect())
        });
        found.await?
    }

    async fn containers(&self, run_dir: &Path, found: &mut Vec<Found>) -> Engine {
        if !self.docker_socket.exists() {
            return Engine::Absent;
        }
        let asked = async {
            let docker = Docker::connect(&self.docker_socket).await?;
            let of = (!self.all).then_some(run_dir);
            for container in docker.ours(of).await? {
                let mut fate = fate_of_container(&container, run_dir);
                if self.apply && fate == Fate::Orphaned {
                    // What has its name by the time that it is gone is another.
                    if left::forget(&container.name) {
                        left::note(&container.id);
                    }
                    fate = removed(docker.remove(&container.id).await);
                    if fate == Fate::Removed {
                        left::forget(&container.id);
                    }
                }
                found.push(Found { kind: Kind::Container, name: container.name, fate });
            }
            anyhow::Ok(())
        };
        match timeout(ENGINE, asked).await {
            Ok(Ok(())) => Engine::Asked,
            Ok(Err(error)) => Engine::Failed(error),
            Err(_) => Engine::Failed(sandbox::Error::Silent("tell what is left").into()),
        }
    }
}

impl Swept {
    /// For whoever does not look at it otherwise.
    pub fn log(self) {
        for Found { kind, name, fate } in self.found {
            match fate {
                Fate::Removed => tracing::info!(?kind, name, "removed what was left behind"),
                Fate::Stuck(error) => {
                    tracing::warn!(?kind, name, error, "cannot remove what is left behind");
                }
                Fate::InUse | Fate::Unclear | Fate::Elsewhere(_) | Fate::Orphaned => (),
            }
        }
        if let Engine::Failed(error) = self.engine {
            tracing::warn!("cannot sweep containers: {error:#}");
        }
    }
}

/// A label can be set by anybody; a container of ours also has a name that goes with its run.
fn fate_of_container(container: &docker::Found, run_dir: &Path) -> Fate {
    if Path::new(&container.run_dir) != run_dir {
        return Fate::Elsewhere(container.run_dir.clone());
    }
    let names = [name_of(&container.run), proxy_name_of(&container.run)];
    let is_ours = names.contains(&container.name);
    let owner = is_ours.then(|| Owner::parse(&container.owner)).flatten();
    let is_over = container
        .deadline
        .is_some_and(|deadline| deadline.elapsed().is_ok_and(|since| since >= LONG_OVER));
    let is_left = || [&container.id, &container.name].into_iter().any(|name| left::is_noted(name));
    match fate(owner.clone()) {
        Fate::InUse if owner == Owner::this().ok() && is_left() => Fate::Orphaned,
        // Whoever it is, the run is over, and its runner's and its first process's time for an end.
        Fate::Unclear if is_over && owner.is_some() => Fate::Orphaned,
        fate => fate,
    }
}

fn fate(owner: Option<Owner>) -> Fate {
    match owner.map(|owner| owner.state()) {
        Some(State::Alive) => Fate::InUse,
        Some(State::Dead) => Fate::Orphaned,
        Some(State::Unknown) | None => Fate::Unclear,
    }
}

fn removed<E: Into<anyhow::Error>>(removed: Result<(), E>) -> Fate {
    match removed {
        Ok(()) => Fate::Removed,
        Err(error) => Fate::Stuck(format!("{:#}", error.into())),
    }
}

/// What is given to our own driver's helper has a root in it, its resident's one level below.
fn may_be_a_containers(directory: &Path) -> bool {
    !["root", "made/root"].iter().any(|root| directory.join(root).exists())
}

/// Ends what runs of a container of our own, whose groups of processes are named like the run's directory, and then
/// removes that.
async fn remove_run(directory: PathBuf, left: Option<Taken>) -> anyhow::Result<()> {
    let names = directory.file_name().zip(directory.parent());
    let group = names.map(|(name, run_dir)| embedded::group_of(&name.to_string_lossy(), run_dir));
    let removed = spawn_blocking(move || {
        remove_left(left, || {
            group.map_or(Ok(()), |group| embedded::remove(&group))?;
            remove(&directory)
        })
    });
    Ok(removed.await??)
}

/// What is not removed stays noted.
fn remove_left(left: Option<Taken>, remove: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    remove()?;
    left.into_iter().for_each(Taken::forget);
    Ok(())
}

/// None where there is no such directory: nothing has run here yet.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let name = |entry: io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let mut names = entries.map(name).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// All the time that an engine has to tell, and to remove, what is left.
const ENGINE: Duration = Duration::from_mins(2);

/// After its deadline and all grace there may be, a container of an owner that cannot be seen from here is nobody's any
/// more.
const LONG_OVER: Duration = Duration::from_hours(48);

/// For a removal that has begun; the next sweep does the rest.
const AFTER_STOP: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// R5: one of another pid namespace is never seen, so that its container would be there for ever.
    #[test]
    fn whoever_cannot_be_seen_has_a_container_until_long_after_its_deadline() {
        let this = Owner::this().expect("it is there").to_string();
        let (rest, _) = this.rsplit_once(':').expect("it ends with its namespace");
        let ago = |time: Duration| SystemTime::now().checked_sub(time);
        let fate = |owner: &str, deadline: Option<SystemTime>| {
            let (id, run) = (String::new(), "run-1".to_owned());
            let (name, run_dir) = (name_of(&run), "/run/cogni".to_owned());
            let owner = owner.to_owned();
            let found = docker::Found { id, name, owner, run, run_dir, deadline };
            fate_of_container(&found, Path::new("/run/cogni"))
        };
        let unseen = format!("{rest}:1");
        assert_eq!(fate(&unseen, None), Fate::Unclear);
        assert_eq!(fate(&unseen, ago(LONG_OVER / 2)), Fate::Unclear);
        assert_eq!(fate(&unseen, ago(LONG_OVER * 2)), Fate::Orphaned);
        assert_eq!(fate("somebody else's", ago(LONG_OVER * 2)), Fate::Unclear);
        assert_eq!(fate(&this, ago(LONG_OVER * 2)), Fate::InUse);
    }
}
