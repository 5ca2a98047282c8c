//! LLM calls without sockets: every function here takes bytes and returns values.
//!
//! [`protocol`] names the routes of the supported protocols. [`request`] reads, checks and edits a
//! request's body. [`response`] follows a response's body as it streams: it reads the usage and the
//! output, and ends a stream that exceeds its limit. [`budget`] reserves the cost of a call and
//! settles the cost afterwards.

pub mod budget;
pub mod protocol;
pub mod request;
pub mod response;
