//! The only module through which this program runs git.
//!
//! [`GitCommand`] is one call of git, from its arguments to its output. [`cat_file`] parses printed objects while git
//! prints them. [`ObjectId`] names one object. The module [`repo`](crate::relay::repo) decides on which repository a
//! call works and what its output is used for.
//!
//! **Invariant:** only this module configures git: no system or user configuration, no hooks, no helpers, no prompts,
//! no protocol except those allowed here, and no repository except the named one.
//!
//! **Invariant:** a secret is only in the environment of the one process that needs the secret, and never in anything
//! that a call returns.

pub mod cat_file;
mod command;
mod hardening;
mod object_id;
mod process;
mod stderr_text;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

pub use crate::base::outbound::{HttpProxy, OutboundConfig};
pub use command::GitCommand;
pub(crate) use command::is_plain_path;
pub use object_id::ObjectId;
pub use process::{GitInput, GitLimits};
pub use stderr_text::summarize_stderr;

/// A git program on this machine, found and checked once.
#[derive(Clone, Debug)]
pub struct GitProgram {
    environment: Arc<GitEnvironment>,
    /// Kills all calls.
    cancel: CancellationToken,
}

#[derive(Debug)]
struct GitEnvironment {
    program: PathBuf,
    /// An empty directory of our own. Git looks for its user's files here.
    home: PathBuf,
    network: OutboundConfig,
}

/// Reasons why a call of git failed.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    #[error("git {} or newer is needed on this machine; {found}", format_version(MIN_VERSION))]
    UnsupportedVersion { found: String },
    #[error("git cannot be started, or its output cannot be read")]
    Io(#[from] io::Error),
    #[error("`git {command}` has failed ({status}){}{}", if stderr.is_empty() { "" } else { ": " }, summarize_stderr(stderr))]
    Failed { command: String, status: ExitStatus, stderr: String },
    #[error("`git {command}` has taken longer than {}", humantime::format_duration(*.after))]
    Timeout { command: String, after: Duration },
    #[error("`git {command}` was ended, because its caller was cancelled")]
    Cancelled { command: String },
    #[error("`git {command}` has printed more than {limit} bytes")]
    OutputTooLarge { command: String, limit: u64 },
    #[error("`git {command}` has printed what this program cannot parse")]
    UnexpectedOutput { command: String },
}

impl GitProgram {
    /// Returns the first git in the usual system directories that is new enough. Creates the directory `home` if it is
    /// missing.
    pub fn find(home: &Path) -> Result<Self, GitError> {
        DirBuilder::new().recursive(true).mode(0o700).create(home)?;
        let home = home.canonicalize()?;
        let mut found = vec![];
        for program in SEARCH_PATHS.map(PathBuf::from).into_iter().filter(|path| path.is_file()) {
            let git = Self {
                environment: Arc::new(GitEnvironment {
                    program,
                    home: home.clone(),
                    network: OutboundConfig::default(),
                }),
                cancel: CancellationToken::new(),
            };
            let version_text = git.subcommand("version").output_text()?;
            if parse_version(&version_text).is_some_and(|version| version >= MIN_VERSION) {
                return Ok(git);
            }
            found.push(format!(
                "`{}` is `{}`",
                git.environment.program.display(),
                version_text.trim_end()
            ));
        }
        found.extend(
            found.is_empty().then(|| format!("there is none in {}", SEARCH_PATHS.join(", "))),
        );
        Err(GitError::UnsupportedVersion { found: found.join(", ") })
    }

    /// Returns the same git program, with `network` as its settings for calls to remotes.
    #[must_use]
    pub fn with_network(self, network: OutboundConfig) -> Self {
        let GitEnvironment { program, home, .. } = &*self.environment;
        let environment = GitEnvironment { program: program.clone(), home: home.clone(), network };
        Self { environment: Arc::new(environment), ..self }
    }

    /// Returns the same git program, whose calls are killed when `cancel` is cancelled.
    #[must_use]
    pub fn with_cancellation(self, cancel: CancellationToken) -> Self {
        Self { cancel, ..self }
    }

    /// Returns the token that kills the calls.
    pub(super) fn cancellation(&self) -> &CancellationToken {
        &self.cancel
    }

    /// Returns the path of the git program.
    pub fn program(&self) -> &Path {
        &self.environment.program
    }

    /// Returns a new call of `subcommand`. [`GitCommand`] describes its arguments and options.
    pub fn subcommand(&self, subcommand: &'static str) -> GitCommand<'_> {
        GitCommand::new(&self.environment, &self.cancel, subcommand)
    }
}

impl GitError {
    /// Returns the text on git's standard error, in git's order, if git itself refused. [`summarize_stderr`] makes a
    /// reason for people of it.
    pub fn stderr_text(&self) -> Option<&str> {
        match self {
            Self::Failed { stderr, .. } => Some(stderr),
            _ => None,
        }
    }

    /// Returns true if the same call may end differently on another day. Then the machine is at fault: an I/O error, a
    /// full disk, or a process that killed git from outside. The object of the call is not at fault.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Io(_) => true,
            Self::Failed { status, stderr, .. } => match status.signal() {
                Some(signal) => {
                    !contains_signal(signal, &LIMIT_SIGNALS)
                        && !contains_signal(signal, &CRASH_SIGNALS)
                    // XFSZ and XCPU come from our own limits; a crash repeats. Any other signal came from outside.
                }
                None => {
                    DISK_FULL_MESSAGES.iter().any(|words| fatal_message(stderr).ends_with(words))
                }
            },
            _ => false,
        }
    }

    /// Returns true if the call needs more than its [`GitLimits`] allow.
    pub fn is_resource_limit(&self) -> bool {
        match self {
            Self::Timeout { .. } | Self::OutputTooLarge { .. } => true,
            Self::Failed { status, stderr, .. } => match status.signal() {
                Some(signal) => contains_signal(signal, &LIMIT_SIGNALS),
                None => {
                    OUT_OF_MEMORY_MESSAGES.iter().any(|words| fatal_message(stderr).contains(words))
                        || has_ended_part(stderr)
                }
            },
            _ => false,
        }
    }

    /// Returns true if git answered no to a question (exit code 1), which is not a failure.
    pub fn is_negative_answer(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.code() == Some(1))
    }
}

fn contains_signal(signal: i32, signals: &[Signal]) -> bool {
    signals.iter().any(|known| known.as_raw() == signal)
}

/// Returns the last line of standard error without `fatal: `, which is git's reason. The remote may have written the
/// lines before it.
fn fatal_message(stderr: &str) -> &str {
    stderr.lines().last().and_then(|last| last.strip_prefix("fatal: ")).unwrap_or_default()
}

/// Returns true if git's standard error says that a helper process of git reached a limit. The helper that writes a
/// fetched pack prints nothing when a signal kills it, and git reports only that the helper was silent. If the
/// connection broke off instead, git and the helper both print a reason. Lines of the remote have another prefix.
fn has_ended_part(stderr: &str) -> bool {
    let ends = LIMIT_SIGNALS.map(|signal| format!(" died of signal {}", signal.as_raw()));
    let is_end = |line: &str| ends.iter().any(|end| line.ends_with(&**end));
    // Exactly one `fatal:` line, and it is the one about a silent helper: no other reason was printed.
    let is_silent = stderr.lines().filter(|line| line.starts_with("fatal: ")).eq([SILENT]);
    is_silent || stderr.lines().any(|line| line.starts_with("error: ") && is_end(line))
}

/// Parses the output of `git version`: `git version 2.47.3 (Apple Git-1)` is 2.47.3.
fn parse_version(output: &str) -> Option<[u32; 3]> {
    let numbers = output.strip_prefix("git version ")?.split([' ', '\n']).next()?;
    let mut parts = numbers.split('.').map(|part| part.parse().unwrap_or_default());
    Some([parts.next()?, parts.next()?, parts.next().unwrap_or_default()])
}

fn format_version([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

/// The signals with which the kernel kills a process that reaches a limit of [`GitLimits`].
const LIMIT_SIGNALS: [Signal; 2] = [Signal::XFSZ, Signal::XCPU];

/// The signals with which git dies from its own fault. Any other signal was sent by another process.
const CRASH_SIGNALS: [Signal; 6] =
    [Signal::SEGV, Signal::ABORT, Signal::BUS, Signal::ILL, Signal::FPE, Signal::SYS];

/// The messages of git, in the C locale, about a full disk.
const DISK_FULL_MESSAGES: [&str; 3] =
    ["No space left on device", "Out of diskspace", "Disk quota exceeded"];

/// The messages of git, in the C locale, about memory that it cannot get.
const OUT_OF_MEMORY_MESSAGES: [&str; 4] =
    ["out of memory", "Out of memory", "mmap failed", "Cannot allocate memory"];

/// The message of a fetch whose pack could not be written, for any reason.
const SILENT: &str = "fatal: fetch-pack: invalid index-pack output";

/// The oldest supported version: all of this module was tested with it.
const MIN_VERSION: [u32; 3] = [2, 39, 0];
/// The paths that are searched for git, in this order: where administrators and systems install it. Our choice.
const SEARCH_PATHS: [&str; 2] = ["/usr/local/bin/git", "/usr/bin/git"];
