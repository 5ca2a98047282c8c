//! The quarantine: the agent's objects are inspected beside the mirror, never in it.
//!
//! The pack is unpacked into a directory of its own that borrows the mirror's objects. Git checks the form of each
//! object on the way in, and that no object is missing. This module then checks that the commits build on what the
//! agent was given, and that the unpacked objects are within the limits.

pub mod commit;
mod existing_branch;
mod rewrite;
pub mod tree;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BranchLease, BranchState, GitBundle, ObjectId, RepoError, RepoMirror};
use crate::relay::git::cat_file::{self, BatchPart, ObjectHeader};
use crate::relay::git::{self, GitCommand, GitInput};
use commit::{ParsedCommit, UnparsedCommit};

pub(super) use rewrite::TRAILER_NAMES;
pub use rewrite::{CommitProvenance, PatchComparison, PatchMismatch};

/// The agent's commits: complete, well-formed, and on top of the commit where the agent began. They are not reviewed
/// yet.
#[derive(Debug)]
pub struct QuarantinedWork {
    pub(super) mirror: RepoMirror,
    /// The lease, which is held until the branch is moved or the work is given up.
    pub(super) lease: BranchLease,
    pub(super) state: BranchState,
    /// The directory of the new objects.
    pub(super) objects: PathBuf,
    /// The agent's own commits, oldest first. Empty if the existing commits of a branch are reviewed.
    pub(super) commits: Vec<ParsedCommit>,
    /// The IDs of the commits that are reviewed and pushed, oldest first.
    pub(super) names: Vec<ObjectId>,
    /// The text of all commits, both as the agent made them and as they are pushed.
    pub(super) texts: Vec<Vec<u8>>,
    /// The commit to push.
    pub(super) tip: ObjectId,
    pub(super) tree: ObjectId,
    pub(super) mode: PatchComparison,
    /// The committer of the rewritten commits. The review refuses this name as an author's. `None` before the rewrite.
    pub(super) committer: Option<String>,
    pub(super) has_work_elsewhere: bool,
    pub(super) limits: QuarantineLimits,
}

/// Limits on what is accepted at all. The [`review`](super::review) decides what may be pushed. The defaults are our
/// choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuarantineLimits {
    pub commits: u32,
    /// The bytes of the commit objects, which are mostly their messages.
    pub commits_bytes: u64,
    pub pack_bytes: u64,
    pub objects: u64,
    /// The bytes of all objects, unpacked.
    pub bytes: u64,
    /// The memory of each git process, in bytes.
    pub memory_bytes: u64,
    /// The time of each git process.
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

/// The reason why the agent's work is refused. The work is kept, and a person has to look at it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuarantineError {
    #[error("git does not accept its objects: {0}")]
    InvalidObjects(String),
    #[error("its tip is no commit")]
    NotACommit,
    #[error("it builds on commits that the agent was not given")]
    UnknownPrerequisite,
    #[error("it does not build on what the agent was given: history was rewritten, or replaced")]
    HistoryRewritten,
    #[error("it has a history of its own, which begins with `{0}`")]
    UnrelatedRoot(ObjectId),
    #[error("its commit `{0}` is not as git writes one: {1}")]
    InvalidCommit(ObjectId, commit::CommitFormatError),
    #[error("its tree `{0}` is not as git writes one: {1}")]
    InvalidTree(ObjectId, tree::TreeFormatError),
    #[error("it brings `{0}`, which its tip does not lead to")]
    UnreachableObject(ObjectId),
    #[error("its tip would lead to other commits than those that were inspected")]
    UninspectedCommits,
    #[error("it has more than {0} commits")]
    TooManyCommits(u32),
    #[error("it unpacks to more than {bytes} bytes or {objects} objects")]
    TooLarge { objects: u64, bytes: u64 },
    #[error("it takes more time or memory than the limits allow: {0}")]
    LimitExceeded(String),
    #[error("it has no commit that the repository does not have")]
    NothingNew,
}

impl Default for QuarantineLimits {
    fn default() -> Self {
        Self {
            commits: 1000,
            commits_bytes: 16 << 20,
            pack_bytes: 64 << 20,
            objects: 200_000,
            bytes: 512 << 20,
            memory_bytes: 1 << 30,
            time: Duration::from_mins(2),
        }
    }
}

impl GitBundle {
    /// Unpacks the bundle into quarantine, and checks its objects and commits.
    ///
    /// # Errors
    /// Returns [`RepoError::QuarantineRefused`] if the content must not be accepted, and
    /// [`RepoError::AnnouncementMismatch`] if the content differs from the announcement.
    pub fn into_quarantine(
        self,
        mirror: &RepoMirror,
        lease: &BranchLease,
        limits: &QuarantineLimits,
    ) -> Result<QuarantinedWork, RepoError> {
        let objects = lease.create_scratch_dir("objects")?;
        let cell = QuarantineRepo { mirror, objects: &objects, limits };
        // 1. Unpack the objects. Git refuses malformed and missing objects.
        cell.index_pack(&self)?;
        // 2. Read the commits, and check that they are work on top of what the agent was given.
        let (commits, texts) = cell.new_commits(&self)?;
        // 3. Limit the number and the size of all objects, before any tree or file is read.
        let reached = cell.check_object_sizes(self.header.tip, &self.state.base_revisions())?;
        // 4. Refuse objects that no commit leads to, and trees that git would not write.
        cell.check_objects(&reached)?;
        // 5. Compare with the announcement. A difference means that the sandbox's git was misled, or lied.
        let Self { state, announced, header, .. } = self;
        let newest = commits.last().expect("there is at least one");
        if newest.tree != announced.tree {
            return Err(RepoError::AnnouncementMismatch { what: "the tree at its tip" });
        }
        if commits.len() != announced.commits as usize {
            return Err(RepoError::AnnouncementMismatch { what: "the number of its commits" });
        }
        Ok(QuarantinedWork {
            mirror: mirror.clone(),
            lease: lease.clone(),
            state,
            tree: newest.tree,
            tip: header.tip,
            objects,
            names: commits.iter().map(|commit| commit.name).collect(),
            texts,
            commits,
            mode: PatchComparison::Bundled(PatchMismatch::NotReplayed),
            committer: None,
            has_work_elsewhere: announced.head.is_some(),
            limits: *limits,
        })
    }
}

impl QuarantinedWork {
    /// Returns the commit to push.
    pub fn tip(&self) -> ObjectId {
        self.tip
    }

    pub fn tree(&self) -> ObjectId {
        self.tree
    }

    pub fn patch_comparison(&self) -> &PatchComparison {
        &self.mode
    }

    /// Returns the number of commits to push.
    pub fn commit_count(&self) -> usize {
        self.names.len()
    }

    /// Builds a git command that sees the new objects and the mirror's.
    pub(super) fn git_command(&self, subcommand: &'static str) -> GitCommand<'_> {
        git_in_quarantine(&self.mirror, &self.objects, subcommand).limits(self.git_limits())
    }

    /// Returns the limits of every git process that reads the objects.
    pub(super) fn git_limits(&self) -> git::GitLimits {
        self.quarantine_repo().git_limits()
    }

    fn quarantine_repo(&self) -> QuarantineRepo<'_> {
        QuarantineRepo { mirror: &self.mirror, objects: &self.objects, limits: &self.limits }
    }
}

/// The repository of one quarantine: the mirror, and a directory for new objects.
struct QuarantineRepo<'a> {
    mirror: &'a RepoMirror,
    objects: &'a Path,
    limits: &'a QuarantineLimits,
}

impl QuarantineRepo<'_> {
    /// Unpacks the pack with all of git's checks. Objects that a thin pack leaves out are copied from the mirror.
    fn index_pack(&self, bundle: &GitBundle) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: bundle.path.clone(), source };
        let max_input = format!("--max-input-size={}", self.limits.pack_bytes);
        let words = [FSCK_STRICT_FLAG, "--fix-thin", "--stdin", "--threads=1", &max_input];
        let call = self.git_command("index-pack").args(words);
        let pack = bundle.open_pack().map_err(disk)?;
        call.input(GitInput::File(pack)).execute().map_err(map_git_error)
    }

    /// Returns the new commits, oldest first, and their text. Checks before that they are work on top of the agent's
    /// start.
    fn new_commits(
        &self,
        bundle: &GitBundle,
    ) -> Result<(Vec<ParsedCommit>, Vec<Vec<u8>>), RepoError> {
        let GitBundle { header, state, .. } = bundle;
        let kind =
            self.git_command("cat-file").args(["-t", &header.tip.to_string()]).output_text()?;
        if kind.trim_end() != "commit" {
            return Err(QuarantineError::NotACommit.into());
        }
        // Prerequisites may only be commits that the agent was given. The mirror also has other runs' work, and a
        // bundle must not pull that in.
        if !self.is_from_base(&header.prerequisites, state)? {
            return Err(QuarantineError::UnknownPrerequisite.into());
        }
        let (start, tip) = (state.start.to_string(), header.tip.to_string());
        let ancestor = self.git_command("merge-base").args(["--is-ancestor", &start, &tip]);
        if !ancestor.run_predicate()? {
            return Err(QuarantineError::HistoryRewritten.into());
        }
        // A limited list: one commit more than allowed is enough to refuse.
        let raw = self.read_commits(self.list_commit_ids(header.tip, &state.base_revisions())?)?;
        let parsed = raw.iter().map(|UnparsedCommit { name, content }| {
            ParsedCommit::parse(*name, content)
                .map_err(|why| QuarantineError::InvalidCommit(*name, why))
        });
        let commits = parsed.collect::<Result<Vec<_>, _>>()?;
        if commits.is_empty() {
            return Err(QuarantineError::NothingNew.into());
        }
        // A commit without parents begins a history of its own.
        match commits.iter().find(|commit| commit.parents.is_empty()) {
            Some(root) => Err(QuarantineError::UnrelatedRoot(root.name).into()),
            None => Ok((commits, raw.into_iter().map(|raw| raw.content).collect())),
        }
    }

    /// Lists the commits that `tip` leads to and that `known` excludes, oldest first.
    fn list_commit_ids(&self, tip: ObjectId, known: &[String]) -> Result<Vec<ObjectId>, RepoError> {
        let max_count = format!("--max-count={}", u64::from(self.limits.commits) + 1);
        let words = ["--topo-order", "--reverse", &max_count, &tip.to_string()];
        let output = self.git_command("rev-list").args(words).args(known).output_text()?;
        let names = parse_object_ids(output.as_bytes(), "rev-list")?;
        if names.len() > self.limits.commits as usize {
            return Err(QuarantineError::TooManyCommits(self.limits.commits).into());
        }
        Ok(names)
    }

    /// Returns true if the agent was given all of these commits. The mirror has other runs' work, too.
    fn is_from_base(&self, commits: &[ObjectId], state: &BranchState) -> Result<bool, RepoError> {
        let list = commits
            .iter()
            .map(ObjectId::to_string)
            .chain(state.base_revisions())
            .collect::<Vec<_>>();
        let call = self.git_command("rev-list").args(["--max-count=1", "--stdin"]);
        let call = call.input(GitInput::Bytes((list.join("\n") + "\n").into_bytes()));
        match call.output_text() {
            Ok(foreign) => Ok(foreign.is_empty()),
            // Git does not know one of the commits, so the agent was not given that commit.
            Err(error @ git::GitError::Failed { .. }) if !error.is_transient() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the content of commits.
    fn read_commits(&self, names: Vec<ObjectId>) -> Result<Vec<UnparsedCommit>, RepoError> {
        let (mut name, mut content, mut commits) = (ObjectId::NONE, vec![], vec![]);
        let limits =
            git::GitLimits { output_bytes: self.limits.commits_bytes, ..self.git_limits() };
        let call = self.git_command("cat-file").arg("--batch").input(object_id_lines(names));
        let read = call.limits(limits).read_objects(|part| match part {
            BatchPart::Head(object) => name = object.name,
            BatchPart::Content(piece) => content.extend_from_slice(piece),
            BatchPart::End => {
                commits.push(UnparsedCommit { name, content: std::mem::take(&mut content) });
            }
        });
        read.map_err(map_git_error)?;
        Ok(commits)
    }

    /// Asks git for the sizes of all objects that `tip` leads to and that `known` excludes, without unpacking them.
    /// Checks their number and the sum of their sizes, and returns their IDs.
    fn check_object_sizes(
        &self,
        tip: ObjectId,
        known: &[String],
    ) -> Result<BTreeSet<ObjectId>, RepoError> {
        let words = ["--objects", "--no-object-names", &tip.to_string()];
        let list = self.git_command("rev-list").args(words).args(known);
        let reached = parse_object_ids(&list.output_bytes().map_err(map_git_error)?, "rev-list")?;
        let check =
            self.git_command("cat-file").arg("--batch-check").input(object_id_lines(reached));
        let objects = parse_object_headers(&check.output_bytes().map_err(map_git_error)?)?;
        let QuarantineLimits { objects: max_objects, bytes, .. } = *self.limits;
        let sum = objects.iter().fold(0_u64, |sum, object| sum.saturating_add(object.size));
        if objects.len() as u64 > max_objects || sum > bytes {
            return Err(QuarantineError::TooLarge { objects: max_objects, bytes }.into());
        }
        Ok(objects.into_iter().map(|object| object.name).collect())
    }

    /// Checks that every unpacked object is `reached`, and that each new tree has the form that git writes.
    fn check_objects(&self, reached: &BTreeSet<ObjectId>) -> Result<(), RepoError> {
        let words = ["--batch-all-objects", "--unordered", "--batch-check"];
        // Only the quarantine's own directory is listed, without the mirror's objects.
        let all = self.mirror.git_command("cat-file").args(words).limits(self.git_limits());
        let all =
            all.env("GIT_OBJECT_DIRECTORY", self.objects).output_bytes().map_err(map_git_error)?;
        let is_reached = |object: &ObjectHeader| reached.contains(&object.name);
        let (expected, unreached): (Vec<_>, Vec<_>) =
            parse_object_headers(&all)?.into_iter().partition(is_reached);
        // Objects that complete a thin pack are copies of the mirror's. Every other object was smuggled in.
        if let Some(stray) = self.first_missing_in_mirror(&unreached)? {
            return Err(QuarantineError::UnreachableObject(stray).into());
        }
        let trees: Vec<_> = expected.iter().filter(|object| object.kind == "tree").collect();
        // A tree is held in memory while it is checked, so its size is limited first.
        if trees.iter().any(|tree| tree.size > MAX_TREE_BYTES) {
            let QuarantineLimits { objects, .. } = *self.limits;
            return Err(QuarantineError::TooLarge { objects, bytes: MAX_TREE_BYTES }.into());
        }
        let (mut name, mut content, mut found) = (ObjectId::NONE, vec![], None);
        let limits = git::GitLimits { output_bytes: u64::MAX, ..self.git_limits() };
        let call = self.git_command("cat-file").arg("--batch").limits(limits);
        let call = call.input(object_id_lines(trees.iter().map(|tree| tree.name)));
        let read = call.read_objects(|part| match part {
            BatchPart::Head(object) => name = object.name,
            BatchPart::Content(piece) => content.extend_from_slice(piece),
            BatchPart::End => {
                let why = tree::check_tree(&content).err();
                found = found.or(why.map(|why| (name, why)));
                content.clear();
            }
        });
        read.map_err(map_git_error)?;
        found.map_or(Ok(()), |(name, why)| Err(QuarantineError::InvalidTree(name, why).into()))
    }

    /// Returns the first of these objects that the mirror does not have. The mirror has the objects that complete a
    /// thin pack.
    fn first_missing_in_mirror(
        &self,
        objects: &[ObjectHeader],
    ) -> Result<Option<ObjectId>, RepoError> {
        if objects.is_empty() {
            return Ok(None);
        }
        let names = object_id_lines(objects.iter().map(|object| object.name));
        let check =
            self.mirror.git_command("cat-file").arg("--batch-check").limits(self.git_limits());
        let output = check.input(names).output_bytes().map_err(map_git_error)?;
        let lines = output.split(|byte| *byte == b'\n');
        let found: BTreeSet<_> =
            lines.filter_map(cat_file::parse_object_header).map(|found| found.name).collect();
        Ok(objects.iter().map(|object| object.name).find(|name| !found.contains(name)))
    }

    fn git_command(&self, subcommand: &'static str) -> GitCommand<'_> {
        git_in_quarantine(self.mirror, self.objects, subcommand).limits(self.git_limits())
    }

    fn git_limits(&self) -> git::GitLimits {
        git::GitLimits {
            time: self.limits.time,
            memory_bytes: self.limits.memory_bytes,
            // `--fix-thin` adds the objects that a thin pack leaves out, so the stored pack may grow.
            file_bytes: self.limits.pack_bytes.saturating_mul(2),
            output_bytes: self.limits.objects.saturating_mul(OBJECT_LINE_BYTES),
        }
    }
}

/// Maps an error of git on the agent's objects: temporary errors are this machine's, and others are the work's.
pub(super) fn map_git_error(error: git::GitError) -> RepoError {
    let why = error.stderr_text().filter(|stderr| !stderr.is_empty());
    let why = why.map_or_else(|| error.to_string(), git::summarize_stderr);
    match error {
        error if error.is_transient() => error.into(),
        error if error.is_resource_limit() => QuarantineError::LimitExceeded(why).into(),
        git::GitError::Failed { .. } => QuarantineError::InvalidObjects(why).into(),
        error => error.into(),
    }
}

/// Parses object IDs in git's output, one on each line.
fn parse_object_ids(output: &[u8], command: &str) -> Result<Vec<ObjectId>, git::GitError> {
    let lines = output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let names = lines.map(ObjectId::parse).collect::<Option<_>>();
    names.ok_or_else(|| git::GitError::UnexpectedOutput { command: command.to_owned() })
}

/// Parses lines of `cat-file --batch-check`.
fn parse_object_headers(output: &[u8]) -> Result<Vec<ObjectHeader>, git::GitError> {
    let lines = output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let objects = lines.map(cat_file::parse_object_header).collect::<Option<_>>();
    objects.ok_or_else(|| git::GitError::UnexpectedOutput { command: "cat-file".to_owned() })
}

/// Formats object IDs as input of git, one on each line.
fn object_id_lines(names: impl IntoIterator<Item = ObjectId>) -> GitInput {
    let mut text = String::new();
    for name in names {
        let _ = writeln!(text, "{name}");
    }
    GitInput::Bytes(text.into_bytes())
}

/// Builds a git command that writes new objects to the quarantine, and reads the mirror's objects as well.
fn git_in_quarantine<'a>(
    mirror: &'a RepoMirror,
    objects: &Path,
    subcommand: &'static str,
) -> GitCommand<'a> {
    let call = mirror.git_command(subcommand).env("GIT_OBJECT_DIRECTORY", objects);
    call.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", mirror.objects_dir())
}

/// The flag that makes git's warnings errors, and two of its notes, too.
const FSCK_STRICT_FLAG: &str = "--strict=badFilemode=error,gitmodulesParse=error";

/// The longest output line of one object in bytes: an ID, a kind and a size of 20 digits.
const OBJECT_LINE_BYTES: u64 = 72;

/// The largest tree in bytes: a directory of some hundred thousand files. A tree is held in memory while it is checked.
const MAX_TREE_BYTES: u64 = 16 << 20;
