//! Tests of runs in sandboxes, with both drivers.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]
#![expect(clippy::duplicate_mod, reason = "what is promised of all drivers is tested with each")]

mod agents;
mod docker_driver;
mod doctor;
mod dropin;
mod embedded;
mod podman;
mod real_agents;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
