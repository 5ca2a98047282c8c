//! Durable delivery, with real git and a stand-in for GitHub.

mod kill;
mod later;
mod many;
mod outbox;
mod statement;
mod sweep;
mod way;
