//! What the host's own git says of the work, gathered once for all rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::ReviewPolicy;
use super::diff::{self, PathChange};
use super::normalize::fold_case_and_invisible;
use super::secret::{FoundSecrets, ScanWindow, SecretScanner};
use crate::base::secret::SecretString;
use crate::relay::git::cat_file::BatchPart;
use crate::relay::git::{self, GitInput};
use crate::relay::repo::quarantine::map_git_error;
use crate::relay::repo::{ObjectId, QuarantinedWork, RepoError};

/// All that rules are about.
#[derive(Debug, Default)]
pub(super) struct ReviewEvidence {
    /// Of every commit, and of all together. A path may be here more than once.
    pub(super) changes: Vec<PathChange>,
    /// Paths that differ in the end.
    pub(super) files: usize,
    pub(super) large: BTreeSet<(Vec<u8>, u64)>,
    pub(super) links_outside: BTreeSet<Vec<u8>>,
    pub(super) lfs_pointers: BTreeSet<Vec<u8>>,
    /// Where, and what kind.
    pub(super) secrets: BTreeSet<(Option<Vec<u8>>, String)>,
}

impl ReviewEvidence {
    pub(super) fn collect(
        work: &QuarantinedWork,
        policy: &ReviewPolicy,
        known: &[SecretString],
    ) -> Result<Self, RepoError> {
        let outcome = effective_changes(work)?;
        let mut changes = commit_changes(work)?;
        let paths: BTreeSet<_> = outcome.iter().map(|change| &change.path).collect();
        let mut evidence = Self { files: paths.len(), ..Self::default() };
        let before: Vec<_> = outcome.iter().flat_map(|change| change.before.clone()).collect();
        changes.extend(outcome);
        let scanner =
            SecretScanner::new(&policy.secrets, known).expect("patterns are checked when read");
        let mut found = evidence.scan_blobs(work, &changes, (policy, &scanner))?;
        if !found.is_empty() {
            // What was there before is nobody's new secret.
            let old = before.iter().filter(|entry| entry.is_blob()).map(|entry| entry.name);
            let old = secrets_in_blobs(work, old.collect(), &scanner)?;
            found.retain(|_, secrets: &mut FoundSecrets| {
                secrets.retain(|hash, _| !old.contains_key(hash));
                !secrets.is_empty()
            });
        }
        let paths = first_paths(&changes);
        for (name, secrets) in found {
            let path = paths.get(&name).map(|path| path.to_vec());
            evidence.secrets.extend(secrets.into_values().map(|kind| (path.clone(), kind)));
        }
        let told = secrets_in_metadata(work, &changes, &scanner);
        evidence.secrets.extend(told.into_values().map(|kind| (None, kind)));
        evidence.changes = changes;
        Ok(evidence)
    }

    /// Reads every new blob once, and returns the secrets of each.
    fn scan_blobs(
        &mut self,
        work: &QuarantinedWork,
        changes: &[PathChange],
        (policy, scanner): (&ReviewPolicy, &SecretScanner),
    ) -> Result<BTreeMap<ObjectId, FoundSecrets>, RepoError> {
        let mut places: BTreeMap<ObjectId, Vec<&PathChange>> = BTreeMap::new();
        for change in changes.iter().filter(|change| change.after.is_blob()) {
            places.entry(change.after.name).or_default().push(change);
        }
        let (mut secrets, mut name, mut text) =
            (BTreeMap::new(), ObjectId::NONE, ScanWindow::default());
        let (mut found, mut beginning) = (FoundSecrets::new(), vec![]);
        let names = places.keys().copied().collect();
        read_blobs(work, names, |part| match part {
            BatchPart::Head(object) => {
                (name, text, found) = (object.name, ScanWindow::default(), FoundSecrets::new());
                beginning.clear();
                if object.size > policy.review_file_bytes.min(policy.hold_file_bytes) {
                    let paths = places[&name].iter().map(|change| change.path.clone());
                    self.large.extend(paths.map(|path| (path, object.size)));
                }
            }
            BatchPart::Content(piece) => {
                let room = INSPECTED_BYTES.saturating_sub(beginning.len());
                beginning.extend_from_slice(&piece[..piece.len().min(room)]);
                scanner.scan(&mut text, piece, &mut found);
            }
            BatchPart::End => {
                self.inspect_blob(&beginning, &places[&name]);
                let found = std::mem::take(&mut found);
                if !found.is_empty() {
                    secrets.insert(name, found);
                }
            }
        })?;
        Ok(secrets)
    }

    fn inspect_blob(&mut self, beginning: &[u8], places: &[&PathChange]) {
        for change in places {
            match change.after.mode {
                diff::MODE_SYMLINK if leads_outside(&change.path, beginning) => {
                    self.links_outside.insert(change.path.clone());
                }
                diff::MODE_SYMLINK => (),
                _ if beginning.starts_with(LFS_POINTER_PREFIX) => {
                    self.lfs_pointers.insert(change.path.clone());
                }
                _ => (),
            }
        }
    }
}

/// Returns the first path at which each object stands: an agent may have a credential in each of many.
fn first_paths(changes: &[PathChange]) -> BTreeMap<ObjectId, &[u8]> {
    let mut paths = BTreeMap::new();
    for change in changes {
        paths.entry(change.after.name).or_insert(&change.path[..]);
    }
    paths
}

/// What all commits come to, beside what there would be without them.
///
/// Where the agent has merged the newer base, that is what git makes of the two by itself. It is not enough to leave out
/// what is as in the base: a merge that keeps to its own side takes back what the base has brought.
fn effective_changes(work: &QuarantinedWork) -> Result<Vec<PathChange>, RepoError> {
    let merged = merged_base_commits(work)?;
    let without: Vec<_> = if merged.is_empty() {
        vec![work.state.start]
    } else {
        merged.into_iter().map(|base| merge_tree(work, base)).collect::<Result<_, _>>()?
    };
    let changes = without.into_iter().map(|tree| diff_trees(work, tree));
    Ok(changes.collect::<Result<Vec<_>, _>>()?.concat())
}

/// How much of the base is in the work, and was not before: most often one commit, or none.
fn merged_base_commits(work: &QuarantinedWork) -> Result<Vec<ObjectId>, RepoError> {
    let words = ["--all".to_owned(), work.state.base_tip.to_string(), work.tip.to_string()];
    let (said, ended) = work.git_command("merge-base").args(words).output_and_status()?;
    match ended {
        Err(error) if error.is_negative_answer() => return Ok(vec![]),
        ended => ended.map_err(map_git_error)?,
    }
    let mut merged = vec![];
    for name in said.lines() {
        let start = work.state.start.to_string();
        let is_known =
            work.git_command("merge-base").args(["--is-ancestor", name, &start]).run_predicate()?;
        merged.extend((!is_known).then(|| parse_object_id(name)).transpose()?);
    }
    Ok(merged)
}

/// The tree that comes of merging a commit of the base into where the agent began. Where they are in conflict, it has
/// marks: whatever the agent has made of those is its own work.
fn merge_tree(work: &QuarantinedWork, base: ObjectId) -> Result<ObjectId, RepoError> {
    let words = ["--write-tree", "--allow-unrelated-histories", "--no-messages", "--name-only"];
    let call = work.git_command("merge-tree").args(words);
    let (said, ended) =
        call.args([work.state.start, base].map(|it| it.to_string())).output_and_status()?;
    match ended {
        Err(error) if error.is_negative_answer() => (),
        ended => ended.map_err(map_git_error)?,
    }
    parse_object_id(said.lines().next().unwrap_or_default())
}

fn parse_object_id(name: &str) -> Result<ObjectId, RepoError> {
    let senseless = || git::GitError::Senseless { what: "merge-tree".to_owned() };
    Ok(ObjectId::parse(name.as_bytes()).ok_or_else(senseless)?)
}

fn diff_trees(work: &QuarantinedWork, from: ObjectId) -> Result<Vec<PathChange>, RepoError> {
    let call = work
        .git_command("diff-tree")
        .args(DIFF_ARGS)
        .args([from.to_string(), work.tip.to_string()]);
    parse_diff(&call.output_bytes().map_err(map_git_error)?)
}

/// What each commit changes; of a merge, what is in none of its parents.
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

fn parse_diff(bytes: &[u8]) -> Result<Vec<PathChange>, RepoError> {
    let senseless = |_| git::GitError::Senseless { what: "diff-tree".to_owned() };
    Ok(diff::parse_raw_diff(bytes).map_err(senseless)?)
}

/// Secrets that some blobs have.
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

/// Secrets in messages, names, and whatever else stands in a commit.
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

fn read_blobs(
    work: &QuarantinedWork,
    blobs: BTreeSet<ObjectId>,
    take: impl FnMut(BatchPart<'_>),
) -> Result<(), RepoError> {
    let mut names = String::new();
    for name in blobs {
        let _ = writeln!(names, "{name}");
    }
    // As large as what may come in, and larger: blobs of before are read as well.
    let limits = git::GitLimits { output_bytes: u64::MAX, ..work.git_limits() };
    let call = work.git_command("cat-file").arg("--batch").limits(limits);
    call.input(GitInput::Bytes(names.into_bytes())).read_objects(take).map_err(map_git_error)
}

/// Whether a link at `path` with this target may lead out of the tree, or into git's own directory.
///
/// A way up is counted from where the link is, which is a real directory. After a name it may begin anywhere: that may be
/// a link itself, in this commit or in another.
fn leads_outside(path: &[u8], target: &[u8]) -> bool {
    if target.len() >= INSPECTED_BYTES {
        return true;
    }
    let target = fold_case_and_invisible(target);
    if target.starts_with(PATH_SEPARATORS) {
        return true;
    }
    let (mut depth, mut is_named) = (memchr::memchr_iter(b'/', path).count(), false);
    for segment in target.split(PATH_SEPARATORS) {
        match segment {
            "" | "." => (),
            ".." if is_named || depth == 0 => return true,
            ".." => depth -= 1,
            ".git" | "git~1" => return true,
            _ => is_named = true,
        }
    }
    false
}

/// Also that of systems which have another.
const PATH_SEPARATORS: [char; 2] = ['/', '\\'];

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
const LFS_POINTER_PREFIX: &[u8] = b"version https://git-lfs.github.com/spec/";

/// No link that works is longer.
const INSPECTED_BYTES: usize = 4096;
