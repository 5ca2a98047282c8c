//! Tests of the gateway: real sockets, a fake provider, real LiteLLM, SDKs and Prometheus.
#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test support is not production code"
)]

mod access_log;
mod audit;
mod explain;
mod gateway_host;
mod lane;
mod metrics;
mod model_provider;
mod monitoring;
mod peers;
mod pipeline;
mod rule;
mod run_token;
mod server;
mod shared_listener;
mod spend_logs;
#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../support/support.rs"]
mod support;
mod tools;
mod trace;
mod upstream;
