//! The rewriting of the agent's commits by the relay, and the comparison of the patches with the commits.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::{QuarantineError, QuarantinedWork, parse_object_ids};
use crate::relay::git::{self, GitInput};
use crate::relay::repo::{ObjectId, RepoError};

/// The result of comparing the patches with the commits. In either case the relay rewrites the commits: they have the
/// agent's trees, authors and messages, and the relay's name and trailers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PatchComparison {
    /// The patches give the same tree as the bundle.
    Replayed,
    /// Only the bundle describes the commits.
    Bundled(PatchMismatch),
}

/// The reason why the patches do not describe the commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PatchMismatch {
    /// The patches were not compared yet, and the commits are still the agent's own.
    NotReplayed,
    /// The work has a merge, which patches cannot describe.
    Merge,
    /// The patches are not one for each commit, in the commits' order.
    OtherPatches,
    /// The patches do not apply to the commit where the agent began.
    DoesNotApply,
    /// The patches apply and give another tree than the commits. A part of a message was read as a patch, or line
    /// endings were lost.
    OtherTree,
}

/// The facts that the relay writes into each commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitProvenance {
    /// The committer, as `Name <email>`.
    pub committer: String,
    pub run: String,
    pub agent: Option<String>,
}

impl QuarantinedWork {
    /// Rewrites the commits, and applies the patches in `patches` to the commit where the agent began, to see whether
    /// they give the tree of the bundle. A repeated call gives the same commit IDs.
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

    /// Returns the first difference between the patches and the commits, or `None` if there is none.
    fn compare_patches(&self, patches: &Path) -> Result<Option<PatchMismatch>, RepoError> {
        let disk = |source| RepoError::Io { path: patches.to_owned(), source };
        if !self.is_linear() {
            return Ok(Some(PatchMismatch::Merge));
        }
        let names = patch_commit_ids(patches).map_err(disk)?;
        if names
            .is_none_or(|names| !names.iter().eq(self.commits.iter().map(|commit| &commit.name)))
        {
            return Ok(Some(PatchMismatch::OtherPatches));
        }
        // The patches are applied to an index only. No file of the work is ever written on this host.
        let index = self.lease.create_scratch_dir("index")?.join("index");
        let on_index = |subcommand| self.git_command(subcommand).env("GIT_INDEX_FILE", &index);
        on_index("read-tree").arg(self.state.start.to_string()).execute()?;
        let input = GitInput::File(File::open(patches).map_err(disk)?);
        let words = ["--cached", "--whitespace=nowarn", "--allow-empty", "-"];
        match on_index("apply").args(words).input(input).execute() {
            Ok(()) => (),
            Err(error) if error.is_transient() => return Err(error.into()),
            // Whatever made git fail, limits among them: the commits of the bundle count in any case.
            Err(_) => return Ok(Some(PatchMismatch::DoesNotApply)),
        }
        let tree = on_index("write-tree").output_text()?;
        let is_same = ObjectId::parse(tree.trim_end().as_bytes()) == Some(self.tree);
        Ok((!is_same).then_some(PatchMismatch::OtherTree))
    }

    /// Returns true if each commit has exactly one parent, the commit before it.
    fn is_linear(&self) -> bool {
        let before =
            [self.state.start].into_iter().chain(self.commits.iter().map(|commit| commit.name));
        self.commits.iter().zip(before).all(|(commit, parent)| commit.parents == [parent])
    }

    /// Writes the rewritten commits into quarantine, and makes them the ones to push.
    fn rewrite_commits(mut self, provenance: &CommitProvenance) -> Result<Self, RepoError> {
        let directory = self.lease.create_scratch_dir("commits")?;
        let disk = |source| RepoError::Io { path: directory.clone(), source };
        let trailers = provenance.to_trailers();
        let (mut new_ids, mut names, mut list) = (HashMap::new(), vec![], String::new());
        let mut texts = vec![];
        // Parents come before their children, so each parent's new ID is known.
        for (at, commit) in self.commits.iter().enumerate() {
            let content = commit.rewritten(&new_ids, &provenance.committer, &trailers);
            let name = ObjectId::hash_object("commit", &content);
            new_ids.insert(commit.name, name);
            names.push(name);
            let path = directory.join(at.to_string());
            fs::write(&path, &content).map_err(disk)?;
            texts.push(content);
            let _ = writeln!(list, "{}", path.display());
        }
        // One process writes all of them, checks their form, and prints their IDs, which must be the expected ones.
        let words = ["-t", "commit", "-w", "--no-filters", "--stdin-paths"];
        let call =
            self.git_command("hash-object").args(words).input(GitInput::Bytes(list.into_bytes()));
        let output = call.output_text()?;
        if parse_object_ids(output.as_bytes(), "hash-object")? != names {
            return Err(
                git::GitError::UnexpectedOutput { command: "hash-object".to_owned() }.into()
            );
        }
        self.tip = new_ids.get(&self.tip).copied().expect("the tip is one of the commits");
        self.committer = Some(provenance.committer.clone());
        self.texts.extend(texts);
        // Two of the agent's commits that were rewritten to the same commit count once.
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(*name));
        self.names = names;
        self.check_rewritten(&seen)?;
        Ok(self)
    }

    /// Checks that the new tip leads to the commits in `rewritten` and to no others, and that all objects are within
    /// the limits. The result is what will be reviewed and pushed.
    fn check_rewritten(&self, rewritten: &BTreeSet<ObjectId>) -> Result<(), RepoError> {
        let (repo, known) = (self.quarantine_repo(), self.state.base_revisions());
        let found: BTreeSet<_> = repo.list_commit_ids(self.tip, &known)?.into_iter().collect();
        if found != *rewritten {
            return Err(QuarantineError::UninspectedCommits.into());
        }
        repo.check_object_sizes(self.tip, &known).map(drop)
    }
}

impl CommitProvenance {
    /// Formats the trailers, one on each line.
    fn to_trailers(&self) -> String {
        let values = [Some(&self.run), self.agent.as_ref()];
        let pairs =
            TRAILER_NAMES.iter().zip(values).filter_map(|(name, value)| Some((name, value?)));
        // A value with a line break would add a trailer of its own, so control characters become spaces.
        let flat = |value: &str| value.replace(|letter: char| letter.is_control(), " ");
        pairs.fold(String::new(), |lines, (name, value)| lines + name + ": " + &flat(value) + "\n")
    }
}

/// Returns the IDs of the commits that the patches name. Returns `None` if a line looks like a patch's first line and
/// is not one, if there are no patches, or if there are too many.
fn patch_commit_ids(patches: &Path) -> io::Result<Option<Vec<ObjectId>>> {
    let file = match File::open(patches) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if file.metadata()?.len() > MAX_PATCHES_BYTES {
        return Ok(None);
    }
    let (mut file, mut names) = (BufReader::new(file), vec![]);
    // Only the beginning of a line is kept: a line may be as long as the file.
    let mut line = vec![];
    loop {
        let read = file.fill_buf()?;
        let end = memchr::memchr(b'\n', read).map_or(read.len(), |at| at + 1);
        let room = MAX_FROM_LINE_BYTES.saturating_sub(line.len()).min(end);
        line.extend_from_slice(&read[..room]);
        let is_whole = read.is_empty() || read[end - 1] == b'\n';
        file.consume(end);
        if !is_whole {
            // The line goes on in the next buffer.
            continue;
        }
        if let Some(rest) = line.strip_prefix(b"From ") {
            // The fixed date is the mark that `format-patch` writes into each first line.
            let name = rest.strip_suffix(b" Mon Sep 17 00:00:00 2001\n").and_then(ObjectId::parse);
            let Some(name) = name else { return Ok(None) };
            names.push(name);
        }
        // An empty read is the end of the file.
        if line.is_empty() {
            return Ok(Some(names));
        }
        line.clear();
    }
}

impl PatchComparison {
    /// Returns the text for audit records and statements.
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

/// The trailers below each message that the relay writes. They name the run and the agent.
pub(in crate::relay::repo) const TRAILER_NAMES: [&str; 2] = ["Sandbox-Run", "Sandbox-Agent"];

/// The bytes of a line's beginning that are kept: more than a patch's first line has.
const MAX_FROM_LINE_BYTES: usize = 100;

/// The largest patches in bytes. Git holds all of them in memory when it applies them. Our choice.
const MAX_PATCHES_BYTES: u64 = 256 << 20;
