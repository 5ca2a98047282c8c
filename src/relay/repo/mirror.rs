//! A repository as this machine keeps it: whole, bare, and never touched by anything of an agent's.

mod remote;
mod sweep;
mod workspace;

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::git::{GitCommand, GitLimits, GitProgram, is_plain_path};
use super::push::map_network_error;
use super::repository::RepositoryUrl;
use super::{BranchKey, BranchLease, ObjectId, RepoError, SandboxBranch};
use crate::base::hex;
use crate::base::secret::SecretString;

pub use sweep::remove_unused_mirrors;
pub use workspace::{CommitAuthor, FileOwner, MAX_CHECKOUT_NAMES};

/// The mirror of one remote repository.
#[derive(Clone, Debug)]
pub struct RepoMirror {
    git: GitProgram,
    repository: RepositoryUrl,
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
    fn of_git(self) -> GitLimits {
        GitLimits {
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
    pub branch: SandboxBranch,
    /// Whether the remote has the branch already: then the run appends to it.
    pub exists: bool,
    /// What the agent's commits have to build on.
    pub start: ObjectId,
    /// The branch that the work is for, without `refs/heads/`, and where it stands.
    pub base: String,
    pub base_tip: ObjectId,
}

impl BranchState {
    /// What the remote's branch must be when it is pushed: `None` where there must be none.
    pub fn expected_remote_tip(&self) -> Option<ObjectId> {
        self.exists.then_some(self.start)
    }

    /// What is not the agent's work, as git takes it among revisions.
    pub(super) fn base_revisions(&self) -> [String; 2] {
        [format!("^{}", self.start), format!("^{}", self.base_tip)]
    }
}

impl RepoMirror {
    /// The mirror of a repository below `state`, made where there is none yet. Nothing is fetched.
    pub fn open(
        git: &GitProgram,
        state: &Path,
        repository: &RepositoryUrl,
    ) -> Result<Self, RepoError> {
        let id = mirror_id(repository);
        let (git_dir, leases) =
            (state.join("mirrors").join(format!("{id}.git")), state.join("branches").join(&id));
        if !is_plain_path(&git_dir) {
            let why = "the relay's directory must be absolute, without `:` and quotes";
            return Err(RepoError::State { path: state.to_owned(), why });
        }
        let (git, repository) = (git.clone(), repository.clone());
        let mirror = Self { git, repository, git_dir, leases, limits: FetchLimits::default() };
        mirror.init_mirror()?;
        Ok(mirror)
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(self, limits: FetchLimits) -> Self {
        Self { limits, ..self }
    }

    /// Git makes what is missing, and leaves what is there: it does not matter who was killed before.
    fn init_mirror(&self) -> Result<(), RepoError> {
        let disk = |source| RepoError::Disk { path: self.git_dir.clone(), source };
        let private = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        private(&self.git_dir).and_then(|()| private(&self.leases)).map_err(disk)?;
        let _lock = self.lock_file("lock")?;
        if !fs::exists(self.git_dir.join(COMPLETE_MARKER)).map_err(disk)? {
            let words = ["--bare", "--quiet", "--template=", "--object-format=sha1"];
            self.git_command("init").args(words).execute()?;
        }
        // Its time says when somebody last came here.
        let made = File::create(self.git_dir.join(COMPLETE_MARKER)).map_err(disk)?;
        made.set_modified(SystemTime::now()).map_err(disk)
    }

    /// Nobody else has the file of this name beside the mirror locked, for as long as it is open.
    pub(super) fn lock_file(&self, name: &str) -> Result<File, RepoError> {
        let path = self.git_dir.with_extension(name);
        let locked = File::create(&path).and_then(|file| file.lock().map(|()| file));
        locked.map_err(|source| RepoError::Disk { path, source })
    }

    /// Takes the lease of a branch; [`RepoError::Busy`] where another run has it.
    pub fn lease_branch(&self, key: &BranchKey) -> Result<BranchLease, RepoError> {
        BranchLease::try_acquire(&self.leases, key)
    }

    /// Whether somebody is at a branch of a repository below `state`, for whoever only looks.
    pub fn is_leased(
        state: &Path,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<bool, RepoError> {
        BranchLease::is_leased(&state.join("branches").join(mirror_id(repository)), key)
    }

    /// Takes the lease of a branch as soon as it is free, or gives up after `patience`.
    pub async fn lease_with_timeout(
        &self,
        key: &BranchKey,
        patience: Duration,
    ) -> Result<BranchLease, RepoError> {
        BranchLease::acquire_with_timeout(&self.leases, key, patience).await
    }

    /// Asks the remote where the branch stands, and fetches what a run at it begins with. Nothing is changed there,
    /// so it may be asked as often as one likes. Without a `base` it is the remote's default branch.
    pub fn ensure_branch(
        &self,
        lease: &BranchLease,
        base: Option<&str>,
        token: Option<&SecretString>,
    ) -> Result<BranchState, RepoError> {
        let branch = lease.branch();
        if let Some(base) = base {
            self.check_branch_name(base)?;
        }
        let listed = self.list_remote_refs(branch, base, token)?;
        let Some(base) = base.map(str::to_owned).or(listed.default.clone()) else {
            return Err(RepoError::NoBase { base: "HEAD".to_owned() });
        };
        if base == branch.to_string() || listed.default == Some(branch.to_string()) {
            return Err(RepoError::Default { branch: branch.clone() });
        }
        let [base_ref, branch_ref] = ["base", "branch"].map(|name| mirror_ref(branch, name));
        let mut wanted = vec![format!("+refs/heads/{base}:{base_ref}")];
        if listed.branch.is_some() {
            wanted.push(format!("+{}:{branch_ref}", branch.to_ref()));
        }
        self.fetch_refs(&wanted, token)?.map_err(|error| match error.stderr_text() {
            Some(said) if said.contains("couldn't find remote ref") => {
                RepoError::NoBase { base: base.clone() }
            }
            // A network may be slow today.
            _ if error.is_resource_limit()
                && !matches!(error, super::git::GitError::Late { .. }) =>
            {
                RepoError::Costly {
                    branch: branch.clone(),
                    why: error.to_string(),
                    limits: self.limits,
                }
            }
            _ => map_network_error(error),
        })?;
        let base_tip = self.resolve_ref(&base_ref)?;
        let exists = listed.branch.is_some();
        let start = if exists { self.resolve_ref(&branch_ref)? } else { base_tip };
        Ok(BranchState { branch: branch.clone(), exists, start, base, base_tip })
    }

    /// Where the branch stands at the remote, now.
    pub fn remote_tip(
        &self,
        branch: &SandboxBranch,
        token: Option<&SecretString>,
    ) -> Result<Option<ObjectId>, RepoError> {
        self.list_remote_refs(branch, None, token).map(|listed| listed.branch)
    }

    /// Whether `tip`, which was fetched, has `commit` among what it builds on. A commit that never arrived anywhere is
    /// not known here.
    pub fn is_ancestor(&self, tip: ObjectId, commit: ObjectId) -> bool {
        let words = [commit.to_string(), tip.to_string()];
        let ancestor = self.git_command("merge-base").arg("--is-ancestor").args(words);
        ancestor.run_predicate().unwrap_or(false)
    }

    fn list_remote_refs(
        &self,
        branch: &SandboxBranch,
        base: Option<&str>,
        token: Option<&SecretString>,
    ) -> Result<RemoteRefs, RepoError> {
        let call = self.git_command("ls-remote").args(["--symref", "--"]).arg(self.remote_url());
        let call = call.args(["HEAD", &branch.to_ref()]);
        let call = call.args(base.map(|base| format!("refs/heads/{base}")));
        let text = self
            .authenticate(call.limits(self.limits.of_git()), token)?
            .output_text()
            .map_err(map_network_error)?;
        let mut listed = RemoteRefs::default();
        for (left, name) in text.lines().filter_map(|line| line.split_once('\t')) {
            match left.strip_prefix("ref: refs/heads/") {
                Some(default) if name == "HEAD" => listed.default = Some(default.to_owned()),
                _ if name == branch.to_ref() => listed.branch = ObjectId::parse(left.as_bytes()),
                _ => (),
            }
        }
        Ok(listed)
    }

    /// What git made of it, if git could be let in.
    fn fetch_refs(
        &self,
        wanted: &[String],
        token: Option<&SecretString>,
    ) -> Result<Result<(), super::git::GitError>, RepoError> {
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--refmap=", "--"];
        let call = self.git_command("fetch").args(words).arg(self.remote_url()).args(wanted);
        Ok(self.authenticate(call.limits(self.limits.of_git()), token)?.execute())
    }

    /// The name goes into refspecs, where much more has a meaning than in a name.
    fn check_branch_name(&self, base: &str) -> Result<(), RepoError> {
        let name = format!("refs/heads/{base}");
        if self.git.subcommand("check-ref-format").arg(name).run_predicate()? {
            return Ok(());
        }
        Err(RepoError::NoBase { base: base.escape_debug().to_string() })
    }

    fn resolve_ref(&self, name: &str) -> Result<ObjectId, RepoError> {
        let words = ["--verify", "--end-of-options"];
        let text = self
            .git_command("rev-parse")
            .args(words)
            .arg(format!("{name}^{{commit}}"))
            .output_text()?;
        let senseless = || super::git::GitError::Senseless { what: "rev-parse".to_owned() };
        Ok(ObjectId::parse(text.trim_end().as_bytes()).ok_or_else(senseless)?)
    }

    pub(super) fn git_command(&self, subcommand: &'static str) -> GitCommand<'_> {
        self.git.subcommand(subcommand).repository(&self.git_dir)
    }

    pub(super) fn objects_dir(&self) -> PathBuf {
        self.git_dir.join("objects")
    }
}

/// What the remote lists.
#[derive(Debug, Default)]
struct RemoteRefs {
    default: Option<String>,
    branch: Option<ObjectId>,
}

/// The same for all usual spellings of the address.
fn mirror_id(repository: &RepositoryUrl) -> String {
    hex::sha256_hex(repository.canonical_key().as_bytes())[..MIRROR_ID_DIGITS].to_owned()
}

/// Each branch has its own, so that runs at several can fetch at once.
fn mirror_ref(branch: &SandboxBranch, name: &str) -> String {
    format!("refs/relay/{}/{name}", branch.key())
}

const MIRROR_ID_DIGITS: usize = 16;

/// Tells a whole mirror from one whose making was cut short.
const COMPLETE_MARKER: &str = "relay-made";
