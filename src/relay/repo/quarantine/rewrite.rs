//! The agent's commits made anew by the relay, and whether the patches that people read come to the same.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::{QuarantineError, QuarantinedWork, parse_object_ids};
use crate::relay::git::{self, GitInput};
use crate::relay::repo::{ObjectId, RepoError};

/// What tells of the work. Its commits are the relay's in any case: the agent's trees, authors and messages, and the
/// relay's name and trailers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PatchComparison {
    /// The bundle and the patches, which come to the same.
    Replayed,
    /// The bundle alone.
    Bundled(PatchMismatch),
}

/// Why the patches do not tell what the commits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PatchMismatch {
    /// Nobody has compared them yet, and the commits are the agent's still.
    NotReplayed,
    /// Patches cannot say what a merge is.
    Merge,
    /// The patches are not one for each commit, in their order.
    OtherPatches,
    /// The patches do not apply where the agent began.
    DoesNotApply,
    /// They apply, and come to something else than the commits: a message was read as a patch, or ends of lines were
    /// lost.
    OtherTree,
}

/// What is said about each commit that the relay makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitProvenance {
    /// `Name <email>`.
    pub committer: String,
    pub run: String,
    pub agent: Option<String>,
}

impl QuarantinedWork {
    /// Makes the commits anew, and applies the patches in `patches` to where the agent began, to see whether they come to
    /// the very tree that the bundle has. Done twice it comes to the same names.
    pub fn rewrite_and_compare(
        mut self,
        patches: &Path,
        provenance: &CommitProvenance,
    ) -> Result<Self, RepoError> {
        self.mode = self
            .compare_patches(patches)?
            .map_or(PatchComparison::Replayed, PatchComparison::Bundled);
        self.rewrite_commits(provenance)
    }

    /// The first way in which the patches are not the commits.
    fn compare_patches(&self, patches: &Path) -> Result<Option<PatchMismatch>, RepoError> {
        let disk = |source| RepoError::Disk { path: patches.to_owned(), source };
        if !self.is_linear() {
            return Ok(Some(PatchMismatch::Merge));
        }
        let names = patch_commit_ids(patches).map_err(disk)?;
        if names.is_none_or(|names| !names.iter().eq(self.commits.iter().map(|it| &it.name))) {
            return Ok(Some(PatchMismatch::OtherPatches));
        }
        let index = self.lease.create_scratch_dir("index")?.join("index");
        let on_index = |what| self.git_command(what).env("GIT_INDEX_FILE", &index);
        on_index("read-tree").arg(self.state.start.to_string()).execute()?;
        let input = GitInput::File(File::open(patches).map_err(disk)?);
        let words = ["--cached", "--whitespace=nowarn", "--allow-empty", "-"];
        match on_index("apply").args(words).input(input).execute() {
            Ok(()) => (),
            Err(error) if error.is_transient() => return Err(error.into()),
            // Whatever is too much for it: the commits are there.
            Err(_) => return Ok(Some(PatchMismatch::DoesNotApply)),
        }
        let tree = on_index("write-tree").output_text()?;
        let is_same = ObjectId::parse(tree.trim_end().as_bytes()) == Some(self.tree);
        Ok((!is_same).then_some(PatchMismatch::OtherTree))
    }

    /// Whether each commit has the one before it as its only parent.
    fn is_linear(&self) -> bool {
        let before = [self.state.start].into_iter().chain(self.commits.iter().map(|it| it.name));
        self.commits.iter().zip(before).all(|(commit, parent)| commit.parents == [parent])
    }

    fn rewrite_commits(mut self, provenance: &CommitProvenance) -> Result<Self, RepoError> {
        let directory = self.lease.create_scratch_dir("commits")?;
        let disk = |source| RepoError::Disk { path: directory.clone(), source };
        let trailers = provenance.to_trailers();
        let (mut made, mut names, mut list) = (HashMap::new(), vec![], String::new());
        let mut texts = vec![];
        // Parents come before their children.
        for (at, commit) in self.commits.iter().enumerate() {
            let content = commit.rewritten(&made, &provenance.committer, &trailers);
            let name = ObjectId::hash_object("commit", &content);
            made.insert(commit.name, name);
            names.push(name);
            let path = directory.join(at.to_string());
            fs::write(&path, &content).map_err(disk)?;
            texts.push(content);
            let _ = writeln!(list, "{}", path.display());
        }
        // All of them in one process, which checks their form and says their names.
        let words = ["-t", "commit", "-w", "--no-filters", "--stdin-paths"];
        let call =
            self.git_command("hash-object").args(words).input(GitInput::Bytes(list.into_bytes()));
        let said = call.output_text()?;
        if parse_object_ids(said.as_bytes(), "hash-object")? != names {
            return Err(git::GitError::Senseless { what: "hash-object".to_owned() }.into());
        }
        self.tip = made.get(&self.tip).copied().expect("the tip is one of the commits");
        self.committer = Some(provenance.committer.clone());
        self.texts.extend(texts);
        // Two of the agent's that come to one are one.
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(*name));
        self.names = names;
        self.check_rewritten(&seen)?;
        Ok(self)
    }

    /// Checks that the new tip leads to the commits that were `made`, and to no others, and that all it leads to is within
    /// the limits: this is what will be judged and pushed.
    fn check_rewritten(&self, made: &BTreeSet<ObjectId>) -> Result<(), RepoError> {
        let (cell, known) = (self.quarantine_repo(), self.state.base_revisions());
        let found: BTreeSet<_> = cell.list_commit_ids(self.tip, &known)?.into_iter().collect();
        if found != *made {
            return Err(QuarantineError::Unseen.into());
        }
        cell.check_object_sizes(self.tip, &known).map(drop)
    }
}

impl CommitProvenance {
    fn to_trailers(&self) -> String {
        let values = [Some(&self.run), self.agent.as_ref()];
        let said =
            TRAILER_NAMES.iter().zip(values).filter_map(|(name, value)| Some((name, value?)));
        // A value that began a line of its own would be a trailer of its own.
        let flat = |value: &str| value.replace(|letter: char| letter.is_control(), " ");
        said.fold(String::new(), |lines, (name, value)| lines + name + ": " + &flat(value) + "\n")
    }
}

/// The commits that the patches say they are of; `None` where a line begins like a patch and is none, or where there
/// are no patches, or too many.
fn patch_commit_ids(patches: &Path) -> io::Result<Option<Vec<ObjectId>>> {
    let file = match File::open(patches) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if file.metadata()?.len() > MAX_PATCHES_BYTES {
        return Ok(None);
    }
    let (mut file, mut names) = (BufReader::new(file), vec![]);
    // The beginning of a line: one may be as long as the file.
    let mut line = vec![];
    loop {
        let read = file.fill_buf()?;
        let end = memchr::memchr(b'\n', read).map_or(read.len(), |at| at + 1);
        let room = MAX_FROM_LINE_BYTES.saturating_sub(line.len()).min(end);
        line.extend_from_slice(&read[..room]);
        let is_whole = read.is_empty() || read[end - 1] == b'\n';
        file.consume(end);
        if !is_whole {
            continue;
        }
        if let Some(rest) = line.strip_prefix(b"From ") {
            let name = rest.strip_suffix(b" Mon Sep 17 00:00:00 2001\n").and_then(ObjectId::parse);
            let Some(name) = name else { return Ok(None) };
            names.push(name);
        }
        if line.is_empty() {
            return Ok(Some(names));
        }
        line.clear();
    }
}

impl PatchComparison {
    /// As it stands in records.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Replayed => "replayed",
            Self::Bundled(PatchMismatch::NotReplayed) => "bundled",
            Self::Bundled(PatchMismatch::Merge) => "bundled: merge",
            Self::Bundled(PatchMismatch::OtherPatches) => "bundled: other patches",
            Self::Bundled(PatchMismatch::DoesNotApply) => "bundled: does not apply",
            Self::Bundled(PatchMismatch::OtherTree) => "bundled: other tree",
        }
    }
}

/// Below each message that the relay writes: whose work it is.
pub(in crate::relay::repo) const TRAILER_NAMES: [&str; 2] = ["Sandbox-Run", "Sandbox-Agent"];

/// More than a line that begins a patch.
const MAX_FROM_LINE_BYTES: usize = 100;

/// Git holds all of them in memory when it applies them.
const MAX_PATCHES_BYTES: u64 = 256 << 20;
