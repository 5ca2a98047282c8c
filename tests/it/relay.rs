//! The git relay, with real git and a real server.

mod branch_key;
mod outbox;
mod server;
mod statement;
