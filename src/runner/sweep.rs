//! What crashed processes, and engines that were away, have left behind: found by the owner that everything of ours
//! carries, and taken away.
//!
//! **Invariant:** nothing is touched whose owner may still live, but what this process itself has [`leftovers`] behind, and
//! nothing that belongs to another installation: one that has its runs in another directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::directory::{canonical_run_dir, owner_from_name, remove_run_dir};
use crate::sandbox::docker::{self, DockerEngine};
use crate::sandbox::embedded;
use crate::sandbox::leftovers::{self, LeftoverClaim};
use crate::sandbox::owner_process::OwnerState;
use crate::sandbox::{self, OwnerProcess, gateway_container_name, sandbox_name};

/// What is to be swept, and how far it goes.
#[derive(Clone, Debug)]
pub struct LeftoverSweeper {
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
pub struct SweepReport {
    pub found: Vec<SweepItem>,
    pub engine: EngineSweepStatus,
}

/// Whether there was an engine to be asked for containers.
#[derive(Debug)]
pub enum EngineSweepStatus {
    Asked,
    /// There is no such socket, and so there are no containers.
    Absent,
    /// It may have containers of ours.
    Failed(anyhow::Error),
}

/// One thing that carries our mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepItem {
    pub kind: LeftoverKind,
    pub name: String,
    pub fate: SweepOutcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverKind {
    Container,
    Directory,
    /// Of processes, in a container of our own.
    Group,
}

/// What is done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SweepOutcome {
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

impl LeftoverSweeper {
    /// Looks at the installation's containers and run directories, and does about them what there is to do.
    ///
    /// # Errors
    /// The directory cannot be read. What becomes of the engine is a part of what is found.
    pub async fn sweep(&self) -> anyhow::Result<SweepReport> {
        self.sweep_inner(None).await
    }

    /// The same, for whoever waits no longer for directories than this: they hold what agents have left.
    ///
    /// # Errors
    /// As [`LeftoverSweeper::sweep`].
    pub async fn sweep_with_timeout(&self, patience: Duration) -> anyhow::Result<SweepReport> {
        self.sweep_inner(Some(patience)).await
    }

    async fn sweep_inner(&self, patience: Option<Duration>) -> anyhow::Result<SweepReport> {
        let cannot = || format!("cannot read `{}`", self.run_dir.display());
        let run_dir = canonical_run_dir(&self.run_dir).with_context(cannot)?;
        let mut found = vec![];
        let engine = self.sweep_containers(&run_dir, &mut found).await;
        // After them: a container's socket is not taken away while it runs.
        let is_silent = matches!(engine, EngineSweepStatus::Failed(_));
        let end = patience.map(|patience| Instant::now() + patience);
        for name in list_names(&run_dir).with_context(cannot)? {
            let left = leftovers::claim(&name);
            let mut fate = if left.is_some() {
                SweepOutcome::Orphaned
            } else {
                owner_outcome(owner_from_name(&name))
            };
            let path = run_dir.join(&name);
            if self.apply
                && fate == SweepOutcome::Orphaned
                && is_silent
                && may_belong_to_container(&path)
            {
                fate = SweepOutcome::Stuck(
                    "a container may have it, and the engine cannot be asked".into(),
                );
            }
            if self.apply && fate == SweepOutcome::Orphaned {
                let removal = remove_run_leftovers(path, left);
                fate = match end {
                    None => removal_outcome(removal.await),
                    Some(end) if end <= Instant::now() => fate,
                    // It goes on behind us.
                    Some(end) => timeout_at(end, removal).await.map_or(fate, removal_outcome),
                };
            }
            found.push(SweepItem { kind: LeftoverKind::Directory, name, fate });
        }
        found.extend(
            self.sweep_cgroups(run_dir).await.context("cannot read the groups of processes")?,
        );
        Ok(SweepReport { found, engine })
    }

    /// Sweeps at once, and then `every` so often, until `stop`; what is being removed then is given a moment. Nothing
    /// waits for it, so what goes wrong is logged.
    pub async fn run_periodically(&self, every: Duration, stop: CancellationToken) {
        let patience = async {
            stop.cancelled().await;
            sleep(STOP_TIMEOUT).await;
        };
        let sweeps = async {
            while !stop.is_cancelled() {
                match self.sweep().await {
                    Ok(swept) => swept.log_items(),
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
    async fn sweep_cgroups(&self, run_dir: PathBuf) -> io::Result<Vec<SweepItem>> {
        let may_remove = self.apply;
        let found = spawn_blocking(move || {
            let ours =
                embedded::list_leftovers()?.into_iter().filter(|group| group.belongs_to(&run_dir));
            let found = ours.map(|group| {
                let name = group.name.display().to_string();
                let left = leftovers::claim(&name);
                let mut fate = if left.is_some() {
                    SweepOutcome::Orphaned
                } else {
                    owner_outcome(group.owner.clone())
                };
                if may_remove && fate == SweepOutcome::Orphaned {
                    fate = removal_outcome(remove_registered(left, || {
                        embedded::remove_cgroup(&group.name)
                    }));
                }
                SweepItem { kind: LeftoverKind::Group, name, fate }
            });
            Ok(found.collect())
        });
        found.await?
    }

    async fn sweep_containers(
        &self,
        run_dir: &Path,
        found: &mut Vec<SweepItem>,
    ) -> EngineSweepStatus {
        if !self.docker_socket.exists() {
            return EngineSweepStatus::Absent;
        }
        let asked = async {
            let docker = DockerEngine::connect(&self.docker_socket).await?;
            let of = (!self.all).then_some(run_dir);
            for container in docker.list_managed(of).await? {
                let mut fate = container_outcome(&container, run_dir);
                if self.apply && fate == SweepOutcome::Orphaned {
                    // What has its name by the time that it is gone is another.
                    if leftovers::unregister(&container.name) {
                        leftovers::register(&container.id);
                    }
                    fate = removal_outcome(docker.remove(&container.id).await);
                    if fate == SweepOutcome::Removed {
                        leftovers::unregister(&container.id);
                    }
                }
                found.push(SweepItem { kind: LeftoverKind::Container, name: container.name, fate });
            }
            anyhow::Ok(())
        };
        match timeout(ENGINE_TIMEOUT, asked).await {
            Ok(Ok(())) => EngineSweepStatus::Asked,
            Ok(Err(error)) => EngineSweepStatus::Failed(error),
            Err(_) => {
                EngineSweepStatus::Failed(sandbox::SandboxError::Silent("tell what is left").into())
            }
        }
    }
}

impl SweepReport {
    /// For whoever does not look at it otherwise.
    pub fn log_items(self) {
        for SweepItem { kind, name, fate } in self.found {
            match fate {
                SweepOutcome::Removed => {
                    tracing::info!(?kind, name, "removed what was left behind");
                }
                SweepOutcome::Stuck(error) => {
                    tracing::warn!(?kind, name, error, "cannot remove what is left behind");
                }
                SweepOutcome::InUse
                | SweepOutcome::Unclear
                | SweepOutcome::Elsewhere(_)
                | SweepOutcome::Orphaned => (),
            }
        }
        if let EngineSweepStatus::Failed(error) = self.engine {
            tracing::warn!("cannot sweep containers: {error:#}");
        }
    }
}

/// A label can be set by anybody; a container of ours also has a name that goes with its run.
fn container_outcome(container: &docker::ManagedContainer, run_dir: &Path) -> SweepOutcome {
    if Path::new(&container.run_dir) != run_dir {
        return SweepOutcome::Elsewhere(container.run_dir.clone());
    }
    let names = [sandbox_name(&container.run), gateway_container_name(&container.run)];
    let is_ours = names.contains(&container.name);
    let owner = is_ours.then(|| OwnerProcess::parse(&container.owner)).flatten();
    let is_over = container
        .deadline
        .is_some_and(|deadline| deadline.elapsed().is_ok_and(|since| since >= FOREIGN_GRACE));
    let is_left =
        || [&container.id, &container.name].into_iter().any(|name| leftovers::is_registered(name));
    match owner_outcome(owner.clone()) {
        SweepOutcome::InUse if owner == OwnerProcess::this_process().ok() && is_left() => {
            SweepOutcome::Orphaned
        }
        // Whoever it is, the run is over, and its runner's and its first process's time for an end.
        SweepOutcome::Unclear if is_over && owner.is_some() => SweepOutcome::Orphaned,
        fate => fate,
    }
}

fn owner_outcome(owner: Option<OwnerProcess>) -> SweepOutcome {
    match owner.map(|owner| owner.state()) {
        Some(OwnerState::Alive) => SweepOutcome::InUse,
        Some(OwnerState::Dead) => SweepOutcome::Orphaned,
        Some(OwnerState::Unknown) | None => SweepOutcome::Unclear,
    }
}

fn removal_outcome<E: Into<anyhow::Error>>(removed: Result<(), E>) -> SweepOutcome {
    match removed {
        Ok(()) => SweepOutcome::Removed,
        Err(error) => SweepOutcome::Stuck(format!("{:#}", error.into())),
    }
}

/// What is given to our own driver's helper has a root in it, its resident's one level below.
fn may_belong_to_container(directory: &Path) -> bool {
    !["root", "made/root"].iter().any(|root| directory.join(root).exists())
}

/// Ends what runs of a container of our own, whose groups of processes are named like the run's directory, and then
/// removes that.
async fn remove_run_leftovers(
    directory: PathBuf,
    left: Option<LeftoverClaim>,
) -> anyhow::Result<()> {
    let names = directory.file_name().zip(directory.parent());
    let group =
        names.map(|(name, run_dir)| embedded::cgroup_name(&name.to_string_lossy(), run_dir));
    let removed = spawn_blocking(move || {
        remove_registered(left, || {
            group.map_or(Ok(()), |group| embedded::remove_cgroup(&group))?;
            remove_run_dir(&directory)
        })
    });
    Ok(removed.await??)
}

/// What is not removed stays noted.
fn remove_registered(
    left: Option<LeftoverClaim>,
    remove: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    remove()?;
    left.into_iter().for_each(LeftoverClaim::complete);
    Ok(())
}

/// None where there is no such directory: nothing has run here yet.
fn list_names(directory: &Path) -> io::Result<Vec<String>> {
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
const ENGINE_TIMEOUT: Duration = Duration::from_mins(2);

/// After its deadline and all grace there may be, a container of an owner that cannot be seen from here is nobody's any
/// more.
const FOREIGN_GRACE: Duration = Duration::from_hours(48);

/// For a removal that has begun; the next sweep does the rest.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// R5: one of another pid namespace is never seen, so that its container would be there for ever.
    #[test]
    fn whoever_cannot_be_seen_has_a_container_until_long_after_its_deadline() {
        let this = OwnerProcess::this_process().expect("it is there").to_string();
        let (rest, _) = this.rsplit_once(':').expect("it ends with its namespace");
        let ago = |time: Duration| SystemTime::now().checked_sub(time);
        let fate = |owner: &str, deadline: Option<SystemTime>| {
            let (id, run) = (String::new(), "run-1".to_owned());
            let (name, run_dir) = (sandbox_name(&run), "/run/cogni".to_owned());
            let owner = owner.to_owned();
            let found = docker::ManagedContainer { id, name, owner, run, run_dir, deadline };
            container_outcome(&found, Path::new("/run/cogni"))
        };
        let unseen = format!("{rest}:1");
        assert_eq!(fate(&unseen, None), SweepOutcome::Unclear);
        assert_eq!(fate(&unseen, ago(FOREIGN_GRACE / 2)), SweepOutcome::Unclear);
        assert_eq!(fate(&unseen, ago(FOREIGN_GRACE * 2)), SweepOutcome::Orphaned);
        assert_eq!(fate("somebody else's", ago(FOREIGN_GRACE * 2)), SweepOutcome::Unclear);
        assert_eq!(fate(&this, ago(FOREIGN_GRACE * 2)), SweepOutcome::InUse);
    }
}
