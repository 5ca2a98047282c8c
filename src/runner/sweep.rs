//! The sweep removes the leftovers of crashed processes, and of engines that could not be reached. The sweep recognises
//! a leftover by the owner process in its label or name.
//!
//! **Invariant:** the sweep touches nothing whose owner may still live, except the [`leftovers`] that this process
//! itself has registered. The sweep touches nothing of another installation, which is one with another run directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::directory::{canonical_run_dir, owner_from_name, remove_run_dir};
use crate::sandbox::docker::{self, DockerEngine};
use crate::sandbox::embedded;
use crate::sandbox::leftovers::{self, LeftoverClaim};
use crate::sandbox::owner_process::OwnerState;
use crate::sandbox::{
    self, OwnerProcess, SandboxError, container_mark, gateway_container_name, host_users,
    sandbox_name,
};

/// A sweep of one installation, and its options.
#[derive(Clone, Debug)]
pub struct LeftoverSweeper {
    pub docker_socket: PathBuf,
    /// The parent of the directories of the installation's runs.
    pub run_dir: PathBuf,
    /// Removes orphaned items; if false, the sweep only lists them.
    pub apply: bool,
    /// Lists the containers of other installations, too. The sweep never removes such a container.
    pub all: bool,
}

/// The result of a sweep: the items found, and the state of the engine, which may hold more items.
#[derive(Debug)]
pub struct SweepReport {
    pub found: Vec<SweepItem>,
    pub engine: EngineSweepStatus,
}

/// The outcome of the request to the engine for its containers.
#[derive(Debug)]
pub enum EngineSweepStatus {
    Listed,
    /// The engine's socket does not exist, so there are no containers.
    Absent,
    /// The request failed. The engine may have containers of the installation.
    Failed(anyhow::Error),
}

/// A container, directory or cgroup that carries the mark of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepItem {
    pub kind: LeftoverKind,
    pub name: String,
    pub outcome: SweepOutcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverKind {
    Container,
    Directory,
    /// A cgroup of a sandbox of the embedded driver.
    Group,
}

/// The sweep's decision about an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SweepOutcome {
    /// The item's owner is alive.
    InUse,
    /// The item's owner is unknown, so the item is kept.
    UnknownOwner,
    /// The item belongs to the installation with this run directory.
    OtherInstallation(String),
    /// The item's owner is dead, or this process failed to remove the item earlier.
    Orphaned,
    /// The item was orphaned, and is removed.
    Removed,
    /// The item is orphaned, and could not be removed.
    RemoveFailed(String),
}

impl LeftoverSweeper {
    /// Sweeps the installation's containers, run directories and cgroups.
    ///
    /// # Errors
    /// Returns an error if the run directory or the cgroups cannot be read. A failure of the engine is a part of the
    /// report.
    pub async fn sweep(&self) -> anyhow::Result<SweepReport> {
        self.sweep_inner(None).await
    }

    /// Sweeps as [`LeftoverSweeper::sweep`] does, but waits at most `max_wait` in all: for the answers of the engine, which
    /// may hang, and for the removal of directories, as an agent chose how much they hold.
    ///
    /// # Errors
    /// Returns the errors of [`LeftoverSweeper::sweep`].
    pub async fn sweep_with_timeout(&self, max_wait: Duration) -> anyhow::Result<SweepReport> {
        self.sweep_inner(Some(max_wait)).await
    }

    async fn sweep_inner(&self, max_wait: Option<Duration>) -> anyhow::Result<SweepReport> {
        let cannot = || format!("cannot read `{}`", self.run_dir.display());
        let run_dir = canonical_run_dir(&self.run_dir).with_context(cannot)?;
        let mut found = vec![];
        let end = max_wait.map(|max_wait| Instant::now() + max_wait);
        // 1. The containers come before the directories, so that no running container loses its socket.
        let engine = self.sweep_containers(&run_dir, &mut found, end).await;
        let is_silent = matches!(engine, EngineSweepStatus::Failed(_));
        // 2. The directories of runs, each with the control group of the same name.
        for name in list_names(&run_dir).with_context(cannot)? {
            // A directory that this process registered is orphaned although its owner, this process, is alive.
            let left = leftovers::claim(&name);
            let mut outcome = if left.is_some() {
                SweepOutcome::Orphaned
            } else {
                owner_outcome(owner_from_name(&name))
            };
            let path = run_dir.join(&name);
            // Without an answer of the engine, a container may still use the directory.
            if self.apply
                && outcome == SweepOutcome::Orphaned
                && is_silent
                && container_mark::exists(&path)
            {
                outcome = SweepOutcome::RemoveFailed(
                    "a container may have it, and the engine cannot be asked".into(),
                );
            }
            if self.apply && outcome == SweepOutcome::Orphaned {
                let removal = remove_run_leftovers(path, left);
                outcome = match end {
                    None => removal_outcome(removal.await),
                    Some(end) if end <= Instant::now() => outcome,
                    // After the timeout the removal continues on its blocking thread.
                    Some(end) => timeout_at(end, removal).await.map_or(outcome, removal_outcome),
                };
            }
            found.push(SweepItem { kind: LeftoverKind::Directory, name, outcome });
        }
        // 3. The control groups whose directories are gone already.
        // 4. The locks of users whose sandboxes are gone by now.
        let rest = async {
            let groups = self.sweep_cgroups(run_dir).await;
            self.sweep_user_locks().await;
            groups
        };
        let groups = match end {
            None => rest.await,
            // After the timeout this step continues on its blocking thread, too.
            Some(end) => timeout_at(end, rest).await.unwrap_or_else(|_| Ok(vec![])),
        };
        found.extend(groups.context("cannot read the groups of processes")?);
        Ok(SweepReport { found, engine })
    }

    /// Sweeps at once, and then at the interval `every`, until `stop`. A removal that runs at that time gets
    /// `STOP_TIMEOUT` to finish. No caller waits for the sweeps, so errors are logged.
    pub async fn run_periodically(&self, every: Duration, stop: CancellationToken) {
        let stop_deadline = async {
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
        // `sweeps` ends by itself after `stop`, when the current sweep is done. `stop_deadline` bounds that time.
        tokio::select! {
            () = sweeps => (),
            () = stop_deadline => tracing::debug!("the sweep is cut short"),
        }
    }

    /// Sweeps the cgroups whose run directories are gone. The other cgroups were removed with their directories.
    async fn sweep_cgroups(&self, run_dir: PathBuf) -> io::Result<Vec<SweepItem>> {
        let may_remove = self.apply;
        let found = spawn_blocking(move || {
            let groups =
                embedded::list_leftovers()?.into_iter().filter(|group| group.belongs_to(&run_dir));
            let found = groups.map(|group| {
                let name = group.name.display().to_string();
                let left = leftovers::claim(&name);
                let mut outcome = if left.is_some() {
                    SweepOutcome::Orphaned
                } else {
                    owner_outcome(group.owner.clone())
                };
                if may_remove && outcome == SweepOutcome::Orphaned {
                    outcome = removal_outcome(remove_registered(left, || {
                        embedded::remove_cgroup(&group.name)
                    }));
                }
                SweepItem { kind: LeftoverKind::Group, name, outcome }
            });
            Ok(found.collect())
        });
        found.await?
    }

    /// Removes the files of locks that a killed process left. They hold nothing that an operator could miss, so they are
    /// no items of the report.
    async fn sweep_user_locks(&self) {
        if !self.apply {
            return;
        }
        match spawn_blocking(host_users::remove_stale_locks).await {
            Ok(Ok(0)) => (),
            Ok(Ok(count)) => tracing::debug!(count, "removed stale locks of sandbox users"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot sweep the locks of sandbox users"),
            Err(error) => tracing::warn!(%error, "the sweep of the locks of sandbox users failed"),
        }
    }

    async fn sweep_containers(
        &self,
        run_dir: &Path,
        found: &mut Vec<SweepItem>,
        end: Option<Instant>,
    ) -> EngineSweepStatus {
        if !self.docker_socket.exists() {
            return EngineSweepStatus::Absent;
        }
        let sweep = async {
            // With `all`, the list contains other installations' containers, which are only displayed.
            let docker = DockerEngine::connect(&self.docker_socket).await?;
            let only_run_dir = (!self.all).then_some(run_dir);
            for container in docker.list_managed(only_run_dir).await? {
                let mut outcome = container_outcome(&container, run_dir);
                if self.apply && outcome == SweepOutcome::Orphaned {
                    // A new container may get the same name before this removal ends, so the registration changes from
                    // the name to the container's ID.
                    if leftovers::unregister(&container.name) {
                        leftovers::register(&container.id);
                    }
                    // A failed removal leaves the registration, so the next sweep tries again.
                    outcome = removal_outcome(docker.remove(&container.id).await);
                    if outcome == SweepOutcome::Removed {
                        leftovers::unregister(&container.id);
                    }
                }
                found.push(SweepItem {
                    kind: LeftoverKind::Container,
                    name: container.name,
                    outcome,
                });
            }
            anyhow::Ok(())
        };
        let engine_end = Instant::now() + ENGINE_TIMEOUT;
        match timeout_at(end.map_or(engine_end, |end| end.min(engine_end)), sweep).await {
            Ok(Ok(())) => EngineSweepStatus::Listed,
            Ok(Err(error)) => EngineSweepStatus::Failed(error),
            Err(_) => {
                let (engine, doing) = (sandbox::ANY_ENGINE, "tell what is left");
                EngineSweepStatus::Failed(SandboxError::EngineTimeout { engine, doing }.into())
            }
        }
    }
}

impl SweepReport {
    /// Logs the removed items and the failures. For callers that do not use the report otherwise.
    pub fn log_items(self) {
        for SweepItem { kind, name, outcome } in self.found {
            match outcome {
                SweepOutcome::Removed => {
                    tracing::info!(?kind, name, "removed a leftover");
                }
                SweepOutcome::RemoveFailed(error) => {
                    tracing::warn!(?kind, name, error, "cannot remove a leftover");
                }
                SweepOutcome::InUse
                | SweepOutcome::UnknownOwner
                | SweepOutcome::OtherInstallation(_)
                | SweepOutcome::Orphaned => (),
            }
        }
        if let EngineSweepStatus::Failed(error) = self.engine {
            // An engine that is stopped is no fault: a run that needs the engine fails by itself, and says so.
            if matches!(error.downcast_ref(), Some(SandboxError::NoEngine { .. })) {
                tracing::info!("cannot sweep containers: {error:#}");
            } else {
                tracing::warn!("cannot sweep containers: {error:#}");
            }
        }
    }
}

/// Decides about a container. Any user of the engine can set a label, so a container counts as the installation's own
/// only if its name fits its run, too.
fn container_outcome(container: &docker::ManagedContainer, run_dir: &Path) -> SweepOutcome {
    if Path::new(&container.run_dir) != run_dir {
        return SweepOutcome::OtherInstallation(container.run_dir.clone());
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
        // This process is the owner and alive, but it has registered the container as one that it could not remove.
        SweepOutcome::InUse if owner == OwnerProcess::this_process().ok() && is_left() => {
            SweepOutcome::Orphaned
        }
        // The owner cannot be seen from this process. But the deadline is long past, with all time that the runner and
        // the sandbox's first process have to end the run.
        SweepOutcome::UnknownOwner if is_over && owner.is_some() => SweepOutcome::Orphaned,
        outcome => outcome,
    }
}

fn owner_outcome(owner: Option<OwnerProcess>) -> SweepOutcome {
    match owner.map(|owner| owner.state()) {
        Some(OwnerState::Alive) => SweepOutcome::InUse,
        Some(OwnerState::Dead) => SweepOutcome::Orphaned,
        Some(OwnerState::Unknown) | None => SweepOutcome::UnknownOwner,
    }
}

fn removal_outcome<E: Into<anyhow::Error>>(removed: Result<(), E>) -> SweepOutcome {
    match removed {
        Ok(()) => SweepOutcome::Removed,
        Err(error) => SweepOutcome::RemoveFailed(format!("{:#}", error.into())),
    }
}

/// Ends the remaining processes of a run in the embedded driver, whose cgroup is named like the run's directory. Then
/// removes the directory.
async fn remove_run_leftovers(
    directory: PathBuf,
    left: Option<LeftoverClaim>,
) -> anyhow::Result<()> {
    let names = directory.file_name().zip(directory.parent());
    let group =
        names.map(|(name, run_dir)| embedded::cgroup_name(&name.to_string_lossy(), run_dir));
    let removed = spawn_blocking(move || {
        remove_registered(left, || {
            // Processes first: they could write to the directory during its removal.
            group.map_or(Ok(()), |group| embedded::remove_cgroup(&group))?;
            remove_run_dir(&directory)
        })
    });
    Ok(removed.await??)
}

/// Calls `remove`, and completes the claim on the leftover. If `remove` fails, the leftover stays registered.
fn remove_registered(
    left: Option<LeftoverClaim>,
    remove: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    remove()?;
    left.into_iter().for_each(LeftoverClaim::complete);
    Ok(())
}

/// Returns the sorted names in a directory, or no names if the directory does not exist, because no run was here yet.
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

/// The maximum time in which the engine has to list and remove its leftovers (our choice).
const ENGINE_TIMEOUT: Duration = Duration::from_mins(2);

/// The time after its deadline when a container counts as orphaned although its owner cannot be seen (our choice). The
/// time is longer than every grace period.
const FOREIGN_GRACE: Duration = Duration::from_hours(48);

/// The time that a running removal gets after `stop` (our choice). The next sweep removes the rest.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// R5: an owner in another pid namespace is never seen, so without this rule its container would stay forever.
    #[test]
    fn an_unseen_owner_keeps_its_container_until_long_after_the_deadline() {
        let this_process = OwnerProcess::this_process().expect("it is there").to_string();
        let (rest, _) = this_process.rsplit_once(':').expect("it ends with its namespace");
        let ago = |time: Duration| SystemTime::now().checked_sub(time);
        let outcome = |owner: &str, deadline: Option<SystemTime>| {
            let (id, run) = (String::new(), "run-1".to_owned());
            let (name, run_dir) = (sandbox_name(&run), "/run/cogni".to_owned());
            let owner = owner.to_owned();
            let found = docker::ManagedContainer { id, name, owner, run, run_dir, deadline };
            container_outcome(&found, Path::new("/run/cogni"))
        };
        let unseen = format!("{rest}:1");
        assert_eq!(outcome(&unseen, None), SweepOutcome::UnknownOwner);
        assert_eq!(outcome(&unseen, ago(FOREIGN_GRACE / 2)), SweepOutcome::UnknownOwner);
        assert_eq!(outcome(&unseen, ago(FOREIGN_GRACE * 2)), SweepOutcome::Orphaned);
        assert_eq!(
            outcome("another program's", ago(FOREIGN_GRACE * 2)),
            SweepOutcome::UnknownOwner
        );
        assert_eq!(outcome(&this_process, ago(FOREIGN_GRACE * 2)), SweepOutcome::InUse);
    }
}
