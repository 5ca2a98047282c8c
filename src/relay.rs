//! The git relay: takes an agent's commits from a bundle to a branch and a pull request.
//!
//! [`delivery`] keeps one job for each piece of work in an outbox and drives it step by step. Each step works on the repository with
//! [`repo`] (mirror, quarantine, review, push), which calls the [`git`] program, and on the forge with [`github`].

pub mod delivery;
pub mod git;
pub mod github;
pub mod repo;
