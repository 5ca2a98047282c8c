//! Tests of the command line, its settings, and the source code itself.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod commands;
mod config;
mod db;
mod dir_tree;
mod host_reach;
mod linear_time;
mod links;
mod shipped_config;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
mod tidy;
