//! What a sandbox is, the programs inside it, and the agents that are described for it.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod cogni_agent;
mod cogni_init;
mod host_path;
mod leftovers;
mod output;
mod owner_process;
mod spec;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
