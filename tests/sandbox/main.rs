//! What a sandbox is, the programs inside it, and the agents that are described for it.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod agent;
mod agents;
mod catalog;
mod init;
mod sandbox;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
