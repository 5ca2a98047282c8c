//! The agent's commits reach a branch and a pull request, and nothing else does.
//!
//! The agent commits in its own copy and holds no credential. What it has made comes out as bytes, and is looked at
//! here, by a git that nothing of the agent's can configure. In reading order: [`branch_key`] names the branch;
//! [`mirror`] keeps the repository on this machine, says where a branch stands and fills a workspace; [`extract`] is
//! what is executed in the sandbox once the agent is gone; [`bundle`] and [`quarantine`] take in what it printed;
//! [`judge`] decides by the host's own diff; [`push`] moves the branch. [`git`] runs git, [`lease`] lets one run
//! at a time at a branch, and [`artifact`] keeps what came out until it is delivered.
//!
//! [`Bundle`] → [`Quarantined`] → [`Judged`] → [`Pushed`]: each step takes the one before by value, so that none
//! can be left out.
//!
//! **Invariant:** host git never runs in a directory that an agent has had its hands on.
//!
//! **Invariant:** nothing of the agent's is in the mirror before it has been judged and pushed.

pub mod branch_key;
mod sha;

pub use branch_key::{Branch, BranchKey};
pub use sha::Sha;
