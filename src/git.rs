//! The one way in which this program runs git.
//!
//! [`Call`] is one call, from its words to what it said, and [`batch`] reads objects as they are printed; [`Sha`] names one.
//! Whose repository it is, and what the answers are for, is the [`relay`](crate::relay)'s.
//!
//! **Invariant:** nothing but this room says what git is configured with: no system or user configuration, no hooks, no
//! helpers, no prompts, no protocol but those allowed here, and no repository but the one that is named.
//!
//! **Invariant:** a secret is in the environment of the one process that needs it, and in nothing that comes back.

pub mod batch;
mod call;
mod process;
mod seal;
mod sha;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;

pub use crate::base::network::{Network, Proxy};
pub(crate) use call::is_plain;
pub use call::{Call, Input};
pub use process::Limits;
pub use sha::Sha;

/// Git, found and looked at once.
#[derive(Clone, Debug)]
pub struct Git {
    place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    program: PathBuf,
    /// Empty, and ours: git looks for files of its user here.
    home: PathBuf,
    network: Network,
}

/// Why git did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("git {} or newer is needed on this machine; {found}", version_text(OLDEST))]
    Unfit { found: String },
    #[error("git cannot be started, or not be listened to")]
    Io(#[from] io::Error),
    #[error("`git {what}` has failed ({end}){}{said}", if said.is_empty() { "" } else { ": " })]
    Failed { what: String, end: ExitStatus, said: String },
    #[error("`git {what}` has taken longer than {}", humantime::format_duration(*.after))]
    Late { what: String, after: Duration },
    #[error("`git {what}` has said more than {limit} bytes")]
    TooMuch { what: String, limit: u64 },
    #[error("`git {what}` has said what git never says")]
    Senseless { what: String },
}

impl Git {
    /// Takes the first git that is new enough, of where systems have it. `home` is made, where it is missing.
    pub fn find(home: &Path) -> Result<Self, Error> {
        DirBuilder::new().recursive(true).mode(0o700).create(home)?;
        let home = home.canonicalize()?;
        let mut found = vec![];
        for program in PLACES.map(PathBuf::from).into_iter().filter(|place| place.is_file()) {
            let git = Self {
                place: Arc::new(Place { program, home: home.clone(), network: Network::default() }),
            };
            let said = git.call("version").text()?;
            if version(&said).is_some_and(|version| version >= OLDEST) {
                return Ok(git);
            }
            found.push(format!("`{}` is `{}`", git.place.program.display(), said.trim_end()));
        }
        found.extend(found.is_empty().then(|| format!("there is none in {}", PLACES.join(", "))));
        Err(Error::Unfit { found: found.join(", ") })
    }

    /// The same git, which gets to remotes this way.
    #[must_use]
    pub fn over(self, network: Network) -> Self {
        let Place { program, home, .. } = &*self.place;
        let place = Place { program: program.clone(), home: home.clone(), network };
        Self { place: Arc::new(place) }
    }

    /// Where it is on this machine.
    pub fn program(&self) -> &Path {
        &self.place.program
    }

    /// A call of a subcommand; see [`Call`] for what it may be given.
    pub fn call(&self, subcommand: &'static str) -> Call<'_> {
        Call::new(&self.place, subcommand)
    }
}

impl Error {
    /// Where git itself refused: what it said, which is for people.
    pub fn said(&self) -> Option<&str> {
        match self {
            Self::Failed { said, .. } => Some(said),
            _ => None,
        }
    }

    /// Whether the same may come to another end on another day: the machine is at fault, whose disk is full, or somebody
    /// who has ended git; and not what git was asked about.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Io(_) => true,
            Self::Failed { end, said, .. } => match end.signal() {
                Some(signal) => !is_one(signal, &SPENT) && !is_one(signal, &BROKEN),
                None => FULL.iter().any(|words| fatal(said).ends_with(words)),
            },
            _ => false,
        }
    }

    /// Whether it takes more than it was given.
    pub fn is_costly(&self) -> bool {
        match self {
            Self::Late { .. } | Self::TooMuch { .. } => true,
            Self::Failed { end, said, .. } => match end.signal() {
                Some(signal) => is_one(signal, &SPENT),
                None => {
                    EXHAUSTED.iter().any(|words| fatal(said).contains(words))
                        || has_ended_part(said)
                }
            },
            _ => false,
        }
    }

    /// Whether git has said no to a question, which is no failure.
    pub fn is_no(&self) -> bool {
        matches!(self, Self::Failed { end, .. } if end.code() == Some(1))
    }
}

fn is_one(signal: i32, signals: &[Signal]) -> bool {
    signals.iter().any(|one| one.as_raw() == signal)
}

/// The last that git says before it gives up, which is the reason. What comes before may have been written by anybody.
fn fatal(said: &str) -> &str {
    said.lines().last().and_then(|last| last.strip_prefix("fatal: ")).unwrap_or_default()
}

/// Tells whether a process that git had started was ended for what it took. The one that a fetch writes its pack with says
/// nothing then, and git only that it has said nothing; where the connection broke off, both have a reason. Lines of the
/// remote begin otherwise.
fn has_ended_part(said: &str) -> bool {
    let ends = SPENT.map(|signal| format!(" died of signal {}", signal.as_raw()));
    let is_end = |line: &str| ends.iter().any(|end| line.ends_with(&**end));
    let is_silent = said.lines().filter(|line| line.starts_with("fatal: ")).eq([SILENT]);
    is_silent || said.lines().any(|line| line.starts_with("error: ") && is_end(line))
}

/// `git version 2.47.3 (Apple Git-1)` is 2.47.3.
fn version(said: &str) -> Option<[u32; 3]> {
    let numbers = said.strip_prefix("git version ")?.split([' ', '\n']).next()?;
    let mut parts = numbers.split('.').map(|part| part.parse().unwrap_or_default());
    Some([parts.next()?, parts.next()?, parts.next().unwrap_or_default()])
}

fn version_text([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

/// How the kernel ends what has reached a limit of [`Limits`].
const SPENT: [Signal; 2] = [Signal::XFSZ, Signal::XCPU];

/// How git ends that has come to harm, by itself. Other signals are somebody's.
const BROKEN: [Signal; 6] =
    [Signal::SEGV, Signal::ABORT, Signal::BUS, Signal::ILL, Signal::FPE, Signal::SYS];

/// What git says, in this language, where there is no room on the disk,
const FULL: [&str; 3] = ["No space left on device", "Out of diskspace", "Disk quota exceeded"];

/// and where it is given no more memory.
const EXHAUSTED: [&str; 4] =
    ["out of memory", "Out of memory", "mmap failed", "Cannot allocate memory"];

/// What a fetch says whose pack could not be written, for whatever reason.
const SILENT: &str = "fatal: fetch-pack: invalid index-pack output";

/// The git that all of this was tried with.
const OLDEST: [u32; 3] = [2, 39, 0];
const PLACES: [&str; 2] = ["/usr/local/bin/git", "/usr/bin/git"];
