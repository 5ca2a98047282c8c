//! Where people look at the work: GitHub, as a client sees it.
//!
//! [`credential`] is what the relay shows, [`github`] carries the calls, and [`pull_request`] keeps one pull request for
//! each branch.
//!
//! **Invariant:** a token goes to the API and to the host of its own repository, and nowhere else.

pub mod credential;
pub mod github;
pub mod pull_request;
