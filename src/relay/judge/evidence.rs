//! What the host's own git says of the work, gathered once for all rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::Policy;
use super::diff::{self, Change};
use super::secret::{Found, Scanner, Text};
use super::seen::folded;
use crate::base::secret::Secret;
use crate::git::batch::Part;
use crate::git::{self, Input};
use crate::relay::quarantine::refused;
use crate::relay::{Error, Quarantined, Sha};

/// All that rules are about.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    /// Of every commit, and of all together. A path may be here more than once.
    pub(super) changes: Vec<Change>,
    /// Paths that differ in the end.
    pub(super) files: usize,
    pub(super) large: BTreeSet<(Vec<u8>, u64)>,
    pub(super) links_outside: BTreeSet<Vec<u8>>,
    pub(super) lfs_pointers: BTreeSet<Vec<u8>>,
    /// Where, and what kind.
    pub(super) secrets: BTreeSet<(Option<Vec<u8>>, String)>,
}

impl Evidence {
    pub(super) fn gather(
        work: &Quarantined,
        policy: &Policy,
        known: &[Secret],
    ) -> Result<Self, Error> {
        let outcome = outcome(work)?;
        let mut changes = history(work)?;
        let paths: BTreeSet<_> = outcome.iter().map(|change| &change.path).collect();
        let mut evidence = Self { files: paths.len(), ..Self::default() };
        let before: Vec<_> = outcome.iter().flat_map(|change| change.before.clone()).collect();
        changes.extend(outcome);
        let scanner = Scanner::new(&policy.secrets, known).expect("patterns are checked when read");
        let mut found = evidence.look_into(work, &changes, (policy, &scanner))?;
        if !found.is_empty() {
            // What was there before is nobody's new secret.
            let old = before.iter().filter(|entry| entry.is_blob()).map(|entry| entry.name);
            let old = secrets(work, old.collect(), &scanner)?;
            found.retain(|_, secrets: &mut Found| {
                secrets.retain(|hash, _| !old.contains_key(hash));
                !secrets.is_empty()
            });
        }
        let paths = first_paths(&changes);
        for (name, secrets) in found {
            let path = paths.get(&name).map(|path| path.to_vec());
            evidence.secrets.extend(secrets.into_values().map(|kind| (path.clone(), kind)));
        }
        let told = told(work, &changes, &scanner);
        evidence.secrets.extend(told.into_values().map(|kind| (None, kind)));
        evidence.changes = changes;
        Ok(evidence)
    }

    /// Reads every new blob once, and returns the secrets of each.
    fn look_into(
        &mut self,
        work: &Quarantined,
        changes: &[Change],
        (policy, scanner): (&Policy, &Scanner),
    ) -> Result<BTreeMap<Sha, Found>, Error> {
        let mut places: BTreeMap<Sha, Vec<&Change>> = BTreeMap::new();
        for change in changes.iter().filter(|change| change.after.is_blob()) {
            places.entry(change.after.name).or_default().push(change);
        }
        let (mut secrets, mut name, mut text) = (BTreeMap::new(), Sha::NONE, Text::default());
        let (mut found, mut beginning) = (Found::new(), vec![]);
        let names = places.keys().copied().collect();
        read(work, names, |part| match part {
            Part::Head(object) => {
                (name, text, found) = (object.name, Text::default(), Found::new());
                beginning.clear();
                if object.size > policy.review_file_bytes.min(policy.hold_file_bytes) {
                    let paths = places[&name].iter().map(|change| change.path.clone());
                    self.large.extend(paths.map(|path| (path, object.size)));
                }
            }
            Part::Content(piece) => {
                let room = BEGINNING_BYTES.saturating_sub(beginning.len());
                beginning.extend_from_slice(&piece[..piece.len().min(room)]);
                scanner.scan(&mut text, piece, &mut found);
            }
            Part::End => {
                self.look_at(&beginning, &places[&name]);
                let found = std::mem::take(&mut found);
                if !found.is_empty() {
                    secrets.insert(name, found);
                }
            }
        })?;
        Ok(secrets)
    }

    fn look_at(&mut self, beginning: &[u8], places: &[&Change]) {
        for change in places {
            match change.after.mode {
                diff::LINK if leads_outside(&change.path, beginning) => {
                    self.links_outside.insert(change.path.clone());
                }
                diff::LINK => (),
                _ if beginning.starts_with(LFS_POINTER) => {
                    self.lfs_pointers.insert(change.path.clone());
                }
                _ => (),
            }
        }
    }
}

/// Returns the first path at which each object stands: an agent may have a credential in each of many.
fn first_paths(changes: &[Change]) -> BTreeMap<Sha, &[u8]> {
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
fn outcome(work: &Quarantined) -> Result<Vec<Change>, Error> {
    let merged = merged(work)?;
    let without: Vec<_> = if merged.is_empty() {
        vec![work.state.start]
    } else {
        merged.into_iter().map(|base| merge(work, base)).collect::<Result<_, _>>()?
    };
    let changes = without.into_iter().map(|tree| between(work, tree));
    Ok(changes.collect::<Result<Vec<_>, _>>()?.concat())
}

/// How much of the base is in the work, and was not before: most often one commit, or none.
fn merged(work: &Quarantined) -> Result<Vec<Sha>, Error> {
    let words = ["--all".to_owned(), work.state.base_tip.to_string(), work.tip.to_string()];
    let (said, ended) = work.call("merge-base").words(words).told()?;
    match ended {
        Err(error) if error.is_no() => return Ok(vec![]),
        ended => ended.map_err(refused)?,
    }
    let mut merged = vec![];
    for name in said.lines() {
        let start = work.state.start.to_string();
        let is_known = work.call("merge-base").words(["--is-ancestor", name, &start]).is_so()?;
        merged.extend((!is_known).then(|| named(name)).transpose()?);
    }
    Ok(merged)
}

/// The tree that comes of merging a commit of the base into where the agent began. Where they are in conflict, it has
/// marks: whatever the agent has made of those is its own work.
fn merge(work: &Quarantined, base: Sha) -> Result<Sha, Error> {
    let words = ["--write-tree", "--allow-unrelated-histories", "--no-messages", "--name-only"];
    let call = work.call("merge-tree").words(words);
    let (said, ended) = call.words([work.state.start, base].map(|it| it.to_string())).told()?;
    match ended {
        Err(error) if error.is_no() => (),
        ended => ended.map_err(refused)?,
    }
    named(said.lines().next().unwrap_or_default())
}

fn named(name: &str) -> Result<Sha, Error> {
    let senseless = || git::Error::Senseless { what: "merge-tree".to_owned() };
    Ok(Sha::parse(name.as_bytes()).ok_or_else(senseless)?)
}

fn between(work: &Quarantined, from: Sha) -> Result<Vec<Change>, Error> {
    let call = work.call("diff-tree").words(DIFF).words([from.to_string(), work.tip.to_string()]);
    parsed(&call.bytes().map_err(refused)?)
}

/// What each commit changes; of a merge, what is in none of its parents.
fn history(work: &Quarantined) -> Result<Vec<Change>, Error> {
    let mut names = String::new();
    for name in &work.names {
        let _ = writeln!(names, "{name}");
    }
    let call = work.call("diff-tree").words(DIFF).words(["-c", "--no-commit-id", "--stdin"]);
    parsed(&call.input(Input::Bytes(names.into_bytes())).bytes().map_err(refused)?)
}

fn parsed(bytes: &[u8]) -> Result<Vec<Change>, Error> {
    let senseless = |_| git::Error::Senseless { what: "diff-tree".to_owned() };
    Ok(diff::parse(bytes).map_err(senseless)?)
}

/// Secrets that some blobs have.
fn secrets(work: &Quarantined, blobs: BTreeSet<Sha>, scanner: &Scanner) -> Result<Found, Error> {
    let (mut found, mut text) = (Found::new(), Text::default());
    read(work, blobs, |part| match part {
        Part::Head(_) => text = Text::default(),
        Part::Content(piece) => scanner.scan(&mut text, piece, &mut found),
        Part::End => (),
    })?;
    Ok(found)
}

/// Secrets in messages, names, and whatever else stands in a commit.
fn told(work: &Quarantined, changes: &[Change], scanner: &Scanner) -> Found {
    let mut found = Found::new();
    for text in work.texts.iter().chain(changes.iter().map(|change| &change.path)) {
        scanner.scan(&mut Text::default(), text, &mut found);
    }
    found
}

fn read(work: &Quarantined, blobs: BTreeSet<Sha>, take: impl FnMut(Part<'_>)) -> Result<(), Error> {
    let mut names = String::new();
    for name in blobs {
        let _ = writeln!(names, "{name}");
    }
    // As large as what may come in, and larger: blobs of before are read as well.
    let limits = git::Limits { output_bytes: u64::MAX, ..work.allowance() };
    let call = work.call("cat-file").word("--batch").limits(limits);
    call.input(Input::Bytes(names.into_bytes())).objects(take).map_err(refused)
}

/// Whether a link at `path` with this target may lead out of the tree, or into git's own directory.
///
/// A way up is counted from where the link is, which is a real directory. After a name it may begin anywhere: that may be
/// a link itself, in this commit or in another.
fn leads_outside(path: &[u8], target: &[u8]) -> bool {
    if target.len() >= BEGINNING_BYTES {
        return true;
    }
    let target = folded(target);
    if target.starts_with(SEPARATORS) {
        return true;
    }
    let (mut depth, mut is_named) = (memchr::memchr_iter(b'/', path).count(), false);
    for segment in target.split(SEPARATORS) {
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
const SEPARATORS: [char; 2] = ['/', '\\'];

const DIFF: &[&str] = &[
    "-r",
    "-z",
    "--raw",
    "--root",
    "--no-abbrev",
    "--no-renames",
    "--no-ext-diff",
    "--ignore-submodules=none",
];
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// No link that works is longer.
const BEGINNING_BYTES: usize = 4096;
