//! The fake provider, which runs until the test drops it.

use std::net::SocketAddr;
use std::sync::Arc;

use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::fakes::model_provider::{FakeProvider, ProviderRequestLog, ResponseGate};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A provider on its own port.
pub(crate) struct RunningProvider {
    pub(crate) addr: SocketAddr,
    pub(crate) seen: Arc<ProviderRequestLog>,
    pub(crate) gate: ResponseGate,
    pub(crate) stop: CancellationToken,
    _stop: DropGuard,
}

/// Starts a provider with the default answers, unless a request names its own script.
pub(crate) async fn start_default() -> RunningProvider {
    start_provider("").await
}

/// Starts a provider whose answers follow `script`, unless a request names its own script.
pub(crate) async fn start_provider(script: &str) -> RunningProvider {
    start_at(SocketAddr::from(([127, 0, 0, 1], 0)), script).await
}

/// Starts such a provider at this address.
pub(crate) async fn start_at(addr: SocketAddr, script: &str) -> RunningProvider {
    run(FakeProvider::bind(addr, script.parse().unwrap()).await.unwrap())
}

/// Starts a provider that refuses what OpenAI and Anthropic refuse.
pub(crate) async fn start_strict() -> RunningProvider {
    let addr = SocketAddr::from(([127, 0, 0, 1], 0));
    run(FakeProvider::bind_strict(addr, "".parse().unwrap()).await.unwrap())
}

fn run(provider: FakeProvider) -> RunningProvider {
    let stop = CancellationToken::new();
    let running = RunningProvider {
        addr: provider.addr(),
        seen: provider.request_log(),
        gate: provider.response_gate(),
        _stop: stop.clone().drop_guard(),
        stop: stop.clone(),
    };
    TaskGroup::default().spawn_task(provider.serve(stop));
    running
}

/// A model that calls the tool with `argv`, and then repeats the tool's result.
pub(crate) fn calling_tool(argv: &[&str]) -> String {
    calling_tool_with(&json!({ "argv": argv }))
}

pub(crate) fn calling_tool_with(arguments: &Value) -> String {
    let arguments = arguments.to_string().replace('%', "%25").replace(',', "%2c");
    format!("fake/tool=exec;echo=yes;arguments={}", arguments.replace(';', "%3b"))
}
