//! Where people look at the work: GitHub, as a client sees it.
//!
//! [`credential`] is what the relay shows, [`client`] carries the calls, and [`pull_request`] keeps one pull request for
//! each branch.
//!
//! **Invariant:** a token goes to the API and to the host of its own repository, and nowhere else.

pub mod client;
pub mod credential;
pub mod pull_request;
