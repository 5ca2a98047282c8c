//! The one integration-test binary: real sockets, real files, real processes.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]
#![expect(clippy::duplicate_mod, reason = "what is promised of all drivers is tested with each")]

mod access_log;
mod agent;
mod agents;
mod api;
mod audit;
mod billing;
mod body;
mod budget;
mod catalog;
mod cli;
mod config;
mod db;
mod delivery;
mod doctor;
mod dropin;
mod embedded;
mod examples;
mod explain;
mod forge;
mod gateway;
mod github;
mod grant;
mod init;
mod journal;
mod metrics;
mod monitoring;
mod peers;
mod podman;
mod price;
mod provider;
mod relay;
mod rule;
mod runner;
mod sandbox;
mod seats;
mod server;
mod service;
mod shared;
mod spend_logs;
mod stream;
mod support;
mod tidy;
mod token;
mod trace;
mod tree;
