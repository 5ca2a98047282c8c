//! Measures the cost of one call: its head alone, and the whole exchange from socket to socket, of a call to a model and
//! of a call of a built-in tool.
//!
//! The gateway runs in one thread with its client and its provider, so the figure is the sum of all three;
//! `side_by_side` separates them. Audit log, budget, metrics and access log are on.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use cogni_gateway::base::header_lines::HeaderLines;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::fakes::model_provider::FakeProvider;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::{budget_headers, request_head};
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::{RequestId, ToolSettings};
use cogni_gateway::gateway::upstream::headers::{InjectedHeaders, UpstreamRequestHead};
use cogni_gateway::llm::budget::price::{self, PriceTable};
use cogni_gateway::llm::budget::{
    BudgetAmount, BudgetLedger, BudgetLimits, Nanodollars, PriorUsage, ReserveRequest, TokenUsage,
    Tokens,
};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

type RequestBody = Full<bytes::Bytes>;

fn bench_head(criterion: &mut Criterion) {
    let config = run_config(Path::new("."), SocketAddr::from((Ipv4Addr::LOCALHOST, 4000)));
    let policy = &config.policy.headers;
    let injected_headers = InjectedHeaders::new(&config.upstream, &config.identity, policy);
    let injected_headers = Arc::new(injected_headers.expect("a valid identity"));
    let request = chat_request(&"x".repeat(2048), false);
    let mut group = criterion.benchmark_group("head");
    group.bench_function("route", |bencher| {
        bencher.iter(|| request_head::match_route(black_box(&request)).is_ok());
    });
    group.bench_function("header policy", |bencher| {
        bencher.iter(|| {
            let id = RequestId::new();
            let head = UpstreamRequestHead::new(
                GatewayRoute::ChatCompletions,
                &request,
                policy,
                injected_headers.clone(),
                &id,
            );
            head.to_http1_bytes(black_box(2048))
        });
    });
    group.bench_function("response policy", |bencher| {
        let answered =
            [("content-type", "application/json"), ("x-litellm-response-cost", "2.5e-05")];
        let mut kept = HeaderLines::default();
        for (name, value) in answered {
            kept.push(name, value.as_bytes());
        }
        bencher.iter(|| injected_headers.filter_response(&mut kept.clone(), policy));
    });
    group.finish();
}

/// Measures what the budget adds to a call with every kind of limit.
fn bench_stages(criterion: &mut Criterion) {
    let prices =
        PriceTable::load_table(&price::PriceConfig::default()).expect("the built-in table");
    let limits = BudgetLimits {
        max_turns: Some(u64::MAX),
        max_total_tokens: Some(Tokens(u64::MAX)),
        max_output_tokens: Some(Tokens(u64::MAX)),
        max_cost_usd: Some(Nanodollars(u64::MAX)),
        max_concurrent: Some(u32::MAX),
        ..BudgetLimits::default()
    };
    let ledger = Arc::new(BudgetLedger::new(limits, PriorUsage::default()));
    let ask = ReserveRequest {
        is_turn: true,
        input: Tokens(600),
        input_bound: Tokens(1800),
        output: Some(Tokens(4096)),
        unlimited_output: Tokens::ZERO,
        choices: 1,
        price: prices.find_price("claude-opus-4-5"),
    };
    let usage = TokenUsage { input: Tokens(612), output: Tokens(44), ..TokenUsage::default() };
    let mut group = criterion.benchmark_group("budget");
    group.bench_function("price of a model", |bencher| {
        bencher.iter(|| prices.price_for(black_box("claude-opus-4-5"), || true));
    });
    group.bench_function("reserve and settle", |bencher| {
        bencher.iter(|| {
            let reservation = ledger.reserve_call(black_box(&ask)).expect("there is enough");
            reservation.settle_usage(&usage)
        });
    });
    group.bench_function("headers of what is left", |bencher| {
        bencher.iter(|| {
            let mut fields = HeaderLines::default();
            budget_headers::insert_budget_headers(
                &mut fields,
                &ledger.remainder_excluding(BudgetAmount::default()),
            );
            fields
        });
    });
    group.finish();
}

fn bench_exchange(criterion: &mut Criterion) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut client = runtime.block_on(start_gateway(directory.path(), ToolSettings::default()));
    // The tools have a gateway of their own, so that the figures of calls to a model stay those of a run without tools.
    let tool_directory = tempfile::tempdir().expect("a temporary directory");
    let mut tool_client = runtime.block_on(start_gateway(tool_directory.path(), tool_settings()));
    let mut group = criterion.benchmark_group("exchange");
    for (name, size) in
        [("unary 2 KB", 2 << 10), ("unary 100 KB", 100 << 10), ("unary 1 MB", 1 << 20)]
    {
        let prompt = "x".repeat(size);
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| make_call(&runtime, &mut client, chat_request(&prompt, false)));
        });
    }
    group.throughput(Throughput::Elements(STREAM_CHUNKS));
    group.bench_function("stream of 100 chunks", |bencher| {
        bencher.iter(|| make_call(&runtime, &mut client, chat_request("hello", true)));
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("tool call", |bencher| {
        bencher.iter(|| make_call(&runtime, &mut tool_client, tool_request()));
    });
    group.finish();
}

/// Starts a provider, a gateway and a client's connection on the current runtime.
async fn start_gateway(directory: &Path, tools: ToolSettings) -> SendRequest<RequestBody> {
    let script = format!("chunks={STREAM_CHUNKS}").parse().expect("a valid script");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let provider = FakeProvider::bind(address, script).await.expect("a free port");
    let config = GatewayConfig { tools, ..run_config(directory, provider.addr()) };
    let app = GatewayProcess::build_process(config).expect("a valid configuration");
    let socket =
        UnixStream::connect(app.socket_path().expect("one run")).await.expect("a bound socket");
    let tasks = TaskGroup::default();
    tasks.spawn_task(provider.serve(CancellationToken::new()));
    tasks.spawn_task(async move {
        app.serve_until_cancelled(CancellationToken::new()).await.expect("a served socket");
    });
    let (client, connection) = http1::handshake(TokioIo::new(socket)).await.expect("a connection");
    tasks.spawn_task(async move { drop(connection.await) });
    client
}

fn make_call(
    runtime: &Runtime,
    client: &mut SendRequest<RequestBody>,
    request: Request<RequestBody>,
) -> usize {
    runtime.block_on(async {
        client.ready().await.expect("an open connection");
        let response = client.send_request(request).await.expect("a response");
        assert_eq!(response.status(), 200);
        response.into_body().collect().await.expect("a whole body").to_bytes().len()
    })
}

fn chat_request(prompt: &str, is_stream: bool) -> Request<RequestBody> {
    let messages = json!([{"role": "user", "content": prompt}]);
    let body = json!({"model": "fake", "stream": is_stream, "messages": messages});
    Request::post("/v1/chat/completions")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("accept", "application/json")
        .header("authorization", "Bearer placeholder")
        .header("user-agent", "OpenAI/Python 3.54.0")
        .body(Full::from(body.to_string()))
        .expect("a valid request")
}

/// Grants a tool of the gateway itself, which does nothing but look at the clock.
fn tool_settings() -> ToolSettings {
    let table = "granted = ['core__get_current_time']".parse().expect("a valid table");
    let opener = Some(Arc::new(RunToolOpener::default()) as _);
    ToolSettings { table: Some(table), opener, ..ToolSettings::default() }
}

fn tool_request() -> Request<RequestBody> {
    Request::post("/tool/exec")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::from(r#"{"tool":"core__get_current_time","arguments":{}}"#))
        .expect("a valid request")
}

fn run_config(directory: &Path, upstream: SocketAddr) -> GatewayConfig {
    let mut config = GatewayConfig::default();
    "bench".clone_into(&mut config.identity.run);
    "acct-1".clone_into(&mut config.identity.account);
    config.listen.socket_path = directory.join("llm.sock");
    config.upstream.url = upstream.to_string().parse().expect("an address is a target");
    config.upstream.api_key = SecretString::new("sk-bench");
    config.budget.max_turns = Some(u64::MAX);
    // Calls of tools have a rate in every run.
    config.budget.free_calls_per_minute = Some(u32::MAX);
    config.audit.path = Some(directory.join("audit.jsonl"));
    config.access_log = AccessLogDestination::File(directory.join("access.log"));
    config
}

const STREAM_CHUNKS: u64 = 100;

criterion_group!(benches, bench_head, bench_stages, bench_exchange);
criterion_main!(benches);
