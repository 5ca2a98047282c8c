//! The git relay, with real git and a real server.

mod branch_key;
mod corpus;
mod delivery;
mod git;
mod held;
mod network;
mod parser;
pub(crate) mod place;
mod remote;
mod repository;
mod server;
mod uncommitted;
mod workspace;
