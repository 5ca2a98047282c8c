//! LLM calls, without sockets: every function here is given bytes and returns values.
//!
//! [`protocol`] names the routes of the protocols that are spoken. [`request`] reads, checks and edits a request's body, [`response`]
//! reads usage from a response's body as it streams, and [`budget`] reserves and settles what calls cost.

pub mod budget;
pub mod protocol;
pub mod request;
pub mod response;
