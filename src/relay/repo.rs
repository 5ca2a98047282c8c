//! The agent's commits reach a branch, and nothing else does: what git does for it.
//!
//! The agent commits in its own copy and holds no credential. What it has made comes out as bytes, and is looked at
//! here, by a git that nothing of the agent's can configure. In reading order: [`branch_key`] names the branch;
//! [`mirror`] keeps the repository on this machine, says where a branch stands and fills a workspace; [`extract_commands`] is
//! what is executed in the sandbox once the agent is gone; [`bundle`] and [`quarantine`] take in what it printed;
//! [`review`] decides by the host's own diff; [`push`] moves the branch. All of them ask [`git`], a room below; [`lease`] lets one run
//! at a time at a branch, and [`artifact`] keeps what came out until it is delivered. What makes it durable, and asks for a pull request, is
//! [`delivery`](crate::relay::delivery).
//!
//! [`GitBundle`] → [`QuarantinedWork`] → [`ReviewedWork`] → [`PushOutcome`]: each step takes the one before by value, so that none
//! can be left out.
//!
//! **Invariant:** host git never runs in a directory that an agent has had its hands on.
//!
//! **Invariant:** nothing of the agent's is in the mirror before it has been judged and pushed.

pub mod artifact;
pub mod branch_key;
pub mod bundle;
pub mod extract_commands;
pub mod lease;
pub mod mirror;
mod note;
pub mod push;
pub mod quarantine;
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

/// Why the work is not, or not yet, where it should be. It is kept, whatever the reason.
#[derive(Debug, thiserror::Error)]
pub enum RepoError {
    #[error("another run is at `{branch}`; wait for it, or choose another key")]
    Busy { branch: SandboxBranch },
    #[error("the repository has no branch `{base}` to begin with")]
    NoBase { base: String },
    #[error("`{branch}` is what the work would be merged into; choose another key or base")]
    Default { branch: SandboxBranch },
    #[error(
        "a checkout of `{branch}` is too large for a workspace: it has {what}; work on a smaller branch, or raise `max_workspace`"
    )]
    Large { branch: SandboxBranch, what: String },
    #[error(
        "`{branch}` cannot be fetched within the relay's limits ({} bytes, {} bytes of memory, {}): {why}; \
         work on a smaller repository, or raise `[fetch]` in the relay's file",
        limits.pack_bytes, limits.memory_bytes, humantime::format_duration(limits.time)
    )]
    Costly { branch: SandboxBranch, why: String, limits: FetchLimits },
    #[error("`{}` cannot be used: {why}", path.display())]
    State { path: PathBuf, why: &'static str },
    #[error("cannot use `{}`", path.display())]
    Disk { path: PathBuf, source: io::Error },
    #[error("more than {limit} bytes came out for `{}`", path.display())]
    TooMuch { path: PathBuf, limit: u64 },
    #[error("the bundle is not what was asked for: {0}")]
    Bundle(#[from] bundle::BundleError),
    #[error("the bundle is not what was announced: {what} is another")]
    Unlike { what: &'static str },
    #[error("what came out cannot come in: {0}")]
    Refused(#[from] quarantine::QuarantineError),
    #[error("`{branch}` is not where the run began any more; it is {}", describe_tip(*.found))]
    Moved { branch: SandboxBranch, found: Option<ObjectId> },
    #[error("the remote does not take it: {why}")]
    Declined { why: String },
    #[error("the remote does not let the relay in: {why}")]
    Denied { why: String },
    #[error("the remote cannot be reached, which may be tried again: {why}")]
    Unreachable { why: String },
    #[error(transparent)]
    Git(#[from] git::GitError),
}

fn describe_tip(tip: Option<ObjectId>) -> String {
    tip.map_or_else(|| "gone".to_owned(), |tip| format!("at {tip}"))
}
