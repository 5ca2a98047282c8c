//! The agent's commits made anew by the relay, where the patches that people read come to the same.

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::Quarantined;
use super::commit::TRAILERS;
use crate::git::{self, Input};
use crate::relay::{Error, Sha};

/// Whose commits are pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The relay's: with the agent's trees, authors and messages, and its own name and trailers.
    Replayed,
    /// The agent's, byte for byte.
    Exact(Exactly),
}

/// Why the agent's own commits are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exactly {
    /// Nobody asked.
    NotReplayed,
    /// Patches cannot say what a merge is.
    Merge,
    /// There are headers that would be lost: a signature.
    Signed,
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
pub struct Provenance {
    /// `Name <email>`.
    pub committer: String,
    pub run: String,
    pub agent: Option<String>,
}

impl Quarantined {
    /// Applies the patches in `patches` to where the agent began, and makes the commits anew where that comes to the
    /// very tree that the bundle has. Done twice it comes to the same names.
    pub fn replay(self, patches: &Path, provenance: &Provenance) -> Result<Self, Error> {
        match self.differs(patches)? {
            Some(why) => Ok(Self { mode: Mode::Exact(why), ..self }),
            None => self.made_anew(provenance),
        }
    }

    /// The first way in which the patches are not the commits.
    fn differs(&self, patches: &Path) -> Result<Option<Exactly>, Error> {
        let disk = |source| Error::Disk { path: patches.to_owned(), source };
        let is_linear = self.is_linear();
        if !is_linear {
            return Ok(Some(Exactly::Merge));
        }
        if self.commits.iter().any(|commit| commit.has_extra) {
            return Ok(Some(Exactly::Signed));
        }
        let names = names(patches).map_err(disk)?;
        if names.is_none_or(|names| !names.iter().eq(self.commits.iter().map(|it| &it.name))) {
            return Ok(Some(Exactly::OtherPatches));
        }
        let index = self.lease.directory("index")?.join("index");
        let on_index = |what| self.call(what).variable("GIT_INDEX_FILE", &index);
        on_index("read-tree").word(self.state.start.to_string()).done()?;
        let input = Input::File(File::open(patches).map_err(disk)?);
        let words = ["--cached", "--whitespace=nowarn", "--allow-empty", "-"];
        match on_index("apply").words(words).input(input).done() {
            Ok(()) => (),
            Err(git::Error::Io(error)) => return Err(git::Error::Io(error).into()),
            // Whatever is too much for it: the commits are there.
            Err(_) => return Ok(Some(Exactly::DoesNotApply)),
        }
        let tree = on_index("write-tree").text()?;
        let is_same = Sha::parse(tree.trim_end().as_bytes()) == Some(self.tree);
        Ok((!is_same).then_some(Exactly::OtherTree))
    }

    /// Whether each commit has the one before it as its only parent.
    fn is_linear(&self) -> bool {
        let before = [self.state.start].into_iter().chain(self.commits.iter().map(|it| it.name));
        self.commits.iter().zip(before).all(|(commit, parent)| commit.parents == [parent])
    }

    fn made_anew(mut self, provenance: &Provenance) -> Result<Self, Error> {
        let directory = self.lease.directory("commits")?;
        let disk = |source| Error::Disk { path: directory.clone(), source };
        let trailers = provenance.to_trailers();
        let (mut made, mut list) = (vec![], String::new());
        let mut parent = self.state.start;
        for (at, commit) in self.commits.iter().enumerate() {
            let content = commit.onto(parent, &provenance.committer, &trailers);
            parent = Sha::of("commit", &content);
            made.push(parent);
            let path = directory.join(at.to_string());
            fs::write(&path, content).map_err(disk)?;
            let _ = writeln!(list, "{}", path.display());
        }
        // All of them in one process, which checks their form and says their names.
        let words = ["-t", "commit", "-w", "--no-filters", "--stdin-paths"];
        let call = self.call("hash-object").words(words).input(Input::Bytes(list.into_bytes()));
        let named = call.text()?;
        if !named.lines().map(|name| Sha::parse(name.as_bytes())).eq(made.into_iter().map(Some)) {
            return Err(git::Error::Senseless { what: "hash-object".to_owned() }.into());
        }
        self.tip = parent;
        self.mode = Mode::Replayed;
        Ok(self)
    }
}

impl Provenance {
    fn to_trailers(&self) -> String {
        let values = [Some(&self.run), self.agent.as_ref()];
        let said = TRAILERS.iter().zip(values).filter_map(|(name, value)| Some((name, value?)));
        // A value that began a line of its own would be a trailer of its own.
        let flat = |value: &str| value.replace(|letter: char| letter.is_control(), " ");
        said.fold(String::new(), |lines, (name, value)| lines + name + ": " + &flat(value) + "\n")
    }
}

/// The commits that the patches say they are of; `None` where a line begins like a patch and is none, or where there
/// are no patches, or too many.
fn names(patches: &Path) -> io::Result<Option<Vec<Sha>>> {
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
        let room = FROM_BYTES.saturating_sub(line.len()).min(end);
        line.extend_from_slice(&read[..room]);
        let is_whole = read.is_empty() || read[end - 1] == b'\n';
        file.consume(end);
        if !is_whole {
            continue;
        }
        if let Some(rest) = line.strip_prefix(b"From ") {
            let name = rest.strip_suffix(b" Mon Sep 17 00:00:00 2001\n").and_then(Sha::parse);
            let Some(name) = name else { return Ok(None) };
            names.push(name);
        }
        if line.is_empty() {
            return Ok(Some(names));
        }
        line.clear();
    }
}

impl Mode {
    /// As it stands in records.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Replayed => "replayed",
            Self::Exact(Exactly::NotReplayed) => "exact",
            Self::Exact(Exactly::Merge) => "exact: merge",
            Self::Exact(Exactly::Signed) => "exact: signed",
            Self::Exact(Exactly::OtherPatches) => "exact: other patches",
            Self::Exact(Exactly::DoesNotApply) => "exact: does not apply",
            Self::Exact(Exactly::OtherTree) => "exact: other tree",
        }
    }
}

/// More than a line that begins a patch.
const FROM_BYTES: usize = 100;

/// Git holds all of them in memory when it applies them.
const MAX_PATCHES_BYTES: u64 = 256 << 20;
