//! Durable delivery, with real git and a stand-in for GitHub.

mod before;
mod host;
mod judged;
mod kill;
mod later;
mod many;
pub(crate) mod outbox;
mod rules;
mod statement;
mod sweep;
mod vouched;
pub(crate) mod way;
