//! A repository as this machine keeps it: whole, bare, and never touched by anything of an agent's.

mod remote;
mod sweep;
mod workspace;

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::git::{Call, Git, Limits, is_plain};
use super::push::unreached;
use super::repository::Repository;
use super::{Branch, BranchKey, Error, Lease, Sha};
use crate::base::hex;
use crate::base::secret::Secret;

pub use sweep::sweep;
pub use workspace::{Author, MAX_NAMES, Owner};

/// The mirror of one remote repository.
#[derive(Clone, Debug)]
pub struct Mirror {
    git: Git,
    repository: Repository,
    /// The bare repository.
    git_dir: PathBuf,
    leases: PathBuf,
    limits: FetchLimits,
}

/// What one fetch may bring, and what one workspace is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FetchLimits {
    /// The largest pack that is fetched, or made for a workspace.
    pub pack_bytes: u64,
    /// Of each git that does it.
    pub memory_bytes: u64,
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { pack_bytes: 4 << 30, memory_bytes: 5 << 30, time: Duration::from_mins(15) }
    }
}

impl FetchLimits {
    /// Git maps a pack into its memory.
    fn of_git(self) -> Limits {
        Limits {
            time: self.time,
            output_bytes: 16 << 20,
            memory_bytes: self.memory_bytes,
            file_bytes: self.pack_bytes,
        }
    }
}

/// Where a run's work begins, as the remote says, and as it is written down before the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchState {
    pub branch: Branch,
    /// Whether the remote has the branch already: then the run appends to it.
    pub exists: bool,
    /// What the agent's commits have to build on.
    pub start: Sha,
    /// The branch that the work is for, without `refs/heads/`, and where it stands.
    pub base: String,
    pub base_tip: Sha,
}

impl BranchState {
    /// What the remote's branch must be when it is pushed: `None` where there must be none.
    pub fn expected(&self) -> Option<Sha> {
        self.exists.then_some(self.start)
    }

    /// What is not the agent's work, as git takes it among revisions.
    pub(super) fn known(&self) -> [String; 2] {
        [format!("^{}", self.start), format!("^{}", self.base_tip)]
    }
}

impl Mirror {
    /// The mirror of a repository below `state`, made where there is none yet. Nothing is fetched.
    pub fn open(git: &Git, state: &Path, repository: &Repository) -> Result<Self, Error> {
        let id = id(repository);
        let (git_dir, leases) =
            (state.join("mirrors").join(format!("{id}.git")), state.join("branches").join(&id));
        if !is_plain(&git_dir) {
            let why = "the relay's directory must be absolute, without `:` and quotes";
            return Err(Error::State { path: state.to_owned(), why });
        }
        let (git, repository) = (git.clone(), repository.clone());
        let mirror = Self { git, repository, git_dir, leases, limits: FetchLimits::default() };
        mirror.make()?;
        Ok(mirror)
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(self, limits: FetchLimits) -> Self {
        Self { limits, ..self }
    }

    /// Git makes what is missing, and leaves what is there: it does not matter who was killed before.
    fn make(&self) -> Result<(), Error> {
        let disk = |source| Error::Disk { path: self.git_dir.clone(), source };
        let private = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        private(&self.git_dir).and_then(|()| private(&self.leases)).map_err(disk)?;
        let _lock = self.lock("lock")?;
        if !fs::exists(self.git_dir.join(MADE)).map_err(disk)? {
            let words = ["--bare", "--quiet", "--template=", "--object-format=sha1"];
            self.call("init").words(words).done()?;
        }
        // Its time says when somebody last came here.
        let made = File::create(self.git_dir.join(MADE)).map_err(disk)?;
        made.set_modified(SystemTime::now()).map_err(disk)
    }

    /// Nobody else has the file of this name beside the mirror locked, for as long as it is open.
    pub(super) fn lock(&self, name: &str) -> Result<File, Error> {
        let path = self.git_dir.with_extension(name);
        let locked = File::create(&path).and_then(|file| file.lock().map(|()| file));
        locked.map_err(|source| Error::Disk { path, source })
    }

    /// Takes the lease of a branch; [`Error::Busy`] where another run has it.
    pub fn lease(&self, key: &BranchKey) -> Result<Lease, Error> {
        Lease::take(&self.leases, key)
    }

    /// Whether somebody is at a branch of a repository below `state`, for whoever only looks.
    pub fn is_taken(state: &Path, repository: &Repository, key: &BranchKey) -> Result<bool, Error> {
        Lease::is_taken(&state.join("branches").join(id(repository)), key)
    }

    /// Takes the lease of a branch as soon as it is free, or gives up after `patience`.
    pub async fn wait_for(&self, key: &BranchKey, patience: Duration) -> Result<Lease, Error> {
        Lease::wait(&self.leases, key, patience).await
    }

    /// Asks the remote where the branch stands, and fetches what a run at it begins with. Nothing is changed there,
    /// so it may be asked as often as one likes. Without a `base` it is the remote's default branch.
    pub fn ensure_branch(
        &self,
        lease: &Lease,
        base: Option<&str>,
        token: Option<&Secret>,
    ) -> Result<BranchState, Error> {
        let branch = lease.branch();
        if let Some(base) = base {
            self.check_name(base)?;
        }
        let listed = self.listed(branch, base, token)?;
        let Some(base) = base.map(str::to_owned).or(listed.default.clone()) else {
            return Err(Error::NoBase { base: "HEAD".to_owned() });
        };
        if base == branch.to_string() || listed.default == Some(branch.to_string()) {
            return Err(Error::Default { branch: branch.clone() });
        }
        let [base_ref, branch_ref] = ["base", "branch"].map(|name| own_ref(branch, name));
        let mut wanted = vec![format!("+refs/heads/{base}:{base_ref}")];
        if listed.branch.is_some() {
            wanted.push(format!("+{}:{branch_ref}", branch.to_ref()));
        }
        self.fetch(&wanted, token)?.map_err(|error| match error.said() {
            Some(said) if said.contains("couldn't find remote ref") => {
                Error::NoBase { base: base.clone() }
            }
            // A network may be slow today.
            _ if error.is_costly() && !matches!(error, super::git::Error::Late { .. }) => {
                Error::Costly {
                    branch: branch.clone(),
                    why: error.to_string(),
                    limits: self.limits,
                }
            }
            _ => unreached(error),
        })?;
        let base_tip = self.tip(&base_ref)?;
        let exists = listed.branch.is_some();
        let start = if exists { self.tip(&branch_ref)? } else { base_tip };
        Ok(BranchState { branch: branch.clone(), exists, start, base, base_tip })
    }

    /// Where the branch stands at the remote, now.
    pub fn remote_tip(
        &self,
        branch: &Branch,
        token: Option<&Secret>,
    ) -> Result<Option<Sha>, Error> {
        self.listed(branch, None, token).map(|listed| listed.branch)
    }

    /// Whether `tip`, which was fetched, has `commit` among what it builds on. A commit that never arrived anywhere is
    /// not known here.
    pub fn contains(&self, tip: Sha, commit: Sha) -> bool {
        let words = [commit.to_string(), tip.to_string()];
        let ancestor = self.call("merge-base").word("--is-ancestor").words(words);
        ancestor.is_so().unwrap_or(false)
    }

    fn listed(
        &self,
        branch: &Branch,
        base: Option<&str>,
        token: Option<&Secret>,
    ) -> Result<Listed, Error> {
        let call = self.call("ls-remote").words(["--symref", "--"]).word(self.url());
        let call = call.words(["HEAD", &branch.to_ref()]);
        let call = call.words(base.map(|base| format!("refs/heads/{base}")));
        let text =
            self.admit(call.limits(self.limits.of_git()), token)?.text().map_err(unreached)?;
        let mut listed = Listed::default();
        for (left, name) in text.lines().filter_map(|line| line.split_once('\t')) {
            match left.strip_prefix("ref: refs/heads/") {
                Some(default) if name == "HEAD" => listed.default = Some(default.to_owned()),
                _ if name == branch.to_ref() => listed.branch = Sha::parse(left.as_bytes()),
                _ => (),
            }
        }
        Ok(listed)
    }

    /// What git made of it, if git could be let in.
    fn fetch(
        &self,
        wanted: &[String],
        token: Option<&Secret>,
    ) -> Result<Result<(), super::git::Error>, Error> {
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--refmap=", "--"];
        let call = self.call("fetch").words(words).word(self.url()).words(wanted);
        Ok(self.admit(call.limits(self.limits.of_git()), token)?.done())
    }

    /// The name goes into refspecs, where much more has a meaning than in a name.
    fn check_name(&self, base: &str) -> Result<(), Error> {
        let name = format!("refs/heads/{base}");
        if self.git.call("check-ref-format").word(name).is_so()? {
            return Ok(());
        }
        Err(Error::NoBase { base: base.escape_debug().to_string() })
    }

    fn tip(&self, name: &str) -> Result<Sha, Error> {
        let words = ["--verify", "--end-of-options"];
        let text = self.call("rev-parse").words(words).word(format!("{name}^{{commit}}")).text()?;
        let senseless = || super::git::Error::Senseless { what: "rev-parse".to_owned() };
        Ok(Sha::parse(text.trim_end().as_bytes()).ok_or_else(senseless)?)
    }

    pub(super) fn call(&self, subcommand: &'static str) -> Call<'_> {
        self.git.call(subcommand).repository(&self.git_dir)
    }

    pub(super) fn objects(&self) -> PathBuf {
        self.git_dir.join("objects")
    }
}

/// What the remote lists.
#[derive(Debug, Default)]
struct Listed {
    default: Option<String>,
    branch: Option<Sha>,
}

/// The same for all usual spellings of the address.
fn id(repository: &Repository) -> String {
    hex::sha256(repository.key().as_bytes())[..ID_DIGITS].to_owned()
}

/// Each branch has its own, so that runs at several can fetch at once.
fn own_ref(branch: &Branch, name: &str) -> String {
    format!("refs/relay/{}/{name}", branch.key())
}

const ID_DIGITS: usize = 16;

/// Tells a whole mirror from one whose making was cut short.
const MADE: &str = "relay-made";
