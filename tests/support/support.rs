//! What the tests of several rooms share.

pub(crate) mod allocations;
pub(crate) mod app;
pub(crate) mod authority;
pub(crate) mod client;
pub(crate) mod collector;
pub(crate) mod delivery;
pub(crate) mod disk;
pub(crate) mod dockerd;
pub(crate) mod engine;
pub(crate) mod forge;
pub(crate) mod git_server;
pub(crate) mod installation;
pub(crate) mod middleman;
pub(crate) mod process;
pub(crate) mod provider;
pub(crate) mod repository;
pub(crate) mod sandboxed;
pub(crate) mod service;
pub(crate) mod shared;
pub(crate) mod threads;
pub(crate) mod tunnel;
pub(crate) mod wire;
