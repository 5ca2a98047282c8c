//! Runs in sandboxes, by both drivers.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]
#![expect(clippy::duplicate_mod, reason = "what is promised of all drivers is tested with each")]

mod doctor;
mod dropin;
mod embedded;
mod podman;
mod runner;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
