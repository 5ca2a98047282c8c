//! The one way in which this program runs git.
//!
//! [`GitCommand`] is one call, from its words to what it said, and [`cat_file`] reads objects as they are printed; [`ObjectId`] names one.
//! Whose repository it is, and what the answers are for, is the [`relay`](crate::relay::repo)'s.
//!
//! **Invariant:** nothing but this room says what git is configured with: no system or user configuration, no hooks, no
//! helpers, no prompts, no protocol but those allowed here, and no repository but the one that is named.
//!
//! **Invariant:** a secret is in the environment of the one process that needs it, and in nothing that comes back.

pub mod cat_file;
mod command;
mod hardening;
mod object_id;
mod process;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;

pub use crate::base::outbound::{HttpProxy, OutboundConfig};
pub(crate) use command::is_plain_path;
pub use command::{GitCommand, GitInput};
pub use object_id::ObjectId;
pub use process::GitLimits;

/// Git, found and looked at once.
#[derive(Clone, Debug)]
pub struct GitProgram {
    place: Arc<GitEnvironment>,
}

#[derive(Debug)]
struct GitEnvironment {
    program: PathBuf,
    /// Empty, and ours: git looks for files of its user here.
    home: PathBuf,
    network: OutboundConfig,
}

/// Why git did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    #[error("git {} or newer is needed on this machine; {found}", format_version(MIN_VERSION))]
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

impl GitProgram {
    /// Takes the first git that is new enough, of where systems have it. `home` is made, where it is missing.
    pub fn find(home: &Path) -> Result<Self, GitError> {
        DirBuilder::new().recursive(true).mode(0o700).create(home)?;
        let home = home.canonicalize()?;
        let mut found = vec![];
        for program in SEARCH_PATHS.map(PathBuf::from).into_iter().filter(|place| place.is_file()) {
            let git = Self {
                place: Arc::new(GitEnvironment {
                    program,
                    home: home.clone(),
                    network: OutboundConfig::default(),
                }),
            };
            let said = git.subcommand("version").output_text()?;
            if parse_version(&said).is_some_and(|version| version >= MIN_VERSION) {
                return Ok(git);
            }
            found.push(format!("`{}` is `{}`", git.place.program.display(), said.trim_end()));
        }
        found.extend(
            found.is_empty().then(|| format!("there is none in {}", SEARCH_PATHS.join(", "))),
        );
        Err(GitError::Unfit { found: found.join(", ") })
    }

    /// The same git, which gets to remotes this way.
    #[must_use]
    pub fn with_network(self, network: OutboundConfig) -> Self {
        let GitEnvironment { program, home, .. } = &*self.place;
        let place = GitEnvironment { program: program.clone(), home: home.clone(), network };
        Self { place: Arc::new(place) }
    }

    /// Where it is on this machine.
    pub fn program(&self) -> &Path {
        &self.place.program
    }

    /// A call of a subcommand; see [`GitCommand`] for what it may be given.
    pub fn subcommand(&self, subcommand: &'static str) -> GitCommand<'_> {
        GitCommand::new(&self.place, subcommand)
    }
}

impl GitError {
    /// Where git itself refused: what it said, which is for people.
    pub fn stderr_text(&self) -> Option<&str> {
        match self {
            Self::Failed { said, .. } => Some(said),
            _ => None,
        }
    }

    /// Whether the same may come to another end on another day: the machine is at fault, whose disk is full, or somebody
    /// who has ended git; and not what git was asked about.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Io(_) => true,
            Self::Failed { end, said, .. } => match end.signal() {
                Some(signal) => {
                    !contains_signal(signal, &LIMIT_SIGNALS)
                        && !contains_signal(signal, &CRASH_SIGNALS)
                }
                None => DISK_FULL_MESSAGES.iter().any(|words| fatal_message(said).ends_with(words)),
            },
            _ => false,
        }
    }

    /// Whether it takes more than it was given.
    pub fn is_resource_limit(&self) -> bool {
        match self {
            Self::Late { .. } | Self::TooMuch { .. } => true,
            Self::Failed { end, said, .. } => match end.signal() {
                Some(signal) => contains_signal(signal, &LIMIT_SIGNALS),
                None => {
                    OUT_OF_MEMORY_MESSAGES.iter().any(|words| fatal_message(said).contains(words))
                        || has_ended_part(said)
                }
            },
            _ => false,
        }
    }

    /// Whether git has said no to a question, which is no failure.
    pub fn is_negative_answer(&self) -> bool {
        matches!(self, Self::Failed { end, .. } if end.code() == Some(1))
    }
}

fn contains_signal(signal: i32, signals: &[Signal]) -> bool {
    signals.iter().any(|one| one.as_raw() == signal)
}

/// The last that git says before it gives up, which is the reason. What comes before may have been written by anybody.
fn fatal_message(said: &str) -> &str {
    said.lines().last().and_then(|last| last.strip_prefix("fatal: ")).unwrap_or_default()
}

/// Tells whether a process that git had started was ended for what it took. The one that a fetch writes its pack with says
/// nothing then, and git only that it has said nothing; where the connection broke off, both have a reason. Lines of the
/// remote begin otherwise.
fn has_ended_part(said: &str) -> bool {
    let ends = LIMIT_SIGNALS.map(|signal| format!(" died of signal {}", signal.as_raw()));
    let is_end = |line: &str| ends.iter().any(|end| line.ends_with(&**end));
    let is_silent = said.lines().filter(|line| line.starts_with("fatal: ")).eq([SILENT]);
    is_silent || said.lines().any(|line| line.starts_with("error: ") && is_end(line))
}

/// `git version 2.47.3 (Apple Git-1)` is 2.47.3.
fn parse_version(said: &str) -> Option<[u32; 3]> {
    let numbers = said.strip_prefix("git version ")?.split([' ', '\n']).next()?;
    let mut parts = numbers.split('.').map(|part| part.parse().unwrap_or_default());
    Some([parts.next()?, parts.next()?, parts.next().unwrap_or_default()])
}

fn format_version([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

/// How the kernel ends what has reached a limit of [`GitLimits`].
const LIMIT_SIGNALS: [Signal; 2] = [Signal::XFSZ, Signal::XCPU];

/// How git ends that has come to harm, by itself. Other signals are somebody's.
const CRASH_SIGNALS: [Signal; 6] =
    [Signal::SEGV, Signal::ABORT, Signal::BUS, Signal::ILL, Signal::FPE, Signal::SYS];

/// What git says, in this language, where there is no room on the disk,
const DISK_FULL_MESSAGES: [&str; 3] =
    ["No space left on device", "Out of diskspace", "Disk quota exceeded"];

/// and where it is given no more memory.
const OUT_OF_MEMORY_MESSAGES: [&str; 4] =
    ["out of memory", "Out of memory", "mmap failed", "Cannot allocate memory"];

/// What a fetch says whose pack could not be written, for whatever reason.
const SILENT: &str = "fatal: fetch-pack: invalid index-pack output";

/// The git that all of this was tried with.
const MIN_VERSION: [u32; 3] = [2, 39, 0];
const SEARCH_PATHS: [&str; 2] = ["/usr/local/bin/git", "/usr/bin/git"];
