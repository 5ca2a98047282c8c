//! G4: Tests of the trace context: the upstream receives the run's trace, and never the client's.

use cogni_gateway::base::trace_context::{SpanId, TraceContext, TraceId};
use cogni_gateway::gateway::run::RequestId;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::app::TestApp;

/// G4: Trace headers of a client are dropped, whether or not the run is part of a trace.
#[tokio::test]
async fn a_client_cannot_say_which_trace_it_is_part_of() {
    let lies = [("traceparent", FORGED), ("tracestate", "evil=1"), ("baggage", "evil=1")];
    for given in [None, Some(OURS)] {
        let app = TestApp::with(|config| {
            config.identity.trace = given.map(|given| given.parse().unwrap());
        })
        .await;
        app.client().post_with("/v1/chat/completions", &chat_body(), &lies).await;
        let request = app.upstream.seen.last_request().unwrap();
        let header = request.header("traceparent");
        assert_eq!(header.map(|header| &header[3..35]), given.map(|given| &given[3..35]));
        assert_eq!([request.header("tracestate"), request.header("baggage")], [None, None]);
        app.stop().await;
    }
}

/// G12: Each call is its own span, and its request id names the span.
#[tokio::test]
async fn each_call_is_a_span_of_the_runs_trace() {
    let app = TestApp::with(|config| config.identity.trace = Some(OURS.parse().unwrap())).await;
    let mut messages = vec![];
    for _ in 0..2 {
        app.client().post("/v1/messages", &chat_body()).await;
        let request = app.upstream.seen.last_request().unwrap();
        let traceparent = request.header("traceparent").unwrap().to_owned();
        let call = request.header("x-litellm-call-id").unwrap().replace('-', "");
        assert_eq!(traceparent, format!("{}-{}-01", &OURS[..35], &call[16..]));
        messages.push(traceparent);
    }
    assert_ne!(messages[0], messages[1]);
    let records = app.stop().await;
    assert_eq!(records[0]["trace"], OURS[3..35]);
}

/// G12: LiteLLM receives the run's trace if the trace id has a form that LiteLLM accepts.
#[tokio::test]
async fn a_trace_that_litellm_knows_is_the_runs() {
    let known = |id: &str| json!({"existing_trace_id": id}).as_object().unwrap().clone();
    for (id, is_told) in [(&OURS[3..35], true), ("trace-of-langfuse", false)] {
        let app = TestApp::with(|config| config.identity.metadata = known(id)).await;
        app.client().post("/v1/messages", &chat_body()).await;
        let request = app.upstream.seen.last_request().unwrap();
        let trace_id = request.header("traceparent").map(|header| header[3..35].to_owned());
        assert_eq!(trace_id, is_told.then(|| id.to_owned()));
        app.stop().await;
    }
}

/// G12: An operator may keep the trace from the upstream.
#[tokio::test]
async fn the_upstream_gets_no_trace_if_the_operator_says_so() {
    let app = TestApp::with(|config| {
        config.identity.trace = Some(OURS.parse().unwrap());
        config.policy.headers.traceparent = false;
    })
    .await;
    app.client().post("/v1/messages", &chat_body()).await;
    assert_eq!(app.upstream.seen.last_request().unwrap().header("traceparent"), None);
    app.stop().await;
}

/// The gateway's spans are not recorded if the host does not record its spans.
#[tokio::test]
async fn an_unsampled_trace_stays_unsampled() {
    let given = OURS.replace("-01", "-00");
    let app = TestApp::with(|config| config.identity.trace = Some(given.parse().unwrap())).await;
    app.client().post("/v1/messages", &chat_body()).await;
    let request = app.upstream.seen.last_request().unwrap();
    assert!(request.header("traceparent").unwrap().ends_with("-00"));
    app.stop().await;
}

#[test]
fn an_invalid_traceparent_is_refused() {
    let wrong = [
        "",
        "00",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01more",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b71692033é1-1",
    ];
    for given in wrong {
        assert!(given.parse::<TraceContext>().is_err(), "{given}");
    }
    let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03-more";
    assert!(later.parse::<TraceContext>().unwrap().is_sampled);
}

/// Sampling selects the configured share of traces; shares of zero and one select none and all.
#[test]
fn a_share_of_traces_is_about_that_share() {
    let traces: Vec<_> = (0..4000).map(|_| TraceId::random()).collect();
    let within = |share| traces.iter().filter(|trace| trace.is_sampled_at(share)).count();
    assert_eq!([within(0.0), within(1.0)], [0, 4000]);
    assert!((700..1300).contains(&within(0.25)), "{}", within(0.25));
}

proptest! {
    #[test]
    fn whatever_is_given_is_read_or_refused(given in "[0-9a-fA-F-]{50,60}|\\PC*") {
        let _no_panic = given.parse::<TraceContext>();
    }

    #[test]
    fn a_written_traceparent_can_be_parsed(bytes in any::<[u8; 8]>(), is_sampled: bool) {
        let parent = SpanId::new(bytes);
        let context = TraceContext { trace: TraceId::random(), parent, is_sampled };
        let read = context.to_string().parse::<TraceContext>();
        prop_assert_eq!(read.ok(), parent.is_some().then_some(context));
    }
}

/// Ids that are created at the same time differ in the part that becomes the span id.
#[test]
fn requests_at_the_same_time_are_different_spans() {
    let spans: std::collections::BTreeSet<_> =
        (0..10_000).map(|_| RequestId::new().span_id().to_string()).collect();
    assert_eq!(spans.len(), 10_000);
}

fn chat_body() -> Value {
    json!({"model": "fake", "max_tokens": 5, "messages": []})
}

pub(super) const OURS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const FORGED: &str = "00-ffffffffffffffffffffffffffffffff-eeeeeeeeeeeeeeee-01";
