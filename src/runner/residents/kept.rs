//! What residents have kept, seen from outside: what there is, whose, since when, and its end.
//!
//! It is looked at by the service that keeps it, and by people beside it. Who has a home has its label locked, whatever
//! process that is; who forgets one locks it, too, and puts it away in one step before anything in it is removed. So a
//! run that comes meanwhile finds all of it, or none.
//!
//! **Invariant:** nothing is forgotten that a run or a sandbox has now, or of whose branch the relay has work under way.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::home::Label;
pub use super::home::{Line, Tenant};
use crate::base::tree;
use crate::delivery::outbox::{Desk, Job, Outbox};
use crate::relay::Branch;
use crate::relay::repository::Repository;
use crate::runner::directory;

/// All that residents have kept at one place.
#[derive(Clone, Debug)]
pub struct Shelf {
    place: PathBuf,
}

/// One of them: a workspace, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its name on this machine.
    pub id: String,
    /// Whose it is; none where an earlier version has made it, and nobody has used it since.
    pub tenant: Option<Tenant>,
    pub used: SystemTime,
}

/// What is done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
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

impl Shelf {
    /// Of the service that has this state directory.
    pub fn of(state_dir: &Path) -> Self {
        Self { place: state_dir.join("workspaces") }
    }

    pub(super) fn place(&self) -> &Path {
        &self.place
    }

    /// What there is, used longest ago first. Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn list(&self) -> io::Result<Vec<Kept>> {
        let names = self.names()?.into_iter().filter(|name| is_home(name));
        let kept = names.filter_map(|id| {
            let home = self.place.join(&id);
            // Else it has gone meanwhile.
            Some(Kept { tenant: Label::read(&home), used: Label::used(&home).ok()?, id })
        });
        let mut kept: Vec<_> = kept.collect();
        kept.sort_by(|one, other| (one.used, &one.id).cmp(&(other.used, &other.id)));
        Ok(kept)
    }

    /// How many bytes it takes. Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn measure(&self, kept: &Kept) -> io::Result<u64> {
        tree::measure(&self.place.join(&kept.id), u64::MAX)
    }

    /// Says what would become of it: nothing where it was used within `age`, or is awaited. Blocks.
    pub fn judge(&self, kept: &Kept, age: Duration, is_awaited: impl Fn(&Line) -> bool) -> Fate {
        let home = self.place.join(&kept.id);
        if !Label::is_at(&home) {
            return self.judge_free(kept, age, is_awaited);
        }
        match Label::take(&home, false) {
            Ok(Some(_label)) => self.judge_free(kept, age, is_awaited),
            Ok(None) => Fate::InUse,
            Err(error) => Fate::Stuck(error.to_string()),
        }
    }

    /// The same, and does it. Blocks.
    pub fn forget(&self, kept: &Kept, age: Duration, is_awaited: impl Fn(&Line) -> bool) -> Fate {
        let home = self.place.join(&kept.id);
        let taken = Label::adopt(&home, kept.used).and_then(|()| Label::take(&home, false));
        // As long as it is ours, it is nobody else's.
        let label = match taken {
            Ok(Some(label)) => label,
            Ok(None) => return Fate::InUse,
            // Somebody else was quicker.
            Err(error) if error.kind() == ErrorKind::NotFound => return Fate::Forgotten,
            Err(error) => return Fate::Stuck(error.to_string()),
        };
        match self.judge_free(kept, age, is_awaited) {
            Fate::Unused => (),
            other => return other,
        }
        let away = self.place.join(format!("{AWAY}{}", Uuid::now_v7()));
        let removed = fs::rename(&home, &away).and_then(|()| {
            drop(label);
            directory::remove(&away)
        });
        removed.map_or_else(|error| Fate::Stuck(error.to_string()), |()| Fate::Forgotten)
    }

    /// Forgets whatever nobody has used for so long and nobody needs; first what was put away before, and not removed.
    /// Blocks.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn sweep(
        &self,
        age: Duration,
        is_awaited: impl Fn(&Line) -> bool,
    ) -> io::Result<Vec<(Kept, Fate)>> {
        for name in self.names()?.into_iter().filter(|name| name.starts_with(AWAY)) {
            if let Err(error) = directory::remove(&self.place.join(&name)) {
                tracing::warn!(name, %error, "what was forgotten is still there");
            }
        }
        let is_old = |kept: &Kept| kept.used.elapsed().is_ok_and(|unused| unused >= age);
        let old = self.list()?.into_iter().filter(is_old);
        Ok(old
            .map(|kept| {
                let fate = self.forget(&kept, age, &is_awaited);
                (kept, fate)
            })
            .collect())
    }

    /// Of one that nobody else has.
    fn judge_free(&self, kept: &Kept, age: Duration, is_awaited: impl Fn(&Line) -> bool) -> Fate {
        let home = self.place.join(&kept.id);
        // It may have been used, and by a run with another line, since it was listed.
        let tenant = Label::read(&home);
        if tenant != kept.tenant || Label::used(&home).is_ok_and(|used| used > kept.used) {
            return Fate::Young;
        }
        if kept.used.elapsed().unwrap_or_default() < age {
            return Fate::Young;
        }
        match tenant.and_then(|tenant| tenant.line) {
            Some(line) if is_awaited(&line) => Fate::Awaited,
            _ => Fate::Unused,
        }
    }

    /// None where nothing was ever kept.
    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.place) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever asks for a run names the branch.
        write!(f, "{} on {}", self.agent, self.branch.escape_debug())?;
        match self.repository.as_deref() {
            Some(repository) if !repository.is_empty() => write!(f, " of {repository}"),
            _ => Ok(()),
        }
    }
}

/// Whether the relay has work of a branch under way, or has yet to take it out. Where nobody can tell, it may have. Blocks.
pub fn is_under_way(outbox: &Outbox, line: &Line) -> bool {
    let is_of = |repository: &Repository, branch: &Branch| {
        repository.key() == line.repository && branch.key().as_str() == line.branch_key
    };
    let is_way =
        |jobs: Vec<Job>| jobs.iter().any(|job| is_of(&job.order.repository, job.order.branch()));
    let is_in = |desks: Vec<Desk>| {
        let open = desks.iter().filter(|desk| desk.is_open()).map(|desk| &desk.plan);
        open.into_iter().any(|plan| is_of(&plan.repository, &plan.state.branch))
    };
    outbox.list(true).map_or(true, is_way) || outbox.desks().map_or(true, is_in)
}

fn is_home(name: &str) -> bool {
    name.len() == super::key::NAME_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What was put away, and is being removed.
const AWAY: &str = ".forgotten-";
