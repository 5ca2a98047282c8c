//! The git part of a delivery: the agent's commits reach a branch, and nothing else of the agent's does.
//!
//! The agent commits in its own copy and holds no credential. The commits come out of the sandbox as bytes. This module
//! inspects them with a git that no file of the agent's can configure. In reading order:
//!
//! - [`branch_key`] names the branch.
//! - [`mirror`] keeps the repository on this machine, reads a branch's state, and checks out a workspace.
//! - [`extract_commands`] are executed in the sandbox after the agent has ended.
//! - [`bundle`] and [`quarantine`] take in the output of these commands.
//! - [`review`] decides by the host's own diff.
//! - [`push`] moves the branch.
//!
//! All of them call [`git`], a module below this one. A [`lease`] gives a branch to one run at a time, and [`artifact`]
//! keeps the extracted work until it is delivered. [`delivery`](crate::relay::delivery) makes all of this durable, and
//! opens the pull request.
//!
//! [`GitBundle`] → [`QuarantinedWork`] → [`ReviewedWork`] → [`PushOutcome`]: each step takes the value of the step
//! before it, so that no step can be left out.
//!
//! **Invariant:** the host's git never runs in a directory that an agent could write to.
//!
//! **Invariant:** no object of the agent's is in the mirror before it has been reviewed and pushed.

pub mod artifact;
pub mod branch_key;
pub mod bundle;
pub mod extract_commands;
pub mod lease;
pub mod mirror;
mod note;
pub mod push;
pub mod quarantine;
mod remote_error;
pub mod repository;
pub mod review;
pub mod work;

use std::io;
use std::path::PathBuf;

pub use crate::relay::git::{self, GitProgram, ObjectId};
pub use artifact::ArtifactDir;
pub use branch_key::{BranchKey, SandboxBranch};
pub use bundle::GitBundle;
pub use lease::BranchLease;
pub use mirror::{BranchState, FetchLimits, RepoMirror};
pub use note::CommitNote;
pub use push::PushOutcome;
pub use quarantine::QuarantinedWork;
pub use repository::RepositoryUrl;
pub use review::{ApprovedWork, HeldWork, ReviewVerdict, ReviewedWork};
pub use work::ExtractedWork;

/// The reason why the work is not, or not yet, at its branch. The work is kept in every case.
#[derive(Debug, thiserror::Error)]
pub enum RepoError {
    #[error("another run holds `{branch}`; wait for the end of that run, or choose another key")]
    BranchInUse { branch: SandboxBranch },
    #[error("{}", describe_missing_base(base))]
    UnknownBase { base: String },
    #[error("`{branch}` is what the work would be merged into; choose another key or base")]
    DefaultBranch { branch: SandboxBranch },
    #[error(
        "a checkout of `{branch}` is too large for a workspace: it has {what}; work on a smaller branch, or raise `max_workspace`"
    )]
    CheckoutTooLarge { branch: SandboxBranch, what: String },
    #[error(
        "git cannot write the files of `{branch}`: {why}; remove or rename in the branch what this machine's file system \
         cannot have, or choose another branch key"
    )]
    CheckoutFailed { branch: SandboxBranch, why: String },
    #[error(
        "`{branch}` cannot be fetched within the relay's limits ({} bytes, {} bytes of memory, {}): {why}; \
         work on a smaller repository, or raise `[fetch]` in the relay's file",
        limits.pack_bytes, limits.memory_bytes, humantime::format_duration(limits.time)
    )]
    FetchLimitExceeded { branch: SandboxBranch, why: String, limits: FetchLimits },
    #[error(
        "the repository's notes (`refs/notes/cogni`) cannot be fetched within the relay's limits ({} bytes, {} bytes of \
         memory): {why}; remove that ref at the remote, or raise `[fetch]` in the relay's file",
        limits.pack_bytes, limits.memory_bytes
    )]
    NotesTooLarge { why: String, limits: FetchLimits },
    #[error(
        "`{branch}` cannot be pushed within the relay's limits ({memory_bytes} bytes of memory): {why}; remove refs at the \
         remote if it lists too many, or raise `quarantine.memory_bytes` in the relay's file"
    )]
    PushLimitExceeded { branch: SandboxBranch, why: String, memory_bytes: u64 },
    #[error("`{}` cannot be used: {why}", path.display())]
    StateUnusable { path: PathBuf, why: &'static str },
    #[error("cannot use `{}`", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("the sandbox's output for `{}` is larger than {limit} bytes; commit less in one run", path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    #[error("the bundle is not what was asked for: {0}")]
    Bundle(#[from] bundle::BundleError),
    #[error("the bundle differs from its announcement: {what}")]
    AnnouncementMismatch { what: &'static str },
    #[error("cannot accept the agent's work: {0}")]
    QuarantineRefused(#[from] quarantine::QuarantineError),
    #[error("`{branch}` is not where the run began any more; it is {}", describe_tip(*.found))]
    BranchMoved { branch: SandboxBranch, found: Option<ObjectId> },
    #[error("the remote declines the update: {why}")]
    RemoteRejected { why: String },
    #[error("the remote denies the relay access: {why}")]
    Unauthorized { why: String },
    #[error("`{}` is no repository: {why}; give the path of a git repository that the relay may read", path.display())]
    NotARepository { path: PathBuf, why: &'static str },
    #[error("cannot reach the remote now: {why}")]
    Unreachable { why: String },
    #[error(transparent)]
    Git(#[from] git::GitError),
}

/// Describes a repository that lacks the branch to begin with. `HEAD` stands for its default branch.
fn describe_missing_base(base: &str) -> String {
    match base {
        "HEAD" => "the repository has no commit on its default branch to begin with; push one, or name another branch as the base"
            .to_owned(),
        base => format!("the repository has no branch `{base}` to begin with; name another as the base"),
    }
}

/// Describes the present tip of a branch that has moved or was deleted.
fn describe_tip(tip: Option<ObjectId>) -> String {
    tip.map_or_else(|| "gone".to_owned(), |tip| format!("at {tip}"))
}
