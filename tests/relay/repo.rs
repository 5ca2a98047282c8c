//! Tests of the git side of the relay, with real git and a real git server.

mod branch_key;
mod corpus;
mod extract_reason;
mod fetch_lock;
mod git;
mod git_server;
mod hold;
mod network;
mod parsers;
mod push;
mod repository;
mod round_trip;
pub(crate) mod setup;
mod uncommitted_files;
mod workspace;
