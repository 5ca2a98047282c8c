//! Tests of LLM calls as data: request bodies, response streams, budgets and prices. They use no socket.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod budget;
mod request;
mod response;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
