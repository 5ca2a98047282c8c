//! G12: Tests of the spans of a run with a sandbox.

use http::StatusCode;

use super::driver::{TestedRunner, shell_argv};
use crate::support::trace_collector::{TraceCollector, format_span};

/// G12: The sandbox is a child span of the run, and its start is another span; a failure is recorded.
#[tokio::test(flavor = "multi_thread")]
async fn a_collector_sees_the_sandbox_of_a_run() {
    let collector = TraceCollector::start(StatusCode::OK).await;
    let address = collector.address;
    let name = format!("run-traced-{}", std::process::id());
    let id = name.clone();
    let run = move || {
        let runner = TestedRunner::new();
        let mut command = runner.prepare(&["--run-id", &id], &shell_argv("exit 3"));
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}"));
        command.env("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        assert_eq!(command.output().unwrap().status.code(), Some(1));
        runner.assert_nothing_is_left(&id);
    };
    tokio::task::spawn_blocking(run).await.unwrap();
    let mut spans = collector.seen().spans();
    spans.sort_by(|a, b| a.name.cmp(&b.name));
    let tree: String = spans.iter().map(|span| format_span(span, "")).collect();
    let tree = tree.replace(&name, "run-traced");
    insta::assert_snapshot!(tree, @r"
    run (kind 1): container_failed
      cogni.run.id = run-traced
      cogni.run.attempt = 0
      gen_ai.usage.input_tokens = 0
      gen_ai.usage.output_tokens = 0
      cogni.calls.admitted = 0
      cogni.calls.refused = 0
      error.type = container_failed
    sandbox (kind 1): container_failed
      cogni.sandbox.driver = embedded
      process.exit.code = 3
      error.type = container_failed
    sandbox start (kind 1)
      cogni.sandbox.driver = embedded
    ");
    let run = spans.iter().find(|span| span.name == "run").unwrap();
    assert_eq!(hex::encode(&run.parent_span_id), "b7ad6b7169203331");
    let within = spans.iter().filter(|span| span.parent_span_id == run.span_id).count();
    assert_eq!(within, 2);
}
