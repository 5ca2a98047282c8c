//! Tests of the gateway's own cost per call: the size of its future, and its allocations.

use std::future::Future;
use std::sync::{Arc, mpsc};

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::{ClientPeer, RunGateway, handle_request};
use cogni_gateway::gateway::process::GatewayProcess;
use http::Request;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::allocations;
use crate::support::app::run_config;
use crate::support::client::TestClient;
use crate::support::model_provider;

/// G14: The pipeline's state is part of every connection's task, so its size is bounded.
#[test]
fn the_future_of_a_call_is_at_most_4_kib() {
    let size = size_of_future(handle_request);
    assert!(size <= 4096, "{size} bytes");
}

/// G14: A call allocates a fixed number of times, including hyper's part.
#[test]
fn a_unary_call_allocates_a_bounded_number_of_times() {
    let call = json!({"model": "fake", "max_tokens": 5, "messages": []});
    let each = each_allocates(&call, |_| ());
    assert!(each <= MOST_PER_CALL, "{each} allocations a call");
}

/// G12: A run that is part of a trace costs each call one more header.
#[test]
fn a_traced_call_allocates_for_one_header_more() {
    let call = json!({"model": "fake", "max_tokens": 5, "messages": []});
    let traced = |config: &mut GatewayConfig| {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        config.identity.trace = Some(given.parse().unwrap());
    };
    let (untraced, traced) = (each_allocates(&call, |_| ()), each_allocates(&call, traced));
    // Both figures are rounded.
    assert!(traced <= untraced + 2, "{traced} allocations a call, {untraced} without a trace");
}

/// G7: A frame costs one buffer; the observer stores nothing of it.
#[test]
fn a_frame_allocates_a_bounded_number_of_times() {
    let stream = |chunks: u32| {
        let model = format!("fake/chunks={chunks}");
        json!({"model": model, "stream": true, "max_tokens": 5, "messages": []})
    };
    let of = |chunks| count_allocated(&stream(chunks), 1, |_| ());
    let (few, many) = (of(100), of(2100));
    // On a busy machine several frames arrive together. The first call pays for one-time setup.
    let each = many.saturating_sub(few).div_ceil(2000);
    assert!(each <= MOST_PER_FRAME, "{each} allocations a frame");
}

/// Returns what one more call allocates.
fn each_allocates(call: &Value, configure: fn(&mut GatewayConfig)) -> u64 {
    let (few, many) = (count_allocated(call, 20, configure), count_allocated(call, 120, configure));
    (many - few) / 100
}

/// Counts the allocations of a whole gateway that serves this many calls. Provider and client run in threads of their
/// own and are not counted.
fn count_allocated(body: &Value, calls: u32, configure: fn(&mut GatewayConfig)) -> u64 {
    let (dir, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let (ready, upstream) = mpsc::channel();
    let (serving, begin) = mpsc::channel::<()>();
    let socket = dir.path().join("llm.sock");
    let clients = {
        let stop = stop.clone();
        move || {
            build_runtime().block_on(async {
                let upstream = model_provider::start_default().await;
                ready.send(upstream.addr).unwrap();
                begin.recv().unwrap();
                let client = TestClient::new(&socket);
                for _ in 0..calls {
                    assert_eq!(client.post("/v1/messages", body).await.status, 200);
                }
                stop.cancel();
            });
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(clients);
        let mut config = run_config(dir.path(), upstream.recv().unwrap());
        configure(&mut config);
        count_calls(config, &stop, &serving)
    })
}

fn count_calls(config: GatewayConfig, stop: &CancellationToken, serving: &mpsc::Sender<()>) -> u64 {
    let runtime = build_runtime();
    let app = runtime.block_on(async { GatewayProcess::build_process(config) }).unwrap();
    serving.send(()).unwrap();
    allocations::count_allocations(|| {
        runtime.block_on(app.serve_until_cancelled(stop.clone())).unwrap();
    })
}

fn build_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn size_of_future<F, R>(_: F) -> usize
where
    F: Fn(Arc<RunGateway>, ClientPeer, Request<Incoming>) -> R,
    R: Future,
{
    size_of::<R>()
}

/// Measured: 38, most of which set up and close the call's connection.
const MOST_PER_CALL: u64 = 50;
/// Measured: at most 1, the frame itself.
const MOST_PER_FRAME: u64 = 2;
