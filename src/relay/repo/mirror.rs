//! The mirror: a complete bare copy of a repository on this machine, which no agent can reach.

mod commit_list;
mod fetch_lock;
mod remote;
mod sweep;
mod workspace;

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::git::{GitCommand, GitLimits, GitProgram, is_plain_path};
use super::remote_error::map_network_error;
use super::repository::RepositoryUrl;
use super::{BranchKey, BranchLease, ObjectId, RepoError, SandboxBranch};
use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

pub use sweep::remove_unused_mirrors;
pub use workspace::{CommitAuthor, FileOwner, MAX_CHECKOUT_NAMES};

/// The mirror of one remote repository.
#[derive(Clone, Debug)]
pub struct RepoMirror {
    git: GitProgram,
    repository: RepositoryUrl,
    /// The path of the bare repository.
    git_dir: PathBuf,
    /// The directory of the branches' leases.
    leases: PathBuf,
    limits: FetchLimits,
}

/// Limits of one fetch, and of the creation of one workspace. The defaults are our choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FetchLimits {
    /// The largest pack that is fetched, or made for a workspace.
    pub pack_bytes: u64,
    /// The bytes of a mirror above which nothing more is fetched into it. One fetch may exceed them by `pack_bytes`.
    pub mirror_bytes: u64,
    /// The memory of each git process, in bytes.
    pub memory_bytes: u64,
    /// The time of one git process.
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self {
            pack_bytes: 4 << 30,
            mirror_bytes: 16 << 30,
            memory_bytes: 5 << 30,
            time: Duration::from_mins(15),
        }
    }
}

impl FetchLimits {
    /// Returns the limits of git processes. Git maps a pack into memory, so the memory must be larger than the pack.
    fn of_git(self) -> GitLimits {
        GitLimits {
            time: self.time,
            output_bytes: 16 << 20,
            memory_bytes: self.memory_bytes,
            file_bytes: self.pack_bytes,
        }
    }

    /// Returns the limits of the git that lists the remote's refs. Git holds the whole list in memory before it prints
    /// anything, and the remote decides how long the list is.
    fn of_ref_list(self) -> GitLimits {
        let memory_bytes = (self.memory_bytes / REF_LIST_PART).max(MIN_REF_LIST_BYTES);
        GitLimits { memory_bytes: memory_bytes.min(self.memory_bytes), ..self.of_git() }
    }

    /// Returns the limits of the git that pushes notes. It holds the list of the remote's refs, too, and the notes.
    pub(super) fn of_note_push(self) -> GitLimits {
        let memory_bytes = (self.memory_bytes / NOTE_PUSH_PART).max(MIN_REF_LIST_BYTES);
        GitLimits { memory_bytes: memory_bytes.min(self.memory_bytes), ..GitLimits::default() }
    }
}

/// The state of a branch at the remote when a run begins. The state is stored before the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchState {
    pub branch: SandboxBranch,
    /// True if the remote has the branch already. The run then appends to it.
    pub exists: bool,
    /// The commit that the agent's commits must build on.
    pub start: ObjectId,
    /// The branch that the work is for, without `refs/heads/`.
    pub base: String,
    /// The commit of `base` at the remote.
    pub base_tip: ObjectId,
}

impl BranchState {
    /// Returns the commit that the remote's branch must have at the push, or `None` if the branch must not exist.
    pub fn expected_remote_tip(&self) -> Option<ObjectId> {
        self.exists.then_some(self.start)
    }

    /// Returns git revisions that exclude all commits that are not the agent's.
    pub(super) fn base_revisions(&self) -> [String; 2] {
        [format!("^{}", self.start), format!("^{}", self.base_tip)]
    }
}

impl RepoMirror {
    /// Opens the mirror of a repository below `state`, and creates it if there is none. Fetches nothing.
    pub fn open(
        git: &GitProgram,
        state: &Path,
        repository: &RepositoryUrl,
    ) -> Result<Self, RepoError> {
        let id = mirror_id(repository);
        // Leases are beside the mirror and not in it: the removal of a mirror must not release a lease.
        let (git_dir, leases) =
            (state.join("mirrors").join(format!("{id}.git")), state.join("branches").join(&id));
        // Git separates alternate object directories by `:`, and unquotes paths in them.
        if !is_plain_path(&git_dir) {
            let why = "the relay's directory must be absolute, without `:` and quotes";
            return Err(RepoError::StateUnusable { path: state.to_owned(), why });
        }
        let (git, repository) = (git.clone(), repository.clone());
        let mirror = Self { git, repository, git_dir, leases, limits: FetchLimits::default() };
        mirror.init_mirror()?;
        Ok(mirror)
    }

    /// Replaces the limits.
    #[must_use]
    pub fn with_limits(self, limits: FetchLimits) -> Self {
        Self { limits, ..self }
    }

    /// Returns the same mirror, whose git calls are killed when `cancel` is cancelled.
    #[must_use]
    pub fn with_cancellation(self, cancel: CancellationToken) -> Self {
        Self { git: self.git.with_cancellation(cancel), ..self }
    }

    /// Creates whatever is missing. `git init` leaves existing files alone, so an interrupted creation does not matter.
    fn init_mirror(&self) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: self.git_dir.clone(), source };
        let private = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        private(&self.git_dir).and_then(|()| private(&self.leases)).map_err(disk)?;
        // The lock keeps a sweep from removing the mirror while it is created or marked as used.
        let _lock = self.lock_file("lock")?;
        if !fs::exists(self.git_dir.join(COMPLETE_MARKER)).map_err(disk)? {
            let words = ["--bare", "--quiet", "--template=", "--object-format=sha1"];
            self.git_command("init").args(words).execute()?;
        }
        // The marker's time is the time of the last use, which a sweep reads.
        let marker = File::create(self.git_dir.join(COMPLETE_MARKER)).map_err(disk)?;
        marker.set_modified(SystemTime::now()).map_err(disk)
    }

    /// Locks a file of this name beside the mirror, and waits for the lock. The lock lives as long as the returned
    /// file.
    pub(super) fn lock_file(&self, name: &str) -> Result<File, RepoError> {
        let path = self.git_dir.with_extension(name);
        let locked = File::create(&path).and_then(|file| file.lock().map(|()| file));
        locked.map_err(|source| RepoError::Io { path, source })
    }

    /// Acquires the lease of a branch. Returns [`RepoError::BranchInUse`] if another holder has it.
    pub fn lease_branch(&self, key: &BranchKey) -> Result<BranchLease, RepoError> {
        BranchLease::try_acquire(&self.leases, key)
    }

    /// Returns true if a process holds the lease of a branch, for callers that only display it. Creates nothing.
    pub fn is_leased(
        state: &Path,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<bool, RepoError> {
        BranchLease::is_leased(&state.join("branches").join(mirror_id(repository)), key)
    }

    /// Acquires the lease of a branch as soon as it is free. Returns [`RepoError::BranchInUse`] after `max_wait`.
    pub async fn lease_with_timeout(
        &self,
        key: &BranchKey,
        max_wait: Duration,
    ) -> Result<BranchLease, RepoError> {
        BranchLease::acquire_with_timeout(&self.leases, key, max_wait).await
    }

    /// Reads the branch's state at the remote, and fetches the commits that a run begins with. The remote is not
    /// changed, so the call can be repeated. Without a `base`, the remote's default branch is the base.
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
        self.check_not_full(branch)?;
        let listed = self.list_remote_refs(branch, base, token)?;
        let Some(base) = base.map(str::to_owned).or(listed.default.clone()) else {
            return Err(RepoError::UnknownBase { base: "HEAD".to_owned() });
        };
        // The relay must never push to the branch that people merge into.
        if base == branch.to_string() || listed.default == Some(branch.to_string()) {
            return Err(RepoError::DefaultBranch { branch: branch.clone() });
        }
        // Each branch has refs of its own in the mirror, so fetches for other branches do not move them.
        let [base_ref, branch_ref] = ["base", "branch"].map(|name| mirror_ref(branch, name));
        let mut refspecs = vec![format!("+refs/heads/{base}:{base_ref}")];
        // The leading `+` lets the mirror's own refs follow a remote branch that was moved back.
        if listed.branch.is_some() {
            refspecs.push(format!("+{}:{branch_ref}", branch.to_ref()));
        }
        self.remove_ref_locks([&base_ref, &branch_ref])?;
        self.fetch_refs(&refspecs, token)?.map_err(|error| match error.stderr_text() {
            // A missing base is reported as such, and not as an error of the network.
            Some(stderr) if stderr.contains("couldn't find remote ref") => {
                RepoError::UnknownBase { base: base.clone() }
            }
            // A timeout is not such an error: a network may be slow today, so a later attempt can succeed.
            _ if error.is_resource_limit()
                && !matches!(error, super::git::GitError::Timeout { .. }) =>
            {
                RepoError::FetchLimitExceeded {
                    branch: branch.clone(),
                    why: error.to_string(),
                    limits: self.limits,
                }
            }
            _ => self.map_remote_error(error),
        })?;
        // The fetched refs count, and not the listed ones: the remote may have moved in between.
        let base_tip = self.resolve_ref(&base_ref)?;
        let exists = listed.branch.is_some();
        let start = if exists { self.resolve_ref(&branch_ref)? } else { base_tip };
        Ok(BranchState { branch: branch.clone(), exists, start, base, base_tip })
    }

    /// Returns the branch's present commit at the remote, or `None` if the branch does not exist.
    pub fn remote_tip(
        &self,
        branch: &SandboxBranch,
        token: Option<&SecretString>,
    ) -> Result<Option<ObjectId>, RepoError> {
        self.list_remote_refs(branch, None, token).map(|listed| listed.branch)
    }

    /// Returns true if `tip`, which must have been fetched, has `commit` as an ancestor or is that commit. Returns
    /// false if the mirror does not have the commit, or if git fails.
    pub fn is_ancestor(&self, tip: ObjectId, commit: ObjectId) -> bool {
        let words = [commit.to_string(), tip.to_string()];
        let ancestor = self.git_command("merge-base").arg("--is-ancestor").args(words);
        ancestor.run_predicate().unwrap_or(false)
    }

    /// Lists the default branch and the run's branch of the remote.
    fn list_remote_refs(
        &self,
        branch: &SandboxBranch,
        base: Option<&str>,
        token: Option<&SecretString>,
    ) -> Result<RemoteRefs, RepoError> {
        let mut names = vec!["HEAD".to_owned(), branch.to_ref()];
        names.extend(base.map(|base| format!("refs/heads/{base}")));
        let text = self
            .ref_list_command(&["--symref"], &names, token)?
            .output_text()
            .map_err(|error| self.map_list_error(error, branch))?;
        let mut listed = RemoteRefs::default();
        // With `--symref`, the line of a symbolic ref is `ref: refs/heads/NAME<TAB>HEAD`; all others are `ID<TAB>NAME`.
        for (left, name) in text.lines().filter_map(|line| line.split_once('\t')) {
            match left.strip_prefix("ref: refs/heads/") {
                Some(default) if name == "HEAD" => listed.default = Some(default.to_owned()),
                _ if name == branch.to_ref() => listed.branch = ObjectId::parse(left.as_bytes()),
                _ => (),
            }
        }
        Ok(listed)
    }

    /// Fetches refs. The outer error is of the access to the remote, and the inner one is git's.
    fn fetch_refs(
        &self,
        refspecs: &[String],
        token: Option<&SecretString>,
    ) -> Result<Result<(), super::git::GitError>, RepoError> {
        let call = self.fetch_command(refspecs, token)?;
        self.run_locked_fetch(|| call.execute())
    }

    /// Maps an error of the git that lists refs. A list without an end is no error of the network.
    fn map_list_error(&self, error: super::git::GitError, branch: &SandboxBranch) -> RepoError {
        let is_timeout = matches!(error, super::git::GitError::Timeout { .. });
        if is_timeout || !error.is_resource_limit() {
            return self.map_remote_error(error);
        }
        let why = format!("the remote lists too many refs: {error}");
        RepoError::FetchLimitExceeded { branch: branch.clone(), why, limits: self.limits }
    }

    /// Maps an error of git to an error of the remote. A repository of this machine needs no token, so its errors name its
    /// path.
    fn map_remote_error(&self, error: super::git::GitError) -> RepoError {
        match (map_network_error(error), &self.repository) {
            (RepoError::Unauthorized { .. }, RepositoryUrl::Local(path)) => {
                let exists = path.try_exists().unwrap_or(true);
                let why = if exists {
                    "git cannot read a repository there"
                } else {
                    "the path does not exist on this machine"
                };
                RepoError::NotARepository { path: path.clone(), why }
            }
            (mapped, _) => mapped,
        }
    }

    /// Checks a branch's name before it is put into a refspec, in which many characters have a meaning.
    fn check_branch_name(&self, base: &str) -> Result<(), RepoError> {
        let name = format!("refs/heads/{base}");
        if self.git.subcommand("check-ref-format").arg(name).run_predicate()? {
            return Ok(());
        }
        Err(RepoError::UnknownBase { base: base.escape_debug().to_string() })
    }

    /// Returns the commit of a ref in the mirror.
    fn resolve_ref(&self, name: &str) -> Result<ObjectId, RepoError> {
        let words = ["--verify", "--end-of-options"];
        let text = self
            .git_command("rev-parse")
            .args(words)
            .arg(format!("{name}^{{commit}}"))
            .output_text()?;
        let senseless =
            || super::git::GitError::UnexpectedOutput { command: "rev-parse".to_owned() };
        Ok(ObjectId::parse(text.trim_end().as_bytes()).ok_or_else(senseless)?)
    }

    /// Builds a git command in the mirror.
    pub(super) fn git_command(&self, subcommand: &'static str) -> GitCommand<'_> {
        self.git.subcommand(subcommand).repository(&self.git_dir)
    }

    /// Returns the limits of fetches into this mirror.
    pub(super) fn fetch_limits(&self) -> FetchLimits {
        self.limits
    }

    /// Returns the directory of the mirror's objects.
    pub(super) fn objects_dir(&self) -> PathBuf {
        self.git_dir.join("objects")
    }
}

/// The refs that the remote has listed.
#[derive(Debug, Default)]
struct RemoteRefs {
    default: Option<String>,
    branch: Option<ObjectId>,
}

/// Returns the mirror's directory name, which is equal for all usual spellings of a repository's address.
fn mirror_id(repository: &RepositoryUrl) -> String {
    sha256_hex(repository.canonical_key().as_bytes())[..MIRROR_ID_DIGITS].to_owned()
}

/// Returns a ref of a branch in the mirror. Each branch has its own refs, so that runs can fetch at the same time.
fn mirror_ref(branch: &SandboxBranch, name: &str) -> String {
    format!("refs/relay/{}/{name}", branch.key())
}

/// Returns the ref of the notes in the mirror while a note of this branch's work is added.
pub(super) fn note_ref(branch: &SandboxBranch) -> String {
    format!("refs/notes/relay/{}", branch.key())
}

/// The part of a fetch's memory that a list of refs may take: 512 MiB of 5 GiB, for some two million refs. Our choice.
const REF_LIST_PART: u64 = 10;

/// The part of a fetch's memory that a push of notes may take: 1 GiB of 5 GiB. Our choice.
const NOTE_PUSH_PART: u64 = 5;

/// The least memory for a list of refs, if a fetch has as much: git and its libraries take a part of it. Our choice.
const MIN_REF_LIST_BYTES: u64 = 256 << 20;

/// The number of hex digits of a mirror's directory name: 64 bits of the hash.
const MIRROR_ID_DIGITS: usize = 16;

/// The file that marks a mirror as complete. A mirror without it was interrupted during its creation.
const COMPLETE_MARKER: &str = "relay-made";
