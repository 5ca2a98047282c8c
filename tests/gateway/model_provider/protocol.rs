//! Tests of the protocol shapes on the wire, which unmodified clients have to accept.

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioExecutor;
use insta::{assert_json_snapshot, assert_snapshot};
use serde_json::{Value, json};

use super::raw_client::{RawReply, call_without_body, get_path, post_json};
use crate::support::model_provider::{start_default, start_provider};

/// Replaces ids and times, which differ between runs; their length and place are checked.
fn with_stable_ids<T>(check: impl FnOnce() -> T) -> T {
    insta::with_settings!({
        filters => vec![
            (r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "UUID"),
            (r"[0-9a-f]{12}7[0-9a-f]{19}", "ID"),
            (r#""created(_at)?": ?\d{10}"#, r#""created$1": TIME"#),
            (r"date: .*", "date: DATE"),
        ],
    }, { check() })
}

async fn call_script(script: &str, path: &str, more: Value) -> RawReply {
    let provider = start_provider("text=hi there").await;
    let mut body = json!({ "model": format!("fake/{script}") });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    post_json(provider.addr, path, &body).await
}

async fn stream_script(script: &str, path: &str) -> RawReply {
    call_script(script, path, json!({ "stream": true })).await
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const TURNS: [&str; 4] = [CHAT, COMPLETIONS, RESPONSES, MESSAGES];

fn snapshot_name(path: &str) -> String {
    path.trim_start_matches("/v1/").replace('/', "_")
}

#[tokio::test]
async fn unary_answers_have_their_protocols_shape() {
    for path in TURNS.into_iter().chain(["/v1/messages/count_tokens", "/v1/embeddings"]) {
        let reply = call_script("", path, json!({})).await;
        assert_eq!((reply.status(), reply.whole), (200, true), "{path}");
        with_stable_ids(|| {
            assert_json_snapshot!(format!("unary_{}", snapshot_name(path)), reply.json());
        });
    }
}

#[tokio::test]
async fn streams_have_their_protocols_shape() {
    for path in TURNS {
        let reply = stream_script("", path).await;
        assert!(reply.whole, "{path}");
        with_stable_ids(|| {
            assert_snapshot!(format!("stream_{}", snapshot_name(path)), reply.text());
        });
    }
}

#[tokio::test]
async fn tool_calls_come_in_pieces() {
    for path in [CHAT, RESPONSES, MESSAGES] {
        let reply = stream_script("tool=exec,chunks=2,arguments={\"a\":1}", path).await;
        with_stable_ids(|| assert_snapshot!(format!("tool_{}", snapshot_name(path)), reply.text()));
        let reply = call_script("tool=exec,arguments={\"a\":1}", path, json!({})).await;
        with_stable_ids(|| {
            assert_json_snapshot!(format!("tool_unary_{}", snapshot_name(path)), reply.json());
        });
    }
}

#[tokio::test]
async fn a_tool_is_asked_for_until_its_result_is_there() {
    let asks = |text: &str| text.contains("echo hello from the tool");
    let results = [
        (CHAT, "messages", json!({ "role": "tool", "tool_call_id": "call_1", "content": "hi" })),
        (RESPONSES, "input", json!({ "type": "function_call_output", "output": "hi" })),
        (MESSAGES, "messages", json!({ "role": "user", "content": [{ "type": "tool_result" }] })),
    ];
    for (path, field, result) in results {
        let conversation = json!({ field: [result] });
        assert!(asks(&call_script("tool=exec", path, json!({})).await.text()), "{path}");
        assert!(
            !asks(&call_script("tool=exec", path, conversation.clone()).await.text()),
            "{path}"
        );
        assert!(
            asks(&call_script("tool=exec,repeat=yes", path, conversation).await.text()),
            "{path}"
        );
    }
    assert!(
        !asks(&call_script("tool=exec", COMPLETIONS, json!({})).await.text()),
        "it knows no tools"
    );
}

#[tokio::test]
async fn an_echo_repeats_the_last_message() {
    let last = [
        (CHAT, "messages", json!({ "role": "tool", "content": "seven" })),
        (RESPONSES, "input", json!({ "type": "function_call_output", "output": "seven" })),
        (MESSAGES, "messages", json!({ "role": "user", "content": "seven" })),
    ];
    for (path, field, last) in last {
        let first = json!({ "role": "user", "content": "six" });
        let conversation = json!({ field: [first, last] });
        let text = call_script("echo=yes", path, conversation).await.text();
        assert!(text.contains("seven") && !text.contains("six"), "{text}");
        assert!(call_script("echo=yes", path, json!({})).await.text().contains("hi there"));
    }
}

#[tokio::test]
async fn errors_have_their_protocols_shape() {
    let mut seen = Vec::new();
    for path in TURNS {
        for status in [402, 422, 429] {
            let reply =
                call_script(&format!("status={status}"), path, json!({ "stream": true })).await;
            assert_eq!(reply.status(), status);
            seen.push(format!("{path} {}", reply.text()));
        }
    }
    assert_snapshot!(seen.join("\n"), @r#"
    /v1/chat/completions {"error":{"code":"402","message":"the fake provider answers 402 Payment Required, as its script says","param":null,"type":"insufficient_quota"}}
    /v1/chat/completions {"error":{"code":"422","message":"the fake provider answers 422 Unprocessable Entity, as its script says","param":null,"type":"budget_exceeded"}}
    /v1/chat/completions {"error":{"code":"429","message":"the fake provider answers 429 Too Many Requests, as its script says","param":null,"type":"rate_limit_error"}}
    /v1/completions {"error":{"code":"402","message":"the fake provider answers 402 Payment Required, as its script says","param":null,"type":"insufficient_quota"}}
    /v1/completions {"error":{"code":"422","message":"the fake provider answers 422 Unprocessable Entity, as its script says","param":null,"type":"budget_exceeded"}}
    /v1/completions {"error":{"code":"429","message":"the fake provider answers 429 Too Many Requests, as its script says","param":null,"type":"rate_limit_error"}}
    /v1/responses {"error":{"code":"402","message":"the fake provider answers 402 Payment Required, as its script says","param":null,"type":"insufficient_quota"}}
    /v1/responses {"error":{"code":"422","message":"the fake provider answers 422 Unprocessable Entity, as its script says","param":null,"type":"budget_exceeded"}}
    /v1/responses {"error":{"code":"429","message":"the fake provider answers 429 Too Many Requests, as its script says","param":null,"type":"rate_limit_error"}}
    /v1/messages {"error":{"message":"the fake provider answers 402 Payment Required, as its script says","type":"billing_error"},"type":"error"}
    /v1/messages {"error":{"code":"422","message":"the fake provider answers 422 Unprocessable Entity, as its script says","param":null,"type":"budget_exceeded"}}
    /v1/messages {"error":{"message":"the fake provider answers 429 Too Many Requests, as its script says","type":"rate_limit_error"},"type":"error"}
    "#);
}

#[tokio::test]
async fn an_error_says_when_and_whether_to_try_again() {
    let reply = call_script("status=429,retry_after=7,should_retry=no", CHAT, json!({})).await;
    assert_eq!(reply.header("retry-after"), Some("7"));
    assert_eq!(reply.header("x-should-retry"), Some("false"));
    let reply = call_script("status=429", CHAT, json!({})).await;
    assert_eq!((reply.header("retry-after"), reply.header("x-should-retry")), (None, None));
}

#[tokio::test]
async fn a_unary_answer_has_litellms_headers() {
    let reply = call_script("", CHAT, json!({})).await;
    with_stable_ids(|| {
        assert_snapshot!(reply.head.replace('\r', ""), @r#"
    HTTP/1.1 200 OK
    server: uvicorn
    set-cookie: litellm=fake; HttpOnly; Path=/
    llm_provider-x-request-id: UUID
    x-litellm-call-id: UUID
    x-litellm-model-id: 5f2a7c1e9b3d4a68
    x-litellm-model-group: fake
    x-litellm-model-api-base: http://10.0.0.7:8091/v1
    x-litellm-key-spend: 12.345678
    x-litellm-version: 1.109.1
    content-type: application/json
    x-litellm-response-cost: 1.5e-05
    x-litellm-response-cost-original: 1.5e-05
    connection: close
    content-length: 408
    date: DATE
    "#);
    });
}

#[tokio::test]
async fn a_stream_has_litellms_headers_and_no_cost() {
    let reply = stream_script("", CHAT).await;
    with_stable_ids(|| {
        assert_snapshot!(reply.head.replace('\r', ""), @r#"
    HTTP/1.1 200 OK
    server: uvicorn
    set-cookie: litellm=fake; HttpOnly; Path=/
    llm_provider-x-request-id: UUID
    x-litellm-call-id: UUID
    x-litellm-model-id: 5f2a7c1e9b3d4a68
    x-litellm-model-group: fake
    x-litellm-model-api-base: http://10.0.0.7:8091/v1
    x-litellm-key-spend: 12.345678
    x-litellm-version: 1.109.1
    content-type: text/event-stream; charset=utf-8
    cache-control: no-cache
    x-accel-buffering: no
    x-litellm-response-cost-original: 0.0
    connection: close
    transfer-encoding: chunked
    date: DATE
    "#);
    });
}

#[tokio::test]
async fn the_call_id_is_handed_back() {
    let provider = start_default().await;
    let reply =
        call_without_body(provider.addr, "GET", "/v1/models", "x-litellm-call-id: run1-req-7\r\n")
            .await;
    assert_eq!(reply.header("x-litellm-call-id"), Some("run1-req-7"));
}

#[tokio::test]
async fn models_are_listed_in_the_shape_of_the_client() {
    let provider = start_default().await;
    assert_snapshot!(get_path(provider.addr, "/v1/models").await.text(), @r#"{"data":[{"created":1,"id":"fake-small","object":"model","owned_by":"fake"},{"created":1,"id":"fake-large","object":"model","owned_by":"fake"}],"object":"list"}"#);
    let anthropic = "anthropic-version: 2023-06-01\r\n";
    assert_snapshot!(call_without_body(provider.addr, "GET", "/v1/models", anthropic).await.text(), @r#"{"data":[{"created_at":"2026-01-01T00:00:00Z","display_name":"fake-small","id":"fake-small","type":"model"},{"created_at":"2026-01-01T00:00:00Z","display_name":"fake-large","id":"fake-large","type":"model"}],"first_id":"fake-small","has_more":false,"last_id":"fake-large"}"#);
}

#[tokio::test]
async fn embeddings_are_floats_or_base64_one_for_each_input() {
    let path = "/v1/embeddings";
    let lengths = |reply: RawReply| {
        let data = reply.json()["data"].as_array().unwrap().clone();
        data.iter().map(|item| item["embedding"].as_array().unwrap().len()).collect::<Vec<_>>()
    };
    assert_eq!(lengths(call_script("", path, json!({ "input": ["a", "b"] })).await), [8, 8]);
    assert_eq!(lengths(call_script("", path, json!({ "input": [[1, 2], [3]] })).await), [8, 8]);
    assert_eq!(
        lengths(call_script("", path, json!({ "input": [1, 2, 3], "dimensions": 2 })).await),
        [2]
    );
    for (dimensions, base64) in [(1, "AAAAPg=="), (2, "AAAAPgAAAD4="), (3, "AAAAPgAAAD4AAAA+")] {
        let more = json!({ "input": "a", "encoding_format": "base64", "dimensions": dimensions });
        assert_eq!(call_script("", path, more).await.json()["data"][0]["embedding"], base64);
    }
}

#[tokio::test]
async fn a_chat_stream_reports_usage_only_where_it_is_asked_to() {
    let include =
        |include: bool| json!({ "stream": true, "stream_options": { "include_usage": include } });
    assert!(!call_script("", CHAT, include(false)).await.text().contains("usage"));
    assert!(!stream_script("", CHAT).await.text().contains("usage"));
    let events = call_script("", CHAT, include(true)).await.events();
    let usages: Vec<_> = events.iter().map(|event| &event["usage"]).collect();
    let (last, others) = usages.split_last().unwrap();
    assert!(others.iter().all(|usage| usage.is_null()));
    assert_snapshot!(last, @r#"{"completion_tokens":2,"completion_tokens_details":{"reasoning_tokens":0},"cost":0.000015,"prompt_tokens":11,"prompt_tokens_details":{"cached_tokens":0},"total_tokens":13}"#);
    assert_eq!(events.last().unwrap()["choices"], json!([]));
}

#[tokio::test]
async fn usage_sits_where_the_script_puts_it() {
    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let mut seen = Vec::new();
    for path in [CHAT, RESPONSES, MESSAGES] {
        for report in ["none", "yes", "finish", "every"] {
            let events =
                call_script(&format!("usage={report}"), path, options.clone()).await.events();
            let outputs: Vec<_> = events.iter().map(output_tokens).collect();
            seen.push(format!("{path} {report}: {}", outputs.join(" ")));
        }
    }
    assert_snapshot!(seen.join("\n"), @r#"
    /v1/chat/completions none: - - - -
    /v1/chat/completions yes: - - - - 2
    /v1/chat/completions finish: - - - 2
    /v1/chat/completions every: - 1 1 - 2
    /v1/responses none: - - - - - - - - - -
    /v1/responses yes: - - - - - - - - - 2
    /v1/responses finish: - - - - - - - - - 2
    /v1/responses every: 1 1 - - - - - - - 2
    /v1/messages none: - - - - - - - -
    /v1/messages yes: 1 - - - - - 2 -
    /v1/messages finish: 1 - - - - - 2 -
    /v1/messages every: 1 - - - - - 1 2 -
    "#);
}

/// Returns an event's output tokens, `-` if it reports none.
fn output_tokens(event: &Value) -> String {
    let usage = [&event["usage"], &event["response"]["usage"], &event["message"]["usage"]];
    let counts =
        usage.iter().flat_map(|usage| [&usage["completion_tokens"], &usage["output_tokens"]]);
    counts.into_iter().find(|count| count.is_number()).map_or("-".to_owned(), ToString::to_string)
}

#[tokio::test]
async fn unary_usage_can_be_left_out() {
    for path in TURNS {
        assert!(
            !call_script("usage=none", path, json!({})).await.text().contains("_tokens\""),
            "{path}"
        );
    }
}

#[tokio::test]
async fn each_protocol_counts_cached_and_reasoning_tokens_its_own_way() {
    let script = "input=19,cached=5,cache_write=3,output=9,reasoning=4";
    let mut seen = Vec::new();
    for path in [CHAT, RESPONSES, MESSAGES] {
        seen.push(format!("{path} {}", call_script(script, path, json!({})).await.json()["usage"]));
    }
    assert_snapshot!(seen.join("\n"), @r#"
    /v1/chat/completions {"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"completion_tokens":9,"completion_tokens_details":{"reasoning_tokens":4},"prompt_tokens":19,"prompt_tokens_details":{"cached_tokens":5},"total_tokens":28}
    /v1/responses {"input_tokens":19,"input_tokens_details":{"cached_tokens":5},"output_tokens":9,"output_tokens_details":{"reasoning_tokens":4},"total_tokens":28}
    /v1/messages {"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"input_tokens":11,"output_tokens":9}
    "#);
}

#[tokio::test]
async fn the_requests_limit_is_obeyed_where_the_script_says_so() {
    let limits = [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ];
    for (path, limit) in limits {
        let more = json!({ "stream": true, limit: 2 });
        let deaf = call_script("chunks=5", path, more.clone()).await.text();
        let obedient = call_script("chunks=5,obey=yes", path, more).await.text();
        assert_eq!(deaf.matches("hi ").count(), if path == RESPONSES { 15 } else { 3 }, "{deaf}");
        assert!(!obedient.contains("hi there hi"), "{obedient}");
        let reasons = ["\"length\"", "max_output_tokens", "\"max_tokens\""];
        assert!(reasons.iter().any(|reason| obedient.contains(reason)), "{obedient}");
    }
}

#[tokio::test]
async fn the_last_event_can_be_left_out() {
    for (path, last) in [(CHAT, "[DONE]"), (COMPLETIONS, "[DONE]"), (MESSAGES, "message_stop")] {
        assert!(stream_script("", path).await.text().contains(last));
        let reply = stream_script("done=no", path).await;
        assert!(!reply.text().contains(last) && reply.whole);
    }
}

#[tokio::test]
async fn an_unknown_path_is_refused() {
    let provider = start_default().await;
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/files", 404),
        ("GET", "/", 404),
    ] {
        assert_eq!(
            call_without_body(provider.addr, method, path, "").await.status(),
            status,
            "{path}"
        );
    }
    assert_eq!(get_path(provider.addr, "/health").await.text(), r#"{"status":"ok"}"#);
}

#[tokio::test]
async fn http_2_is_served_to_a_client_that_begins_with_it() {
    let provider = start_default().await;
    let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let request = |model: &str| {
        let body = json!({ "model": model, "stream": true }).to_string();
        http::Request::post(format!("http://{}{CHAT}", provider.addr))
            .body(Full::new(bytes::Bytes::from(body)))
            .unwrap()
    };
    let response = client.request(request("m")).await.unwrap();
    assert_eq!(response.version(), http::Version::HTTP_2);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));

    let broken = client.request(request("fake/fault=reset@1")).await.unwrap();
    assert!(broken.into_body().collect().await.is_err());
    assert!(client.request(request("m")).await.is_ok());
    assert_eq!(provider.seen.connection_count(), 1, "a stream was reset, not the connection");
}
