//! What residents have kept, seen from outside: what there is, whose, since when, and its end.
//!
//! It is looked at by the service that keeps it, and by people beside it. Who has a home has its label locked, whatever
//! process that is; who forgets one locks it, too, and puts it away in one step before anything in it is removed. So a
//! run that comes meanwhile finds all of it, or none.
//!
//! **Invariant:** nothing is forgotten that a run or a sandbox has now, or of whose branch the relay has work under
//! way.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::persistent_workspace::WorkspaceLock;
pub use super::persistent_workspace::{StoredBranchRef, WorkspaceOwner};
use crate::base::dir_tree;
use crate::relay::delivery::outbox::{DeliveryJob, DeliveryOutbox, WorkspaceRow};
use crate::relay::repo::SandboxBranch;
use crate::relay::repo::repository::RepositoryUrl;
use crate::runner::directory;

/// All that residents have kept at one place.
#[derive(Clone, Debug)]
pub struct WorkspaceStore {
    place: PathBuf,
}

/// One of them: a workspace, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredWorkspace {
    /// Its name on this machine.
    pub id: String,
    /// Whose it is; none where an earlier version has made it, and nobody has used it since.
    pub tenant: Option<WorkspaceOwner>,
    pub used: SystemTime,
}

/// What is done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PruneOutcome {
    /// A run or a sandbox has it.
    InUse,
    /// The relay has work of its branch under way.
    Awaited,
    /// It was used since.
    Young,
    /// Nobody needs it.
    Unused,
    /// Nobody needed it, and it is gone.
    Forgotten,
    /// Nobody needs it, and it is still there.
    Stuck(String),
}

impl WorkspaceStore {
    /// Of the service that has this state directory.
    pub fn in_state_dir(state_dir: &Path) -> Self {
        Self { place: state_dir.join("workspaces") }
    }

    pub(super) fn root_dir(&self) -> &Path {
        &self.place
    }

    /// What there is, used longest ago first. Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn list(&self) -> io::Result<Vec<StoredWorkspace>> {
        let names = self.list_names()?.into_iter().filter(|name| is_workspace_name(name));
        let kept = names.filter_map(|id| {
            let home = self.place.join(&id);
            // Else it has gone meanwhile.
            Some(StoredWorkspace {
                tenant: WorkspaceLock::read_owner(&home),
                used: WorkspaceLock::last_used(&home).ok()?,
                id,
            })
        });
        let mut kept: Vec<_> = kept.collect();
        kept.sort_by(|one, other| (one.used, &one.id).cmp(&(other.used, &other.id)));
        Ok(kept)
    }

    /// How many bytes it takes. Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn disk_usage(&self, kept: &StoredWorkspace) -> io::Result<u64> {
        dir_tree::disk_usage(&self.place.join(&kept.id), u64::MAX)
    }

    /// Says what would become of it: nothing where it was used within `age`, or is awaited. Blocks.
    pub fn prune_decision(
        &self,
        kept: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.place.join(&kept.id);
        if !WorkspaceLock::exists_in(&home) {
            return self.unlocked_decision(kept, age, is_awaited);
        }
        match WorkspaceLock::try_lock(&home, false) {
            Ok(Some(_label)) => self.unlocked_decision(kept, age, is_awaited),
            Ok(None) => PruneOutcome::InUse,
            Err(error) => PruneOutcome::Stuck(error.to_string()),
        }
    }

    /// The same, and does it. Blocks.
    pub fn prune(
        &self,
        kept: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.place.join(&kept.id);
        let taken = WorkspaceLock::create_for_legacy(&home, kept.used)
            .and_then(|()| WorkspaceLock::try_lock(&home, false));
        // As long as it is ours, it is nobody else's.
        let label = match taken {
            Ok(Some(label)) => label,
            Ok(None) => return PruneOutcome::InUse,
            // Somebody else was quicker.
            Err(error) if error.kind() == ErrorKind::NotFound => return PruneOutcome::Forgotten,
            Err(error) => return PruneOutcome::Stuck(error.to_string()),
        };
        match self.unlocked_decision(kept, age, is_awaited) {
            PruneOutcome::Unused => (),
            other => return other,
        }
        let away = self.place.join(format!("{TRASH_PREFIX}{}", Uuid::now_v7()));
        let removed = fs::rename(&home, &away).and_then(|()| {
            drop(label);
            directory::remove_run_dir(&away)
        });
        removed.map_or_else(
            |error| PruneOutcome::Stuck(error.to_string()),
            |()| PruneOutcome::Forgotten,
        )
    }

    /// Forgets whatever nobody has used for so long and nobody needs; first what was put away before, and not removed.
    /// Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn prune_expired(
        &self,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> io::Result<Vec<(StoredWorkspace, PruneOutcome)>> {
        for name in self.list_names()?.into_iter().filter(|name| name.starts_with(TRASH_PREFIX)) {
            if let Err(error) = directory::remove_run_dir(&self.place.join(&name)) {
                tracing::warn!(name, %error, "what was forgotten is still there");
            }
        }
        let is_old = |kept: &StoredWorkspace| kept.used.elapsed().is_ok_and(|unused| unused >= age);
        let old = self.list()?.into_iter().filter(is_old);
        Ok(old
            .map(|kept| {
                let fate = self.prune(&kept, age, &is_awaited);
                (kept, fate)
            })
            .collect())
    }

    /// Of one that nobody else has.
    fn unlocked_decision(
        &self,
        kept: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.place.join(&kept.id);
        // It may have been used, and by a run with another line, since it was listed.
        let tenant = WorkspaceLock::read_owner(&home);
        if tenant != kept.tenant
            || WorkspaceLock::last_used(&home).is_ok_and(|used| used > kept.used)
        {
            return PruneOutcome::Young;
        }
        if kept.used.elapsed().unwrap_or_default() < age {
            return PruneOutcome::Young;
        }
        match tenant.and_then(|tenant| tenant.line) {
            Some(line) if is_awaited(&line) => PruneOutcome::Awaited,
            _ => PruneOutcome::Unused,
        }
    }

    /// None where nothing was ever kept.
    fn list_names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.place) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl fmt::Display for WorkspaceOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever asks for a run names the branch.
        write!(f, "{} on {}", self.agent, self.branch.escape_debug())?;
        match self.repository.as_deref() {
            Some(repository) if !repository.is_empty() => write!(f, " of {repository}"),
            _ => Ok(()),
        }
    }
}

/// Whether the relay has work of a branch under way, or has yet to take it out. Where nobody can tell, it may have.
/// Blocks.
pub fn has_pending_delivery(outbox: &DeliveryOutbox, line: &StoredBranchRef) -> bool {
    let is_of = |repository: &RepositoryUrl, branch: &SandboxBranch| {
        repository.canonical_key() == line.repository && branch.key().as_str() == line.branch_key
    };
    let is_way = |jobs: Vec<DeliveryJob>| {
        jobs.iter().any(|job| is_of(&job.order.repository, job.order.branch()))
    };
    let is_in = |desks: Vec<WorkspaceRow>| {
        let open = desks.iter().filter(|desk| desk.needs_collection()).map(|desk| &desk.plan);
        open.into_iter().any(|plan| is_of(&plan.repository, &plan.state.branch))
    };
    outbox.list_jobs(true).map_or(true, is_way) || outbox.workspaces().map_or(true, is_in)
}

fn is_workspace_name(name: &str) -> bool {
    name.len() == super::key::NAME_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What was put away, and is being removed.
const TRASH_PREFIX: &str = ".forgotten-";
