//! Helpers that several test modules share.

pub(crate) mod allocations;
pub(crate) mod app;
pub(crate) mod client;
pub(crate) mod connect_proxy;
pub(crate) mod delivery;
pub(crate) mod docker_daemon;
pub(crate) mod docker_engine;
pub(crate) mod engine_proxy;
pub(crate) mod git_server;
pub(crate) mod github_server;
pub(crate) mod installation;
pub(crate) mod model_provider;
pub(crate) mod process;
pub(crate) mod raw_upstream;
pub(crate) mod repository;
pub(crate) mod run_command;
pub(crate) mod service;
pub(crate) mod shared_app;
pub(crate) mod small_disk;
pub(crate) mod test_ca;
pub(crate) mod threads;
pub(crate) mod trace_collector;
