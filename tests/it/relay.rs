//! The git relay, with real git and a real server.

mod branch_key;
mod corpus;
mod deliver;
mod delivery;
mod git;
mod held;
mod kill;
mod outbox;
mod parser;
mod place;
mod remote;
mod server;
mod statement;
mod workspace;
