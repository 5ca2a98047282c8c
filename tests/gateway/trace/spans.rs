//! G12: Tests of spans: what a collector receives in OpenTelemetry's protocol, and the cost without a collector.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::telemetry::metrics::MetricsRegistry;
use cogni_gateway::telemetry::trace::ProcessTracer;
use http::StatusCode;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio::net::TcpListener;

use super::context::OURS;
use crate::metrics::scrape_listener;
use crate::support::app::TestApp;
use crate::support::process::NO_LISTENER;
use crate::support::trace_collector::{TraceCollector, format_span};

/// G12: A run is a span, and its calls are child spans with the conventions' names; no span has a prompt or a key.
#[tokio::test]
async fn a_collector_sees_the_run_and_its_calls() {
    let collector = TraceCollector::start(StatusCode::OK).await;
    let app = TestApp::with(|config| {
        configure_collector(config, collector.address);
        config.identity.trace = Some(OURS.parse().unwrap());
        config.telemetry.otlp_headers =
            SecretString::new("authorization=Bearer%20sk-collector,x-team=a");
    })
    .await;
    let body = json!({
        "model": "fake/chunks=2", "stream": true, "max_tokens": 5,
        "messages": [{"role": "user", "content": "the prompt"}],
    });
    app.client().post("/v1/chat/completions", &body).await;
    app.client().post("/v1/chat/completions", &json!({"model": "fake/status=500"})).await;
    app.client().post("/v1/nothing", &json!({})).await;
    app.stop().await;

    let seen = collector.seen();
    assert_eq!(seen.heads[0], "POST /v1/traces application/x-protobuf Bearer sk-collector a");
    let spans = seen.spans();
    insta::assert_snapshot!(format_tree(&spans), @r"
    run (kind 1)
      cogni.run.id = run-1
      cogni.run.attempt = 0
      gen_ai.usage.input_tokens = 20
      gen_ai.usage.output_tokens = 2
      cogni.calls.admitted = 2
      cogni.calls.refused = 1
      chat fake/chunks%3D2 (kind 3)
        gen_ai.operation.name = chat
        gen_ai.provider.name = litellm
        cogni.call.id = [id]
        cogni.route = chat_completions
        gen_ai.request.model = fake/chunks%3D2
        http.response.status_code = 200
        gen_ai.usage.input_tokens = 11
        gen_ai.usage.output_tokens = 2
        cogni.usage.source = provider
        cogni.cost_usd = 0.000015
        gen_ai.response.time_to_first_chunk = [seconds]
      chat fake/status%3D500 (kind 3): 500
        gen_ai.operation.name = chat
        gen_ai.provider.name = litellm
        cogni.call.id = [id]
        cogni.route = chat_completions
        gen_ai.request.model = fake/status%3D500
        http.response.status_code = 500
        cogni.usage.source = estimated
        error.type = 500
    ");
    for secret in ["sk-real", "sk-collector", "the prompt", "acct-1"] {
        assert!(!format!("{spans:?}").contains(secret), "{secret}");
    }
    assert_eq!(
        seen.requests[0].resource_spans[0].resource.as_ref().unwrap().attributes[0].key,
        "service.name"
    );
}

/// G12: A call that reached no upstream is not counted as a call, but has a span.
#[tokio::test]
async fn a_call_that_reached_no_upstream_has_a_span() {
    let collector = TraceCollector::start(StatusCode::OK).await;
    let app = TestApp::with(|config| {
        configure_collector(config, collector.address);
        config.upstream.url = NO_LISTENER.to_string().parse().unwrap();
    })
    .await;
    assert_eq!(app.client().post("/v1/messages", &chat_body()).await.status, 502);
    app.stop().await;
    let spans = collector.seen().spans();
    let failed = spans.iter().find(|span| span.name == "chat fake").unwrap();
    assert_eq!(failed.status.as_ref().unwrap().message, "upstream_unreachable");
}

/// G12: A run without a host's trace starts its own trace, for the configured share of runs.
#[tokio::test]
async fn a_run_without_a_trace_gets_one_where_it_is_sampled() {
    for (ratio, recorded) in [(1.0, true), (0.0, false)] {
        let collector = TraceCollector::start(StatusCode::OK).await;
        let app = TestApp::with(|config| {
            configure_collector(config, collector.address);
            config.telemetry.sample_ratio = ratio;
        })
        .await;
        app.client().post("/v1/messages", &chat_body()).await;
        let header =
            app.upstream.seen.last_request().unwrap().header("traceparent").unwrap().to_owned();
        assert_eq!(header.ends_with("-01"), recorded);
        let records = app.stop().await;
        assert_eq!(records[0]["trace"], header[3..35]);
        let spans = collector.seen().spans();
        assert_eq!(spans.len(), if recorded { 2 } else { 0 });
        assert!(spans.iter().all(|span| hex::encode(&span.trace_id) == header[3..35]));
    }
}

/// G12: A collector that cannot be reached delays nothing, and the lost spans are counted.
#[tokio::test]
async fn a_dead_collector_costs_a_counter() {
    let refusing = TraceCollector::start(StatusCode::SERVICE_UNAVAILABLE).await;
    for address in [NO_LISTENER, refusing.address] {
        let app = TestApp::with(|config| {
            configure_collector(config, address);
            config.metrics.address = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        })
        .await;
        for _ in 0..3 {
            assert_eq!(app.client().post("/v1/messages", &chat_body()).await.status, 200);
        }
        let metrics = app.metrics.unwrap();
        let lost = "cogni_gateway_spans_lost_total{reason=\"not_taken\"} 3";
        let told = async {
            while !scrape_listener(metrics, "GET /metrics HTTP/1.0\r\n\r\n").await.contains(lost) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), told).await.expect("they are counted as lost");
        app.stop().await;
    }
}

/// G12: Spans beyond the queue are lost and counted, and reporting a span never waits.
#[tokio::test]
async fn spans_beyond_the_queue_are_lost_and_counted() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = GatewayConfig::default();
    configure_collector(&mut config, silent.local_addr().unwrap());
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let tracer =
        ProcessTracer::start_tracer(&config.telemetry, "litellm", metrics.span_counters()).unwrap();
    let trace = tracer.start_run_trace(None).unwrap();
    for _ in 0..10_000 {
        trace.record_span(trace.span_since("span", SystemTime::now()));
    }
    let lost = metrics.span_counters().overflowed.get();
    // One batch may be in transit, and another one may be collected.
    assert!((10_000 - 2048 - 2 * 512..=10_000 - 2048).contains(&lost), "{lost}");
}

/// G12: A collector that accepts everything and never answers delays neither calls nor the shutdown.
#[tokio::test]
async fn a_collector_that_never_answers_delays_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let app =
        TestApp::with(|config| configure_collector(config, silent.local_addr().unwrap())).await;
    assert_eq!(app.client().post("/v1/messages", &chat_body()).await.status, 200);
    tokio::time::timeout(Duration::from_mins(1), app.stop()).await.unwrap();
}

fn configure_collector(config: &mut GatewayConfig, collector: SocketAddr) {
    config.telemetry.otlp_endpoint = Some(format!("http://{collector}").parse().unwrap());
}

fn chat_body() -> serde_json::Value {
    json!({"model": "fake", "max_tokens": 5, "messages": []})
}

/// Formats the spans below their parents, without ids and times.
fn format_tree(spans: &[Span]) -> String {
    let root = spans.iter().find(|span| span.name == "run").unwrap();
    assert_eq!(hex::encode(&root.parent_span_id), OURS[36..52]);
    let mut text = format_span(root, "");
    for span in spans.iter().filter(|span| span.span_id != root.span_id) {
        assert_eq!(span.parent_span_id, root.span_id);
        assert!(span.start_time_unix_nano >= root.start_time_unix_nano);
        assert!(span.end_time_unix_nano <= root.end_time_unix_nano);
        text += &format_span(span, "  ");
    }
    assert!(spans.iter().all(|span| hex::encode(&span.trace_id) == OURS[3..35]));
    text
}
