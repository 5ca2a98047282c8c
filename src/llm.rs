//! LLM calls without sockets: every function here takes bytes and returns values.
//!
//! [`protocol`] names the routes of the supported protocols. [`request`] reads, checks and edits a
//! request's body. [`response`] reads the usage from a response's body while the body streams.
//! [`budget`] reserves the cost of a call and settles the cost afterwards.

pub mod budget;
pub mod protocol;
pub mod request;
pub mod response;
