//! Durable delivery, with real git and a stand-in for GitHub.

mod kill;
mod outbox;
mod statement;
mod way;
