//! The one integration-test binary: real sockets, real files, real processes.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod access_log;
mod audit;
mod body;
mod budget;
mod cli;
mod config;
mod dropin;
mod examples;
mod gateway;
mod metrics;
mod monitoring;
mod peers;
mod provider;
mod server;
mod stream;
mod support;
mod tidy;
