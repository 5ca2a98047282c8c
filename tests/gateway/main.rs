//! The data plane: real sockets, a real provider, real LiteLLM, SDKs and Prometheus.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod access_log;
mod audit;
mod explain;
mod gateway;
mod lane;
mod metrics;
mod monitoring;
mod peers;
mod provider;
mod seats;
mod server;
mod shared;
mod spend_logs;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
mod trace;
