//! A3: Tests of tenants: what a tenant cannot claim about itself, and cannot do to others.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use super::{chat_body, run_body};
use crate::support::process::wait_until;
use crate::support::service::{ServiceSetup, parse_events};

/// The operator's rules see the agent's name from the catalog; the caller cannot name another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_cannot_pose_as_another_agent() {
    let setup = ServiceSetup::new("").await;
    setup.write_config(
        "[[policy.rules]]\nname = 'large'\nwhen = 'agent.name != \"architect\"'\nrefuse = 'no'\n\
         match = [{}]\nnot_match = [{ agent = { name = 'architect' } }]",
    );
    let service = setup.start();
    for key in ["graph_id", "GRAPH_ID", "run_id", "attempt", "cogni_deployment_id"] {
        let mut body = run_body("fake");
        body["metadata"] = json!({"team": "ads", key: "architect"});
        let answer = service.post("/api/v1/runs", &body).await;
        assert_eq!(answer.status, 422, "{key}: {}", answer.text());
        let error = &answer.json()["error"];
        let message = format!("`metadata.{key}` is reserved: the service sets it; leave it out");
        assert_eq!(*error, json!({"code": "invalid_request", "message": message}));
    }
    let row = service.ended(&service.run(&run_body("fake")).await).await;
    assert_ne!(row["error_code"], Value::Null, "the rule holds: {row}");
    assert_eq!(setup.provider.seen.requests().len(), 0);
    setup.stop(service);
}

/// A trace is continued from `traceparent`, and billing uses the catalog's agent name.
#[tokio::test(flavor = "multi_thread")]
async fn billing_names_the_agent_that_runs() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let mut body = run_body("fake");
    body["metadata"] = json!({"existing_trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"});
    let answer = service.post("/api/v1/runs", &body).await;
    assert_eq!(answer.status, 422, "{}", answer.text());
    assert!(answer.text().contains("`traceparent`"), "{}", answer.text());
    body["metadata"] = json!({"team": "ads"});
    let run = service.run(&body).await;
    service.ended(&run).await;
    let request = &setup.provider.seen.requests()[0];
    let metadata = request.header("x-litellm-spend-logs-metadata").unwrap();
    let metadata: Value = serde_json::from_str(metadata).unwrap();
    let identity = [&metadata["graph_id"], &metadata["team"], &metadata["run_id"]];
    assert_eq!(identity, [&json!("sandbox:agent"), &json!("ads"), &json!(run)]);
    setup.stop(service);
}

/// A tenant that may use any git host cannot reach a host in a private network, whatever its name. The allowed reach of
/// a host is stored with the run until git connects.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_repository_is_on_the_internet() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (wide, named) =
        (setup.grant(&["--repo", "*"]), setup.grant(&["--repo", "https://nowhere.invalid/*"]));
    let at = |host: &str| {
        let mut body = run_body("fake");
        body["repo"] = json!(format!("https://{host}/acme/site"));
        body["branch_key"] = json!("task-1");
        body
    };
    for (host, status, code) in [
        ("127.1", 422, "invalid_request"),
        ("0x7f000001", 422, "invalid_request"),
        ("127.0.0.1", 403, "forbidden_repo"),
        ("0.0.0.0", 403, "forbidden_repo"),
        ("[::ffff:127.0.0.1]", 403, "forbidden_repo"),
        ("localhost.", 403, "forbidden_repo"),
        ("169.254.169.254", 403, "forbidden_repo"),
        ("10.0.0.1", 403, "forbidden_repo"),
    ] {
        let answer = wide.post("/api/v1/runs", &at(host)).await;
        let error_code = answer.json()["error"]["code"].clone();
        assert_eq!((answer.status.as_u16(), error_code), (status, json!(code)), "{host}");
    }
    for (grant, expected) in
        [(&wide, "no address on the internet"), (&named, "cannot be looked up")]
    {
        let answer = grant.post("/api/v1/runs", &at("nowhere.invalid")).await;
        assert_eq!(answer.status, 201, "{}", answer.text());
        let row = grant.ended(answer.json()["id"].as_str().unwrap()).await;
        assert_eq!(row["error_code"], "branch_unavailable", "{row}");
        assert!(row.to_string().contains(expected), "{row}");
    }
    setup.stop(service);
}

/// A4: A grant whose stored work is over its limit gets no further run with a branch, and the error says so; its other
/// runs continue.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_keeps_too_much_gets_no_further_branch() {
    let mut setup = ServiceSetup::new("").await;
    let rules = setup.path().join("relay.toml");
    fs::write(&rules, "[kept]\ngrant_works = 0\n").unwrap();
    setup.set("COGNI_RELAY_CONFIG", rules.to_str().unwrap());
    let service = setup.start();
    let grant = setup.grant(&["--repo", "https://github.com/acme/*"]);
    let mut body = run_body("fake");
    body["repo"] = json!("https://github.com/acme/site");
    let without_branch = grant.post("/api/v1/runs", &body).await;
    assert_eq!(without_branch.status, 201, "{}", without_branch.text());
    body["branch_key"] = json!("task-1");
    let refused = grant.post("/api/v1/runs", &body).await;
    assert_eq!(refused.status, 409, "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "workspaces_full");
    assert!(error["message"].as_str().unwrap().contains("this grant keeps 0 works"), "{error}");
    grant.ended(without_branch.json()["id"].as_str().unwrap()).await;
    setup.stop(service);
}

/// The event streams of a revoked grant end at the next event. Its runs end if the revocation says so, and its chats in
/// any case.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_grant_loses_its_streams_and_its_runs() {
    let setup = ServiceSetup::new("gate=1").await;
    let service = setup.start();
    let (patient, gone) = (setup.grant(&[]), setup.grant(&[]));
    let (kept_run, ended_run) =
        (patient.run(&run_body("fake/gate=1")).await, gone.run(&run_body("fake/gate=1")).await);
    let (watcher, path) = (patient.clone(), format!("/api/v1/runs/{kept_run}/events"));
    let watcher = tokio::spawn(async move { watcher.get(&path).await });
    let talk = patient.clone();
    let talk =
        tokio::spawn(async move { talk.post("/api/v1/ai/chat", &chat_body("fake/gate=1")).await });
    let are_asking = || setup.provider.seen.requests().len() == 3;
    tokio::task::block_in_place(|| wait_until(are_asking, || "three runs do not ask".to_owned()));
    setup.cogni(&["grant", "revoke", &patient.id]);
    setup.cogni(&["grant", "revoke", "--cancel-runs", &gone.id]);
    assert_eq!(service.ended(&ended_run).await["error_code"], "cancelled");
    let row = service.get(&format!("/api/v1/runs/{kept_run}")).await.json();
    assert_eq!(row["state"], "running", "{row}");
    // The service caches a grant for half a second.
    tokio::time::sleep(Duration::from_millis(600)).await;
    // One for each answer that waits at the gate, including the cancelled run's.
    setup.provider.gate.allow_answers(3);
    assert_eq!(service.ended(&kept_run).await["error_code"], Value::Null);
    let stream = watcher.await.unwrap();
    assert!(
        parse_events(stream.text()).iter().all(|told| told.kind != "final"),
        "{}",
        stream.text()
    );
    let talked = talk.await.unwrap();
    let chat = talked.header("x-run-id").unwrap().to_owned();
    assert!(parse_events(talked.text()).iter().all(|told| told.kind != "final"));
    assert_eq!(service.ended(&chat).await["state"], "ended");
    setup.stop(service);
}
