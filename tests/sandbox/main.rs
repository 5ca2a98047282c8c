//! Tests of the sandbox's description, of the programs inside it, and of its owners and output.
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
