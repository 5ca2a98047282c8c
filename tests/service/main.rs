//! Tests of the service around runs: API, grants, store and billing.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod api;
mod auth;
mod billing;
mod runs;
mod store;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
