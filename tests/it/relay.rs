//! The git relay, with real git and a real server.

mod branch_key;
mod deliver;
mod delivery;
mod kill;
mod outbox;
mod place;
mod server;
mod statement;
