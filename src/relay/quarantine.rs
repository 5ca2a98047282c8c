//! Where the agent's objects are looked at: beside the mirror, never in it.
//!
//! The pack is unpacked into a directory of its own that borrows the mirror's objects. Git checks each object's form
//! on the way in, and that nothing is missing; what remains to be asked is whether this is work on top of what the
//! agent was given, and how large it is once unpacked.

pub mod commit;
mod replay;
mod standing;
pub mod tree;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BranchState, Bundle, Error, Lease, Mirror, Sha};
use crate::git::batch::{self, Object, Part};
use crate::git::{self, Call, Input};
use commit::{Commit, Raw};

pub(super) use replay::TRAILERS;
pub use replay::{Mode, Provenance, Unlike};

/// The agent's commits, whole and well-formed, on top of where it began. Nobody has said yet that they are welcome.
#[derive(Debug)]
pub struct Quarantined {
    pub(super) mirror: Mirror,
    /// Held until the branch is moved, or will not be.
    pub(super) lease: Lease,
    pub(super) state: BranchState,
    pub(super) objects: PathBuf,
    /// Oldest first, as the agent made them. None where the branch's own are looked at.
    pub(super) commits: Vec<Commit>,
    /// The names of what is judged and pushed, oldest first.
    pub(super) names: Vec<Sha>,
    /// All text of the commits, both as the agent made them and as they are pushed.
    pub(super) texts: Vec<Vec<u8>>,
    /// What is to be pushed.
    pub(super) tip: Sha,
    pub(super) tree: Sha,
    pub(super) mode: Mode,
    /// Who has made the commits anew; the judge must not find that name in an author's place.
    pub(super) committer: Option<String>,
    pub(super) has_work_elsewhere: bool,
    pub(super) limits: Limits,
}

/// What may come in at all; what is welcome is [`judge`](super::judge)'s question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    pub commits: u32,
    /// The commits themselves: their messages, mostly.
    pub commits_bytes: u64,
    pub pack_bytes: u64,
    pub objects: u64,
    /// All of them, unpacked.
    pub bytes: u64,
    pub memory_bytes: u64,
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

/// Why the agent's work cannot come in. It is for people to look at then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("git does not accept its objects: {0}")]
    Objects(String),
    #[error("its tip is no commit")]
    NoCommit,
    #[error("it builds on commits that the agent was not given")]
    Foreign,
    #[error("it does not build on what the agent was given: history was rewritten, or replaced")]
    Rewritten,
    #[error("it has a history of its own, which begins with `{0}`")]
    Root(Sha),
    #[error("its commit `{0}` is not as git writes one: {1}")]
    Commit(Sha, commit::Invalid),
    #[error("its tree `{0}` is not as git writes one: {1}")]
    Tree(Sha, tree::Invalid),
    #[error("it brings `{0}`, which its tip does not lead to")]
    Stray(Sha),
    #[error("its tip would lead to other commits than those that were looked at")]
    Unseen,
    #[error("it has more than {0} commits")]
    Commits(u32),
    #[error("it unpacks to more than {bytes} bytes or {objects} objects")]
    Size { objects: u64, bytes: u64 },
    #[error("it takes more time or room than there is for it: {0}")]
    Costly(String),
    #[error("nothing is in it that was not there before")]
    Nothing,
}

impl Default for Limits {
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

impl Bundle {
    /// Takes the bundle in, and looks at what it is.
    ///
    /// # Errors
    /// [`Error::Refused`] for what must not come in; [`Error::Unlike`] where it is not what was announced.
    pub fn admit(
        self,
        mirror: &Mirror,
        lease: &Lease,
        limits: &Limits,
    ) -> Result<Quarantined, Error> {
        let objects = lease.directory("objects")?;
        let cell = Cell { mirror, objects: &objects, limits };
        cell.index(&self)?;
        let (commits, texts) = cell.commits(&self)?;
        let reached = cell.weigh(self.header.tip, &self.state.known())?;
        cell.inspect(&reached)?;
        let Self { state, announced, header, .. } = self;
        let newest = commits.last().expect("there is at least one");
        if newest.tree != announced.tree {
            return Err(Error::Unlike { what: "the tree at its tip" });
        }
        if commits.len() != announced.commits as usize {
            return Err(Error::Unlike { what: "the number of its commits" });
        }
        Ok(Quarantined {
            mirror: mirror.clone(),
            lease: lease.clone(),
            state,
            tree: newest.tree,
            tip: header.tip,
            objects,
            names: commits.iter().map(|commit| commit.name).collect(),
            texts,
            commits,
            mode: Mode::Bundled(Unlike::NotReplayed),
            committer: None,
            has_work_elsewhere: announced.head.is_some(),
            limits: *limits,
        })
    }
}

impl Quarantined {
    /// The commit that would be pushed.
    pub fn tip(&self) -> Sha {
        self.tip
    }

    pub fn tree(&self) -> Sha {
        self.tree
    }

    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// How many commits would be pushed.
    pub fn commits(&self) -> usize {
        self.names.len()
    }

    /// Git, where it sees the new objects and the mirror's.
    pub(super) fn call(&self, subcommand: &'static str) -> Call<'_> {
        inside(&self.mirror, &self.objects, subcommand).limits(self.allowance())
    }

    /// For every git that looks at it.
    pub(super) fn allowance(&self) -> git::Limits {
        self.cell().allowance()
    }

    fn cell(&self) -> Cell<'_> {
        Cell { mirror: &self.mirror, objects: &self.objects, limits: &self.limits }
    }
}

struct Cell<'a> {
    mirror: &'a Mirror,
    objects: &'a Path,
    limits: &'a Limits,
}

impl Cell<'_> {
    /// Unpacks, with every check that git has; what a thin pack leaves out is taken from the mirror.
    fn index(&self, bundle: &Bundle) -> Result<(), Error> {
        let disk = |source| Error::Disk { path: bundle.path.clone(), source };
        let most = format!("--max-input-size={}", self.limits.pack_bytes);
        let words = [STRICT, "--fix-thin", "--stdin", "--threads=1", &most];
        let call = self.call("index-pack").words(words);
        let pack = bundle.pack().map_err(disk)?;
        call.input(Input::File(pack)).done().map_err(refused)
    }

    /// The new commits, oldest first, and their text, once it is clear that they are work on top of what was given.
    fn commits(&self, bundle: &Bundle) -> Result<(Vec<Commit>, Vec<Vec<u8>>), Error> {
        let Bundle { header, state, .. } = bundle;
        let kind = self.call("cat-file").words(["-t", &header.tip.to_string()]).text()?;
        if kind.trim_end() != "commit" {
            return Err(Refusal::NoCommit.into());
        }
        if !self.is_known(&header.prerequisites, state)? {
            return Err(Refusal::Foreign.into());
        }
        let (start, tip) = (state.start.to_string(), header.tip.to_string());
        let ancestor = self.call("merge-base").words(["--is-ancestor", &start, &tip]);
        if !ancestor.is_so()? {
            return Err(Refusal::Rewritten.into());
        }
        let raw = self.read(self.listed(header.tip, &state.known())?)?;
        let parsed = raw.iter().map(|Raw { name, content }| {
            Commit::parse(*name, content).map_err(|why| Refusal::Commit(*name, why))
        });
        let commits = parsed.collect::<Result<Vec<_>, _>>()?;
        if commits.is_empty() {
            return Err(Refusal::Nothing.into());
        }
        match commits.iter().find(|commit| commit.parents.is_empty()) {
            Some(root) => Err(Refusal::Root(root.name).into()),
            None => Ok((commits, raw.into_iter().map(|raw| raw.content).collect())),
        }
    }

    /// The names of the commits that `tip` builds on beside what is `known`, oldest first.
    fn listed(&self, tip: Sha, known: &[String]) -> Result<Vec<Sha>, Error> {
        let most = format!("--max-count={}", u64::from(self.limits.commits) + 1);
        let words = ["--topo-order", "--reverse", &most, &tip.to_string()];
        let said = self.call("rev-list").words(words).words(known).text()?;
        let names = named(said.as_bytes(), "rev-list")?;
        if names.len() > self.limits.commits as usize {
            return Err(Refusal::Commits(self.limits.commits).into());
        }
        Ok(names)
    }

    /// Whether the agent was given all of these. The mirror has other runs' work, too.
    fn is_known(&self, commits: &[Sha], state: &BranchState) -> Result<bool, Error> {
        let list = commits.iter().map(Sha::to_string).chain(state.known()).collect::<Vec<_>>();
        let call = self.call("rev-list").words(["--max-count=1", "--stdin"]);
        let call = call.input(Input::Bytes((list.join("\n") + "\n").into_bytes()));
        match call.text() {
            Ok(foreign) => Ok(foreign.is_empty()),
            Err(error @ git::Error::Failed { .. }) if !error.is_passing() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&self, names: Vec<Sha>) -> Result<Vec<Raw>, Error> {
        let (mut name, mut content, mut commits) = (Sha::NONE, vec![], vec![]);
        let limits = git::Limits { output_bytes: self.limits.commits_bytes, ..self.allowance() };
        let call = self.call("cat-file").word("--batch").input(lines(names));
        let read = call.limits(limits).objects(|part| match part {
            Part::Head(object) => name = object.name,
            Part::Content(piece) => content.extend_from_slice(piece),
            Part::End => commits.push(Raw { name, content: std::mem::take(&mut content) }),
        });
        read.map_err(refused)?;
        Ok(commits)
    }

    /// Asks each object that `tip` leads to beside what is `known` for its size, without unpacking it: all of them must not
    /// be too large. Returns their names.
    fn weigh(&self, tip: Sha, known: &[String]) -> Result<BTreeSet<Sha>, Error> {
        let words = ["--objects", "--no-object-names", &tip.to_string()];
        let list = self.call("rev-list").words(words).words(known);
        let reached = named(&list.bytes().map_err(refused)?, "rev-list")?;
        let check = self.call("cat-file").word("--batch-check").input(lines(reached));
        let objects = listed_objects(&check.bytes().map_err(refused)?)?;
        let Limits { objects: most, bytes, .. } = *self.limits;
        let sum = objects.iter().fold(0_u64, |sum, object| sum.saturating_add(object.size));
        if objects.len() as u64 > most || sum > bytes {
            return Err(Refusal::Size { objects: most, bytes }.into());
        }
        Ok(objects.into_iter().map(|object| object.name).collect())
    }

    /// Checks that nothing has come in beside what is `reached`, and that each new tree has the one form that git writes.
    fn inspect(&self, reached: &BTreeSet<Sha>) -> Result<(), Error> {
        let words = ["--batch-all-objects", "--unordered", "--batch-check"];
        let all = self.mirror.call("cat-file").words(words).limits(self.allowance());
        let all = all.variable("GIT_OBJECT_DIRECTORY", self.objects).bytes().map_err(refused)?;
        let is_reached = |object: &Object| reached.contains(&object.name);
        let (expected, others): (Vec<_>, Vec<_>) =
            listed_objects(&all)?.into_iter().partition(is_reached);
        if let Some(stray) = self.missing(&others)? {
            return Err(Refusal::Stray(stray).into());
        }
        let trees: Vec<_> = expected.iter().filter(|object| object.kind == "tree").collect();
        if trees.iter().any(|tree| tree.size > MAX_TREE_BYTES) {
            let Limits { objects, .. } = *self.limits;
            return Err(Refusal::Size { objects, bytes: MAX_TREE_BYTES }.into());
        }
        let (mut name, mut content, mut found) = (Sha::NONE, vec![], None);
        let limits = git::Limits { output_bytes: u64::MAX, ..self.allowance() };
        let call = self.call("cat-file").word("--batch").limits(limits);
        let call = call.input(lines(trees.iter().map(|tree| tree.name)));
        let read = call.objects(|part| match part {
            Part::Head(object) => name = object.name,
            Part::Content(piece) => content.extend_from_slice(piece),
            Part::End => {
                let why = tree::check(&content).err();
                found = found.or(why.map(|why| (name, why)));
                content.clear();
            }
        });
        read.map_err(refused)?;
        found.map_or(Ok(()), |(name, why)| Err(Refusal::Tree(name, why).into()))
    }

    /// The first of these that the mirror does not have. It has those that complete a thin pack.
    fn missing(&self, objects: &[Object]) -> Result<Option<Sha>, Error> {
        if objects.is_empty() {
            return Ok(None);
        }
        let names = lines(objects.iter().map(|object| object.name));
        let check = self.mirror.call("cat-file").word("--batch-check").limits(self.allowance());
        let said = check.input(names).bytes().map_err(refused)?;
        let lines = said.split(|byte| *byte == b'\n');
        let found: BTreeSet<_> = lines.filter_map(batch::parsed).map(|found| found.name).collect();
        Ok(objects.iter().map(|object| object.name).find(|name| !found.contains(name)))
    }

    fn call(&self, subcommand: &'static str) -> Call<'_> {
        inside(self.mirror, self.objects, subcommand).limits(self.allowance())
    }

    fn allowance(&self) -> git::Limits {
        git::Limits {
            time: self.limits.time,
            memory_bytes: self.limits.memory_bytes,
            // What a thin pack leaves out is added to it.
            file_bytes: self.limits.pack_bytes.saturating_mul(2),
            output_bytes: self.limits.objects.saturating_mul(OBJECT_LINE_BYTES),
        }
    }
}

/// What git fails at among the agent's objects is the agent's doing, unless it is the machine's.
pub(super) fn refused(error: git::Error) -> Error {
    let why = error.said().filter(|said| !said.is_empty());
    let why = why.map_or_else(|| error.to_string(), str::to_owned);
    match error {
        error if error.is_passing() => error.into(),
        error if error.is_costly() => Refusal::Costly(why).into(),
        git::Error::Failed { .. } => Refusal::Objects(why).into(),
        error => error.into(),
    }
}

/// Object names, as git prints them: one on each line.
fn named(said: &[u8], what: &str) -> Result<Vec<Sha>, git::Error> {
    let lines = said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let names = lines.map(Sha::parse).collect::<Option<_>>();
    names.ok_or_else(|| git::Error::Senseless { what: what.to_owned() })
}

fn listed_objects(said: &[u8]) -> Result<Vec<Object>, git::Error> {
    let lines = said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let objects = lines.map(batch::parsed).collect::<Option<_>>();
    objects.ok_or_else(|| git::Error::Senseless { what: "cat-file".to_owned() })
}

/// Object names, as git reads them.
fn lines(names: impl IntoIterator<Item = Sha>) -> Input {
    let mut text = String::new();
    for name in names {
        let _ = writeln!(text, "{name}");
    }
    Input::Bytes(text.into_bytes())
}

/// New objects go where nobody looks for them, and are read together with the mirror's.
fn inside<'a>(mirror: &'a Mirror, objects: &Path, subcommand: &'static str) -> Call<'a> {
    let call = mirror.call(subcommand).variable("GIT_OBJECT_DIRECTORY", objects);
    call.variable("GIT_ALTERNATE_OBJECT_DIRECTORIES", mirror.objects())
}

/// Everything that git warns of is an error, and some of what it only mentions.
const STRICT: &str = "--strict=badFilemode=error,gitmodulesParse=error";

/// A name, a kind and a size of 20 digits.
const OBJECT_LINE_BYTES: u64 = 72;

/// One directory of some hundred thousand files. A tree is held in memory while it is checked.
const MAX_TREE_BYTES: u64 = 16 << 20;
