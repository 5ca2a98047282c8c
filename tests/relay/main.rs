//! Tests of the relay, from commits to branch to pull request: real git, and a GitHub stand-in.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod delivery;
mod github;
mod github_api;
mod repo;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
