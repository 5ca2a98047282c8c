//! The command line, its settings, and the code checked as data.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod cli;
mod config;
mod db;
mod examples;
mod linear;
mod reach;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
mod tidy;
mod tree;
