//! The part of the relay that calls GitHub, where people look at the work.
//!
//! [`credential`] provides tokens, [`client`] sends the API calls, and [`pull_request`] keeps one pull request for each
//! branch.
//!
//! **Invariant:** a token goes to the API and to the host of its own repository, and nowhere else.

pub mod client;
pub mod credential;
pub mod pull_request;
