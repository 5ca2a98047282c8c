//! A3: Tests of refusals: every call needs a grant, and every refusal is JSON with a code.

use std::fmt::Write;

use http::Method;
use serde_json::{Value, json};

use super::{chat_body, run_body, wait_until_async};
use crate::support::client::TestResponse;
use crate::support::service::ServiceSetup;

/// The paths come from the service's own API description, so a new path is tested, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_grant_is_refused_at_every_path() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let document = setup.client().get("/api/v1/openapi.json").await.json();
    let mut open = vec![];
    for (path, method, operation) in list_operations(&document) {
        let concrete =
            path.replace("{id}", "run-1").replace("{name}", "bundle").replace("{agent}", "fake");
        if operation["security"] == json!([{}]) {
            open.push(concrete);
            continue;
        }
        let response = setup.client().ask(method, &concrete, "", &[]).await;
        assert_eq!(response.status, 401, "{path}: {}", response.text());
        assert_eq!(response.json()["error"]["code"], "unauthorized", "{path}");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"), "{path}");
    }
    // A reply to a question is signed with a key of its own.
    assert_eq!(open, ["/api/v1/approvals/replies", "/healthz", "/readyz"]);
    let unsigned = setup.client().ask(Method::POST, &open[0], "{}", &[]).await;
    assert_eq!(unsigned.status, 404, "this service takes no replies: {}", unsigned.text());
    setup.stop(service);
}

fn list_operations(document: &Value) -> Vec<(String, Method, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.iter().flat_map(|(path, item)| {
        item.as_object().unwrap().iter().map(move |(method, operation)| {
            (path.clone(), method.to_uppercase().parse().unwrap(), operation.clone())
        })
    });
    operations.collect()
}

/// A3: A revoked grant and a missing scope have their own codes.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_is_valid_for_its_scopes_until_it_is_revoked() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let mut messages = String::new();
    let all = setup.grant(&["--repo", "https://github.com/acme/*"]);
    let run = |change: Value| {
        let mut body = run_body("fake");
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        body
    };
    let reader = setup.mint(&["--access", "read"]);
    add_message(&mut messages, "only reads", &reader.post("/api/v1/runs", &run_body("fake")).await);
    add_message(
        &mut messages,
        "only reads",
        &reader.post("/api/v1/ai/chat", &chat_body("fake")).await,
    );
    let other = ["--allow-sandbox", "--agent", "sandbox:openclaw", "--account", "a"];
    let runner = setup.mint(&[&["--access", "runs"], &other[..]].concat());
    add_message(
        &mut messages,
        "another agent",
        &runner.post("/api/v1/runs", &run_body("fake")).await,
    );
    add_message(&mut messages, "only runs", &runner.get("/api/v1/runs").await);
    let account = run(json!({"account": "acct-2"}));
    add_message(&mut messages, "another account", &all.post("/api/v1/runs", &account).await);
    let foreign = run(json!({"repo": "https://github.com/acme-evil/site", "branch_key": "b"}));
    add_message(&mut messages, "another repository", &all.post("/api/v1/runs", &foreign).await);
    let local = run(json!({"repo": "file:///srv/git/site.git", "branch_key": "b"}));
    add_message(&mut messages, "one of this machine", &all.post("/api/v1/runs", &local).await);
    setup.cogni(&["grant", "revoke", &all.id]);
    wait_until_async(async || all.get("/api/v1/runs").await.status == 401).await;
    add_message(&mut messages, "revoked", &all.get("/api/v1/runs").await);
    insta::assert_snapshot!(messages, @r"
    only reads: 403 forbidden: this grant does not have `runs` access
    only reads: 403 forbidden: this grant does not have `runs` access
    another agent: 403 forbidden_agent: this grant does not allow the agent `sandbox:agent`
    only runs: 403 forbidden: this grant does not have `read` access
    another account: 403 forbidden_account: this grant does not allow the account `acct-2` to pay
    another repository: 403 forbidden_repo: this grant does not allow the repository `https://github.com/acme-evil/site.git`
    one of this machine: 403 forbidden_repo: this grant does not allow the repository `file:///srv/git/site.git`
    revoked: 401 grant_revoked: this grant has been revoked
    ");
    setup.stop(service);
}

/// No response is one of axum's own error texts.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_refused_in_the_same_shape() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let mut messages = String::new();
    for (label, method, path, body) in ODD {
        let response = grant.ask(method, path, body, &[("content-type", JSON)]).await;
        add_message(&mut messages, label, &response);
    }
    let large = format!("{{\"agent\": \"{}\"}}", "x".repeat(1 << 20));
    let runs = async |body: &str, headers: &[(&str, &str)]| {
        grant.ask(Method::POST, "/api/v1/runs", body, headers).await
    };
    add_message(&mut messages, "too large", &runs(&large, &[]).await);
    let values = vec!["0"; 40_000].join(",");
    let many = format!(r#"{{"agent": "a", "metadata": {{"a": [{values}]}}}}"#);
    add_message(&mut messages, "too many values", &runs(&many, &[]).await);
    add_message(
        &mut messages,
        "not JSON, it says",
        &runs("{}", &[("content-type", "text/plain")]).await,
    );
    let key = [("idempotency-key", "two words")];
    add_message(&mut messages, "an odd key", &runs(&run_body("m").to_string(), &key).await);
    let deleted = grant.ask(Method::DELETE, "/api/v1/runs", "", &[]).await;
    assert_eq!((deleted.status.as_u16(), deleted.header("allow")), (405, Some("POST,GET,HEAD")));
    insta::assert_snapshot!(messages, @r"
    no such path: 404 no_such_path: no such path; `GET /api/v1/openapi.json` lists all paths
    another method: 405 method_not_allowed: this path does not take this method; the header `Allow` lists its methods
    no JSON: 400 invalid_json: the body is not JSON: EOF while parsing an object at line 1 column 1
    nothing: 400 invalid_json: the body is not JSON: EOF while parsing a value at line 1 column 0
    a field missing: 422 invalid_request: field `agent` is missing; give it
    a field that is not seen: 422 invalid_request: unknown field `x\u{202e}y\u{61c}`, expected one of `agent`, `model`, `messages`, `account`, `state_key`, `repo`, `base`, `branch_key`, `work_item`, `pull_request`, `pull_request_title`, `hide_request`, `budget`, `max_runtime`, `metadata`
    an unknown field: 422 invalid_request: unknown field `image`, expected one of `agent`, `model`, `messages`, `account`, `state_key`, `repo`, `base`, `branch_key`, `work_item`, `pull_request`, `pull_request_title`, `hide_request`, `budget`, `max_runtime`, `metadata`
    a number for a text: 422 invalid_request: `graphName` is 7; give a text
    a key of the metadata twice: 422 invalid_request: duplicate key `team` at byte 104
    deeper, in a chat: 422 invalid_request: duplicate key `b` at byte 96
    nothing to answer: 422 invalid_request: `messages` is empty; give at least one message
    a model with a character that is not seen: 422 invalid_request: `model` is invalid: give 1 to 256 visible characters
    no such agent: 422 no_such_agent: there is no agent `sandbox:none`; there is `sandbox:agent`, `sandbox:openclaw`
    no number: 400 invalid_parameter: invalid query: limit: give a whole number
    an unknown parameter: 400 invalid_parameter: invalid query: page: unknown field `page`, expected one of `agent`, `state`, `cursor`, `limit`
    no such run: 404 not_found: there is no run `run-7` that this grant can see
    a path that is not UTF-8: 400 invalid_parameter: the path is not UTF-8
    too large: 413 body_too_large: the body is larger than 1048576 bytes
    too many values: 422 invalid_request: more than 32768 values
    not JSON, it says: 415 unsupported_media_type: the body's content type is not supported; send `Content-Type: application/json`
    an odd key: 400 invalid_parameter: `Idempotency-Key` is invalid: give 1 to 255 visible ASCII characters
    ");
    setup.stop(service);
}

/// A4: The number of an event that no run can have is refused under the name that the client has given.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_out_of_range_is_named_as_the_client_has_named_it() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let run = grant.run(&run_body("fake")).await;
    grant.ended(&run).await;
    let (events, number) = (format!("/api/v1/runs/{run}/events"), (1_u64 << 63).to_string());
    let mut messages = String::new();
    let by_query = grant.get(&format!("{events}?after={number}")).await;
    add_message(&mut messages, "by query", &by_query);
    let by_header = grant.ask(Method::GET, &events, "", &[("last-event-id", &number)]).await;
    add_message(&mut messages, "by header", &by_header);
    insta::assert_snapshot!(messages, @r"
    by query: 400 invalid_parameter: `after` is invalid: the run has no event with this number
    by header: 400 invalid_parameter: `Last-Event-ID` is invalid: the run has no event with this number
    ");
    setup.stop(service);
}

/// A3: A token is accepted only in its header, and is never logged.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_read_from_one_header_only() {
    let mut setup = ServiceSetup::new("").await;
    setup.set("ACCESS_LOG_PATH", "-");
    let service = setup.start();
    let grant = setup.grant(&[]);
    let good = format!("Bearer {}", grant.token);
    let (lower, basic) = (format!("bearer {}", grant.token), format!("Basic {}", grant.token));
    let by_query = format!("/api/v1/runs?token={}", grant.token);
    for (path, headers, status) in [
        ("/api/v1/runs", vec![("authorization", &*good)], 200),
        ("/api/v1/runs", vec![("authorization", &*lower)], 200),
        ("/api/v1/runs", vec![("authorization", &*basic)], 401),
        ("/api/v1/runs", vec![("authorization", &*grant.token)], 401),
        ("/api/v1/runs", vec![("authorization", &*good), ("authorization", &*good)], 401),
        ("/api/v1/runs", vec![("x-api-key", &*grant.token)], 401),
        (&*by_query, vec![], 401),
    ] {
        let response = setup.client().ask(Method::GET, path, "", &headers).await;
        assert_eq!(response.status, status, "{path} {}", headers.len());
    }
    assert!(!service.process.output().contains(&grant.token[4..]), "the log has a token");
    setup.stop(service);
}

fn add_message(messages: &mut String, label: &str, response: &TestResponse) {
    assert_eq!(response.header("content-type"), Some(JSON), "{label}");
    assert!(response.header("x-request-id").is_some(), "{label}");
    let error = &response.json()["error"];
    let (code, message) = (error["code"].as_str().unwrap(), error["message"].as_str().unwrap());
    writeln!(messages, "{label}: {} {code}: {message}", response.status.as_u16()).unwrap();
}

const JSON: &str = "application/json";

const ODD: [(&str, Method, &str, &str); 17] = [
    ("no such path", Method::GET, "/api/v2", ""),
    ("another method", Method::DELETE, "/api/v1/runs", ""),
    ("no JSON", Method::POST, "/api/v1/runs", "{"),
    ("nothing", Method::POST, "/api/v1/runs", ""),
    ("a field missing", Method::POST, "/api/v1/runs", "{}"),
    (
        "a field that is not seen",
        Method::POST,
        "/api/v1/runs",
        "{\"agent\": \"a\", \"x\u{202e}y\u{61c}\": 1}",
    ),
    ("an unknown field", Method::POST, "/api/v1/runs", r#"{"agent": "a", "image": "x"}"#),
    ("a number for a text", Method::POST, "/api/v1/ai/chat", r#"{"graphName": 7}"#),
    (
        "a key of the metadata twice",
        Method::POST,
        "/api/v1/runs",
        r#"{"agent": "a", "model": "m", "messages": [{"role": "user", "content": "hi"}], "metadata": {"team": "a", "t\u0065am": "b"}}"#,
    ),
    (
        "deeper, in a chat",
        Method::POST,
        "/api/v1/ai/chat",
        r#"{"graphName": "a", "messages": [{"role": "user", "content": "hi"}], "metadata": {"a": [{"b": 1, "b": 1}]}}"#,
    ),
    (
        "nothing to answer",
        Method::POST,
        "/api/v1/runs",
        r#"{"agent": "sandbox:agent", "model": "m", "messages": []}"#,
    ),
    (
        "a model with a character that is not seen",
        Method::POST,
        "/api/v1/runs",
        r#"{"agent": "sandbox:agent", "model": "gpt\u200b-5", "messages": [{"role": "user", "content": "hi"}]}"#,
    ),
    (
        "no such agent",
        Method::POST,
        "/api/v1/runs",
        r#"{"agent": "sandbox:none", "model": "m", "messages": [{"role": "user", "content": "hi"}]}"#,
    ),
    ("no number", Method::GET, "/api/v1/runs?limit=many", ""),
    ("an unknown parameter", Method::GET, "/api/v1/runs?page=2", ""),
    ("no such run", Method::GET, "/api/v1/runs/run-7", ""),
    ("a path that is not UTF-8", Method::GET, "/api/v1/runs/%ff", ""),
];
