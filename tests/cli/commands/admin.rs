//! G13: Tests of the operator's admin socket.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use http::Method;
use serde_json::{Value, json};

use super::{GatewaySetup, run_cogni, streamed_body};
use crate::support::client::{TestClient, TestResponse};
use crate::support::model_provider;

/// G13: An operator pauses, resumes, drains and cuts a run; each action is in the audit log with its user.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_pauses_ends_and_cuts_a_run() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    let mut gateway = run.start();
    let admin = TestClient::new(&run.admin_socket());
    let mode = fs::metadata(run.admin_socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let act = async |action: &str| send_request(&admin, Method::POST, action, &Value::Null).await;
    let call = json!({"model": "fake", "max_tokens": 5, "messages": []});
    let status = async || run.client().post("/v1/messages", &call).await.status.as_u16();

    assert_eq!(act("/runs/run-1/pause").await.json()["state"], "paused");
    let paused = run.client().post("/v1/messages", &call).await;
    assert_eq!(
        (paused.status.as_u16(), &paused.headers["retry-after"]),
        (429, &"10".parse().unwrap())
    );
    act("/runs/run-1/resume").await;
    assert_eq!(status().await, 200);

    let mut open = run.client().open("/v1/messages", &streamed_body("fake/gate=1")).await;
    assert!(open.frame().await.unwrap().is_some());
    assert_eq!(act("/runs/run-1/drain").await.json()["state"], "draining");
    assert_eq!(status().await, 403);
    assert_eq!(act("/runs/run-1/resume").await.status, 409);
    act("/runs/run-1/cut").await;
    assert!(!open.rest().await.1, "a cut stream must not seem complete");

    assert!(gateway.terminate().success());
    assert!(!run.admin_socket().exists());
    run.verify();
    let log = fs::read_to_string(run.audit_log()).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told: Vec<_> = records
        .filter_map(|record| match record["event"].as_str()? {
            "run.operated" => Some(format!("{} by {}", record["action"], record["uid"])),
            "request.settled" | "request.refused" => {
                Some(format!("{} {}", record["outcome"], record["code"]))
            }
            _ => None,
        })
        .collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    "pause" by 0
    null "run_paused"
    "resume" by 0
    "completed" null
    "drain" by 0
    null "run_ended"
    "cut" by 0
    "shut_down" "cut_by_operator"
    "#);
}

/// G13: Limits and models change while the run is served, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_changes_limits_and_models() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    let mut gateway = run.start();
    let admin = TestClient::new(&run.admin_socket());
    let patch = async |what: &str, patch: Value| {
        send_request(&admin, Method::PATCH, &format!("/runs/run-1/{what}"), &patch).await
    };
    let call = async |model: &str| {
        let call = json!({"model": model, "max_tokens": 5, "messages": []});
        run.client().post("/v1/messages", &call).await.status.as_u16()
    };

    assert_eq!(call("fake").await, 200);
    let answer = patch("budget", json!({"max_turns": 1, "deadline": "1h"})).await.json();
    assert_eq!(answer["budget"]["turns_left"], 0);
    assert_eq!(call("fake").await, 402);
    patch("budget", json!({"max_turns": null})).await;
    assert_eq!(call("fake").await, 200);

    patch("models", json!({"models": ["small"], "aliases": {"small": "fake"}})).await;
    assert_eq!((call("fake").await, call("small").await), (403, 200));

    for (what, wrong) in [
        ("budget", json!({"max_turnz": 1})),
        ("budget", json!({"max_turns": "many"})),
        ("models", json!({"model": "fake"})),
    ] {
        assert!(patch(what, wrong).await.status.is_client_error());
        let status = send_request(&admin, Method::GET, "/runs/run-1", &Value::Null).await.json();
        assert_eq!(status["policy"]["version"], 3, "{what}");
    }
    insta::assert_snapshot!(patch("budget", json!({"max_turnz": 1})).await.text(), @r#"{"error":{"code":"refused","message":"unknown field `max_turnz`, expected one of `max_turns`, `max_total_tokens`, `max_input_tokens`, `max_output_tokens`, `max_cost_usd`, `max_concurrent`, `requests_per_minute`, `tokens_per_minute`, `free_calls_per_minute`, `deadline`"}}"#);
    insta::assert_snapshot!(send_request(&admin, Method::GET, "/runs/other", &Value::Null).await.text(), @r#"{"error":{"code":"no_such_run","message":"run `other` is not open; `cogni-gateway admin runs` (`GET /runs`) lists those that are"}}"#);
    let listed = send_request(&admin, Method::GET, "/runs", &Value::Null).await.json();
    assert_eq!(listed["runs"][0]["policy"]["version"], 3);
    assert!(gateway.terminate().success());
    run.verify();
}

/// G13: A request on the socket reloads the configuration, as SIGHUP does.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_reloads_the_configuration() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    run.configure("[policy.body]\nmodels = ['fake']");
    let _gateway = run.start();
    let admin = TestClient::new(&run.admin_socket());
    run.configure("[policy.body]\nmodel = ['fake']");
    let refused = send_request(&admin, Method::POST, "/reload", &Value::Null).await;
    assert_eq!(refused.status, 422);
    assert!(refused.text().contains("unknown field `model`"), "{}", refused.text());
    run.configure("[policy.body]\nmodels = ['other']");
    assert_eq!(send_request(&admin, Method::POST, "/reload", &Value::Null).await.status, 200);
    let status = send_request(&admin, Method::GET, "/runs/run-1", &Value::Null).await.json();
    assert_eq!(status["models"], json!(["other"]));
}

/// G13: The `admin` command does the same on machines without curl.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_prints_the_sockets_answers() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    let _gateway = run.start();
    let socket = run.admin_socket();
    let admin = |arguments: &[&str]| {
        let all = [&["admin", "--json", "--socket", socket.to_str().unwrap()], arguments].concat();
        let (code, said, complaint) = run_cogni(&all, &[]);
        (code, serde_json::from_str::<Value>(&said).unwrap_or_default(), complaint)
    };
    assert_eq!(admin(&["runs"]).1["runs"][0]["run_id"], "run-1");
    assert_eq!(admin(&["pause", "run-1"]).1["state"], "paused");
    assert_eq!(admin(&["resume", "run-1"]).1["state"], "open");
    assert_eq!(admin(&["models", "run-1", "a,b"]).1["models"], json!(["a", "b"]));
    let limits = admin(&["budget", "run-1", "max_turns=5", "max_cost_usd=2.50", "deadline=1h"]).1;
    let limits = &limits["budget"]["limits"];
    assert_eq!((&limits["max_turns"], &limits["max_cost_usd"]), (&json!(5), &json!("2.5")));
    assert_eq!(
        admin(&["budget", "run-1", "max_turns="]).1["budget"]["limits"]["max_turns"],
        Value::Null
    );
    let complaints: Vec<_> = [
        vec!["show", "run-2"],
        vec!["budget", "run-1", "max_turns"],
        vec!["budget", "run-1", "max_turns=many"],
        vec!["open", r#"{"run_id":"run-2","account":"acct-1"}"#],
        vec!["close", "run-1"],
    ]
    .into_iter()
    .map(|arguments| {
        let (code, _, complaint) = admin(&arguments);
        format!("{code} {complaint}")
    })
    .collect();
    insta::assert_snapshot!(complaints.concat(), @r#"
    2 error: run `run-2` is not open; `cogni-gateway admin runs` (`GET /runs`) lists those that are
    2 error: `max_turns` is not a limit; give name=value, as in max_turns=50
    2 error: `max_turns` is "many"; give a whole number
    2 error: this process serves one run, on its own socket; the run begins and ends with it
    2 error: this process serves one run, on its own socket; the run begins and ends with it
    "#);
}

/// G13: Another program on the socket may refuse in a form of its own. The command reports the status, and not the form.
#[test]
fn a_refusal_in_another_form_has_its_status() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("admin.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let answers = ["502 Bad Gateway", "503 X", "200 OK"].map(|status| {
        format!("HTTP/1.1 {status}\r\ncontent-type: text/html\r\n\r\n<html>{status}</html>")
    });
    let server = std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let _read = stream.read(&mut asked).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let path = socket.to_str().unwrap();
    let told = (0..3).map(|_| run_cogni(&["admin", "--socket", path, "runs"], &[]));
    let told: Vec<_> = told.map(|(code, _, said)| format!("{code} {said}")).collect();
    server.join().unwrap();
    assert!(told[2].contains("sent an answer that is not JSON"), "{}", told[2]);
    insta::assert_snapshot!(told[..2].concat().replace(path, "SOCKET"), @"
    2 error: `SOCKET` answered with status 502 and without a reason; see the log of the process, or correct `--socket`
    2 error: `SOCKET` answered with status 503 and without a reason; see the log of the process, or correct `--socket`
    ");
}

/// The sandbox sees the directory of its own socket, so the admin socket must not be in it.
#[test]
fn the_operators_socket_stays_out_of_the_sandbox() {
    let (code, _, said) = run_cogni(
        &["proxy"],
        &[
            ("RUN_ID", "run-1"),
            ("BILLING_ACCOUNT_ID", "acct-1"),
            ("LITELLM_MASTER_KEY", "sk"),
            ("ADMIN_SOCKET_PATH", "/llm-sock/admin.sock"),
        ],
    );
    assert_eq!(code, 2);
    insta::assert_snapshot!(said, @"error: `ADMIN_SOCKET_PATH` is `/llm-sock/admin.sock`, in the directory of the run's socket, which the sandbox sees; give it a directory of its own");
}

/// `run` starts and ends its own run, so it refuses a configuration with an admin socket.
#[test]
fn the_run_command_refuses_an_admin_socket() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "[admin]\nsocket_path = '/run/a.sock'\n").unwrap();
    let config = file.path().to_str().unwrap();
    let (code, _, said) =
        run_cogni(&["run", "--config", config, "--", "true"], &[("LITELLM_MASTER_KEY", "sk")]);
    assert_eq!(code, 2);
    insta::assert_snapshot!(said, @"error: `[admin]` is for `cogni-gateway proxy` and `cogni-gateway shared`; take it out: a signal ends this run");
}

async fn send_request(
    admin: &TestClient,
    method: Method,
    path: &str,
    body: &Value,
) -> TestResponse {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    admin.ask(method, path, &body, &[]).await
}
