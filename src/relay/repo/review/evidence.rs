//! The facts about the work from the host's own git, collected once for all rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::ReviewPolicy;
use super::diff::{self, PathChange};
use super::lfs_pointer::is_lfs_pointer;
use super::link_target::{INSPECTED_BYTES, is_impossible_target, leads_outside};
use super::secret::{FoundSecrets, ScanWindow, SecretScanner};
use crate::base::secret::SecretString;
use crate::relay::git::cat_file::BatchPart;
use crate::relay::git::{self, GitInput};
use crate::relay::repo::quarantine::map_git_error;
use crate::relay::repo::{ObjectId, QuarantinedWork, RepoError};

/// The facts that the rules evaluate.
#[derive(Debug, Default)]
pub(super) struct ReviewEvidence {
    /// The changes of every commit, and of all commits together. A path may occur more than once.
    pub(super) changes: Vec<PathChange>,
    /// The number of paths that differ in the end.
    pub(super) files: usize,
    pub(super) large: BTreeSet<(Vec<u8>, u64)>,
    pub(super) links_outside: BTreeSet<Vec<u8>>,
    /// The links that no checkout can make.
    pub(super) impossible_links: BTreeSet<Vec<u8>>,
    pub(super) lfs_pointers: BTreeSet<Vec<u8>>,
    /// The path and the kind of each found secret.
    pub(super) secrets: BTreeSet<(Option<Vec<u8>>, String)>,
}

impl ReviewEvidence {
    /// Collects the facts: lists the changes, and reads every new blob once.
    pub(super) fn collect(
        work: &QuarantinedWork,
        policy: &ReviewPolicy,
        known: &[SecretString],
    ) -> Result<Self, RepoError> {
        // 1. List the changes, of all commits together and of each commit.
        let outcome = effective_changes(work)?;
        let mut changes = commit_changes(work)?;
        let paths: BTreeSet<_> = outcome.iter().map(|change| &change.path).collect();
        let mut evidence = Self { files: paths.len(), ..Self::default() };
        let before: Vec<_> = outcome.iter().flat_map(|change| change.before.clone()).collect();
        changes.extend(outcome);
        // 2. Read every new blob once, with all patterns and all secrets of this host.
        let scanner =
            SecretScanner::new(&policy.secrets, known).expect("patterns are checked when read");
        let mut found = evidence.scan_blobs(work, &changes, (policy, &scanner))?;
        if !found.is_empty() {
            // Secrets that the same paths had before are not new secrets of this work.
            let old = before.iter().filter(|entry| entry.is_blob()).map(|entry| entry.name);
            let old = secrets_in_blobs(work, old.collect(), &scanner)?;
            found.retain(|_, secrets: &mut FoundSecrets| {
                secrets.retain(|hash, _| !old.contains_key(hash));
                !secrets.is_empty()
            });
        }
        // 3. Name one path for each secret, as a person needs one place to look at.
        let paths = first_paths(&changes);
        for (name, secrets) in found {
            let path = paths.get(&name).map(|path| path.to_vec());
            evidence.secrets.extend(secrets.into_values().map(|kind| (path.clone(), kind)));
        }
        // 4. Search the commits' texts and the paths themselves. Such a secret has no path.
        let metadata_secrets = secrets_in_metadata(work, &changes, &scanner);
        evidence.secrets.extend(metadata_secrets.into_values().map(|kind| (None, kind)));
        evidence.changes = changes;
        Ok(evidence)
    }

    /// Reads every new blob once. Returns the secrets of each blob, and notes large files, links and LFS pointers.
    fn scan_blobs(
        &mut self,
        work: &QuarantinedWork,
        changes: &[PathChange],
        (policy, scanner): (&ReviewPolicy, &SecretScanner),
    ) -> Result<BTreeMap<ObjectId, FoundSecrets>, RepoError> {
        let mut changes_by_blob: BTreeMap<ObjectId, Vec<&PathChange>> = BTreeMap::new();
        for change in changes.iter().filter(|change| change.after.is_blob()) {
            // One blob may be at many paths. It is read once, and its findings count for every path.
            changes_by_blob.entry(change.after.name).or_default().push(change);
        }
        let (mut secrets, mut name, mut text) =
            (BTreeMap::new(), ObjectId::NONE, ScanWindow::default());
        let (mut found, mut beginning) = (FoundSecrets::new(), vec![]);
        let names = changes_by_blob.keys().copied().collect();
        read_blobs(work, names, |part| match part {
            BatchPart::Head(object) => {
                (name, text, found) = (object.name, ScanWindow::default(), FoundSecrets::new());
                beginning.clear();
                if object.size > policy.review_file_bytes.min(policy.hold_file_bytes) {
                    let paths = changes_by_blob[&name].iter().map(|change| change.path.clone());
                    self.large.extend(paths.map(|path| (path, object.size)));
                }
            }
            BatchPart::Content(piece) => {
                // Only the beginning is kept in memory. The scanner has a window of its own.
                let room = INSPECTED_BYTES.saturating_sub(beginning.len());
                beginning.extend_from_slice(&piece[..piece.len().min(room)]);
                scanner.scan(&mut text, piece, &mut found);
            }
            BatchPart::End => {
                self.inspect_blob(&beginning, &changes_by_blob[&name]);
                let found = std::mem::take(&mut found);
                if !found.is_empty() {
                    secrets.insert(name, found);
                }
            }
        })?;
        Ok(secrets)
    }

    /// Notes what a blob's first bytes tell: a link out of the repository, or an LFS pointer.
    fn inspect_blob(&mut self, beginning: &[u8], changes: &[&PathChange]) {
        for change in changes {
            match change.after.mode {
                diff::MODE_SYMLINK if is_impossible_target(beginning) => {
                    self.impossible_links.insert(change.path.clone());
                }
                diff::MODE_SYMLINK if leads_outside(&change.path, beginning) => {
                    self.links_outside.insert(change.path.clone());
                }
                diff::MODE_SYMLINK => (),
                _ if is_lfs_pointer(beginning) => {
                    self.lfs_pointers.insert(change.path.clone());
                }
                _ => (),
            }
        }
    }
}

/// Returns the first path of each object. One path is enough: an agent may have the same credential at many paths.
fn first_paths(changes: &[PathChange]) -> BTreeMap<ObjectId, &[u8]> {
    let mut paths = BTreeMap::new();
    for change in changes {
        paths.entry(change.after.name).or_insert(&change.path[..]);
    }
    paths
}

/// Returns the changes of all commits together, compared with the tree that would be there without the agent's work.
///
/// If the agent has merged a newer base, that tree is git's own merge of the start and the newer base. Leaving out the
/// paths that are as in the base would not be enough: a merge that keeps its own side reverts what the base has
/// brought.
fn effective_changes(work: &QuarantinedWork) -> Result<Vec<PathChange>, RepoError> {
    // Several merge bases are possible in criss-cross histories. The work is compared with each of them.
    let merged = merged_base_commits(work)?;
    let without: Vec<_> = if merged.is_empty() {
        vec![work.state.start]
    } else {
        merged.into_iter().map(|base| merge_tree(work, base)).collect::<Result<_, _>>()?
    };
    let changes = without.into_iter().map(|tree| diff_trees(work, tree));
    Ok(changes.collect::<Result<Vec<_>, _>>()?.concat())
}

/// Returns the commits of the base that the work has merged: most often one commit, or none.
fn merged_base_commits(work: &QuarantinedWork) -> Result<Vec<ObjectId>, RepoError> {
    let words = ["--all".to_owned(), work.state.base_tip.to_string(), work.tip.to_string()];
    let (output, ended) = work.git_command("merge-base").args(words).output_and_status()?;
    match ended {
        Err(error) if error.is_negative_answer() => return Ok(vec![]),
        ended => ended.map_err(map_git_error)?,
    }
    let mut merged = vec![];
    for name in output.lines() {
        let start = work.state.start.to_string();
        // A commit that the start already has was not merged by the agent.
        let is_known =
            work.git_command("merge-base").args(["--is-ancestor", name, &start]).run_predicate()?;
        merged.extend((!is_known).then(|| parse_object_id(name)).transpose()?);
    }
    Ok(merged)
}

/// Returns the tree of a merge of a base commit into the agent's start. Conflicts leave marks in the tree, and the
/// agent's resolution of them counts as its own work.
fn merge_tree(work: &QuarantinedWork, base: ObjectId) -> Result<ObjectId, RepoError> {
    let words = ["--write-tree", "--allow-unrelated-histories", "--no-messages", "--name-only"];
    let call = work.git_command("merge-tree").args(words);
    let (output, ended) =
        call.args([work.state.start, base].map(|commit| commit.to_string())).output_and_status()?;
    match ended {
        Err(error) if error.is_negative_answer() => (),
        ended => ended.map_err(map_git_error)?,
    }
    parse_object_id(output.lines().next().unwrap_or_default())
}

fn parse_object_id(name: &str) -> Result<ObjectId, RepoError> {
    let senseless = || git::GitError::UnexpectedOutput { command: "merge-tree".to_owned() };
    Ok(ObjectId::parse(name.as_bytes()).ok_or_else(senseless)?)
}

/// Lists the changes from a tree to the work's tip.
fn diff_trees(work: &QuarantinedWork, from: ObjectId) -> Result<Vec<PathChange>, RepoError> {
    let call = work
        .git_command("diff-tree")
        .args(DIFF_ARGS)
        .args([from.to_string(), work.tip.to_string()]);
    parse_diff(&call.output_bytes().map_err(map_git_error)?)
}

/// Lists the changes of each commit. A merge's changes are those that none of its parents has.
fn commit_changes(work: &QuarantinedWork) -> Result<Vec<PathChange>, RepoError> {
    let mut names = String::new();
    for name in &work.names {
        let _ = writeln!(names, "{name}");
    }
    let call =
        work.git_command("diff-tree").args(DIFF_ARGS).args(["-c", "--no-commit-id", "--stdin"]);
    parse_diff(
        &call.input(GitInput::Bytes(names.into_bytes())).output_bytes().map_err(map_git_error)?,
    )
}

/// Parses a raw diff.
fn parse_diff(bytes: &[u8]) -> Result<Vec<PathChange>, RepoError> {
    let senseless = |_| git::GitError::UnexpectedOutput { command: "diff-tree".to_owned() };
    Ok(diff::parse_raw_diff(bytes).map_err(senseless)?)
}

/// Returns the secrets of some blobs.
fn secrets_in_blobs(
    work: &QuarantinedWork,
    blobs: BTreeSet<ObjectId>,
    scanner: &SecretScanner,
) -> Result<FoundSecrets, RepoError> {
    let (mut found, mut text) = (FoundSecrets::new(), ScanWindow::default());
    read_blobs(work, blobs, |part| match part {
        BatchPart::Head(_) => text = ScanWindow::default(),
        BatchPart::Content(piece) => scanner.scan(&mut text, piece, &mut found),
        BatchPart::End => (),
    })?;
    Ok(found)
}

/// Returns the secrets in commits and paths: messages, names and every other text of a commit.
fn secrets_in_metadata(
    work: &QuarantinedWork,
    changes: &[PathChange],
    scanner: &SecretScanner,
) -> FoundSecrets {
    let mut found = FoundSecrets::new();
    for text in work.texts.iter().chain(changes.iter().map(|change| &change.path)) {
        scanner.scan(&mut ScanWindow::default(), text, &mut found);
    }
    found
}

/// Reads blobs, and passes the parts of each to `take`.
fn read_blobs(
    work: &QuarantinedWork,
    blobs: BTreeSet<ObjectId>,
    take: impl FnMut(BatchPart<'_>),
) -> Result<(), RepoError> {
    let mut names = String::new();
    for name in blobs {
        let _ = writeln!(names, "{name}");
    }
    // No limit: the new blobs' sizes were checked in quarantine, and older blobs are read as well, which may be larger.
    let limits = git::GitLimits { output_bytes: u64::MAX, ..work.git_limits() };
    let call = work.git_command("cat-file").arg("--batch").limits(limits);
    call.input(GitInput::Bytes(names.into_bytes())).read_objects(take).map_err(map_git_error)
}

/// The arguments of every diff.
const DIFF_ARGS: &[&str] = &[
    "-r",
    "-z",
    "--raw",
    "--root",
    "--no-abbrev",
    "--no-renames",
    "--no-ext-diff",
    "--ignore-submodules=none",
];
