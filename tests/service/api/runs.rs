//! A4: Tests of runs: they are started once, listed, watched, ended, and visible to their grant.

use std::fs;

use cogni_gateway::runner::agents;
use http::Method;
use serde_json::{Value, json};

use super::run_body;
use crate::support::service::{MintedGrant, ServiceSetup};

/// A4: A repeated request with the same key returns the same run; a different request with that key is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_begun_once_for_each_key() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let key = [("idempotency-key", "job-7")];
    let ask = async |grant: &MintedGrant, model: &str| {
        grant.ask(Method::POST, "/api/v1/runs", &run_body(model).to_string(), &key).await
    };
    let first = ask(&grant, "fake").await;
    assert_eq!(first.status, 201, "{}", first.text());
    let id = first.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(first.header("location"), Some(&*format!("/api/v1/runs/{id}")));
    let again = ask(&grant, "fake").await;
    assert_eq!((again.status.as_u16(), &again.json()["id"]), (200, &json!(id)));
    let changed = ask(&grant, "fake/text=other").await;
    let code = &changed.json()["error"]["code"];
    assert_eq!((changed.status.as_u16(), code), (409, &json!("idempotency_conflict")));
    let of_other = ask(&other, "fake").await;
    assert_eq!(of_other.status, 201, "keys are a grant's own");
    other.ended(of_other.json()["id"].as_str().unwrap()).await;
    let row = grant.ended(&id).await;
    assert_eq!((&row["error_code"], &row["result"]["ok"]), (&Value::Null, &json!(true)));
    setup.stop(service);
}

/// A1: The agent's entry limits the time of a run, whatever the request asks for.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_as_long_as_its_agent_allows() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    // The agent would continue by itself, so its end must come from the limit.
    let entry = entry.replace("${TIMEOUT}", "600");
    let entry = entry.replace("max_runtime = \"10m\"", "max_runtime = \"1s\"");
    fs::write(agents.join("sandbox-agent.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = {agents:?}"));
    let service = setup.start();
    let mut asked = run_body("fake/gate=1");
    asked["max_runtime"] = "200000000000000d".into();
    let run = service.run(&asked).await;
    assert_eq!(service.ended(&run).await["error_code"], "timeout");
    setup.stop(service);
}

/// A1: An agent's own timeout ends before the limit of its entry, also if the client asks for more time.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_gets_a_timeout_within_the_limit_of_its_entry() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let answer = r#"{"payloads":[{"text":"${TIMEOUT}"}],"meta":{}}"#;
    let entry = format!(
        "name = 'clock'\ndescription = 'tells its time'\nversion = 1\nsetup = 'messages'\n\
         argv = ['echo', '{answer}']\n[limits]\nmax_runtime = '1m'\n"
    );
    fs::write(agents.join("clock.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = {agents:?}"));
    let service = setup.start();
    let mut asked = run_body("fake");
    asked["agent"] = "clock".into();
    for (max_runtime, expected) in [("1h", "30"), ("40s", "20")] {
        asked["max_runtime"] = max_runtime.into();
        let run = service.run(&asked).await;
        let row = service.ended(&run).await;
        assert_eq!(row["result"]["agent"]["payloads"][0]["text"], expected, "{row}");
    }
    setup.stop(service);
}

/// A3: A grant sees and ends only its own runs; an admin's grant sees all.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_visible_only_to_its_grant() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let admin = setup.mint(&["--access", "read,admin"]);
    let run = grant.run(&run_body("fake/gate=1")).await;
    let below = ["", "/events", "/output", "/audit", "/relay", "/artifacts", "/artifacts/bundle"];
    for path in below {
        let path = format!("/api/v1/runs/{run}{path}");
        assert_eq!(other.get(&path).await.status, 404, "{path}");
    }
    let cancel = format!("/api/v1/runs/{run}/cancel");
    assert_eq!(other.ask(Method::POST, &cancel, "", &[]).await.status, 404);
    assert_eq!(other.get("/api/v1/runs").await.json()["runs"], json!([]));
    assert_eq!(admin.get("/api/v1/runs").await.json()["runs"][0]["id"], json!(run));
    assert_eq!(admin.ask(Method::POST, &cancel, "", &[]).await.status, 202);
    let row = grant.ended(&run).await;
    assert_eq!(row["error_code"], "cancelled");
    let again = grant.ask(Method::POST, &cancel, "", &[]).await;
    assert_eq!((again.status.as_u16(), &again.json()["state"]), (200, &json!("ended")));
    setup.stop(service);
}

/// A4: No run is missing or repeated across pages.
#[tokio::test(flavor = "multi_thread")]
async fn runs_are_listed_in_pages() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let mut begun = vec![];
    for _ in 0..5 {
        begun.push(grant.run(&run_body("fake")).await);
    }
    for run in &begun {
        grant.ended(run).await;
    }
    let (mut listed, mut path) = (vec![], "/api/v1/runs?limit=2&state=ended".to_owned());
    loop {
        let page = grant.get(&path).await.json();
        let runs = page["runs"].as_array().unwrap();
        listed.extend(runs.iter().map(|run| run["id"].as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        assert_eq!(runs.len(), 2);
        path = format!("/api/v1/runs?limit=2&state=ended&cursor={next}");
    }
    listed.reverse();
    assert_eq!(listed, begun);
    let none = grant.get("/api/v1/runs?agent=sandbox:openclaw").await.json();
    assert_eq!(none, json!({"runs": [], "next": null}));
    setup.stop(service);
}

/// A4: After a run, its output can be read, and its log proves itself or names the changed record.
#[tokio::test(flavor = "multi_thread")]
async fn the_output_and_log_of_a_run_can_be_read_and_proved() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let run = grant.run(&run_body("fake/text=ready")).await;
    grant.ended(&run).await;
    let below = async |path: &str| grant.get(&format!("/api/v1/runs/{run}/{path}")).await;
    let output = below("output").await.json();
    assert_eq!(output["complete"], true);
    assert!(output["stdout"].as_str().unwrap().contains("ready"), "{output}");
    let audit = below("audit").await.json();
    let facts = (&audit["verified"], &audit["finished"], &audit["admitted"]);
    assert_eq!(facts, (&json!(true), &json!(true), &json!(1)));
    let raw = below("audit?raw=1").await;
    assert_eq!(raw.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(raw.text().lines().count() as u64, audit["records"].as_u64().unwrap());
    assert_eq!(below("relay").await.json(), json!({"deliveries": []}));
    assert_eq!(below("artifacts").await.json(), json!({"artifacts": []}));
    assert_eq!(below("artifacts/bundle").await.status, 404);

    let log = setup.audit_log(&run);
    let changed = fs::read_to_string(&log).unwrap().replacen("acct-1", "acct-2", 1);
    fs::write(&log, changed).unwrap();
    let audit = below("audit").await.json();
    assert_eq!(audit["verified"], false);
    insta::assert_snapshot!(audit["broken"].as_str().unwrap(), @"record 1 (line 1, byte 0): the content does not match its hash");
    setup.stop(service);
}

/// A1: Agents are listed for grants that may run them; an agent that cannot run here is listed with the reason.
#[tokio::test(flavor = "multi_thread")]
async fn agents_are_listed_for_grants_that_may_run_them() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, reader) = (setup.grant(&[]), setup.mint(&["--access", "read"]));
    let ids = |listed: Value| {
        let agents = listed["agents"].as_array().unwrap().clone();
        agents.iter().map(|agent| agent["agentId"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(grant.get("/api/v1/ai/agents").await.json()), ["sandbox:agent"]);
    assert!(ids(reader.get("/api/v1/ai/agents").await.json()).is_empty());
    let all = grant.get("/api/v1/ai/agents?all=1").await.json();
    assert_eq!(all["agents"][1]["available"], false);
    insta::assert_snapshot!(all["agents"][1]["reason"].as_str().unwrap(), @"it needs the image `cogni-openclaw:dev`, and the driver `embedded` knows no images");
    // The listed availability agrees with the result of a run, in both directions.
    let mut body = run_body("fake");
    body["agent"] = "sandbox:openclaw".into();
    let refused = grant.post("/api/v1/runs", &body).await;
    assert_eq!(refused.status, 422, "{}", refused.text());
    setup.stop(service);
}

/// A3: Only `admin` sees runs of all grants, and a page must continue from a run that its reader can see.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_continues_from_a_run_of_its_reader() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let admin = setup.mint(&["--access", "admin"]);
    let run = grant.run(&run_body("fake")).await;
    grant.ended(&run).await;
    for path in ["/api/v1/runs".to_owned(), format!("/api/v1/runs/{run}/receipts")] {
        assert_eq!(admin.get(&path).await.status, 200, "{path}");
    }
    let after = |cursor: &str| format!("/api/v1/runs?cursor={cursor}");
    assert_eq!(grant.get(&after(&run)).await.status, 200);
    assert_eq!(other.get(&after(&run)).await.status, 400);
    let refused = grant.get(&after("nonsense")).await;
    assert_eq!(refused.status, 400);
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"invalid_parameter","message":"`cursor` is invalid: give the value of `next` of the page before"}}"#);
    let nameless =
        json!({"agent": "sandbox:agent", "messages": [{"role": "user", "content": "hello"}]});
    let refused = grant.post("/api/v1/runs", &nameless).await;
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"invalid_request","message":"no model is named, and `sandbox:agent` has none of its own; name one as `model`"}}"#);
    setup.stop(service);
}

/// L1: A repository without a branch key gives no branch, and the run says so. A request for more than that is refused.
#[tokio::test(flavor = "multi_thread")]
async fn work_without_a_branch_is_reported_or_refused() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let with = |more: Value| {
        let mut body = run_body("fake");
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let repo = "https://github.com/acme/site";
    for more in [
        json!({"pull_request": true}),
        json!({"pull_request": true, "repo": repo}),
        json!({"pull_request": true, "branch_key": "b"}),
        json!({"base": "main", "repo": repo}),
    ] {
        let refused = service.post("/api/v1/runs", &with(more.clone())).await;
        assert_eq!(refused.status, 422, "{more}: {}", refused.text());
    }
    let refused = service.post("/api/v1/runs", &with(json!({"base": "main"}))).await;
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"invalid_request","message":"`base` needs a branch; give `repo`, and `branch_key` or `work_item`"}}"#);
    let run = service.run(&with(json!({ "repo": repo }))).await;
    let ended = service.ended(&run).await;
    let came = (&ended["error_code"], &ended["result"]["relay"]);
    assert_eq!(came, (&Value::Null, &json!({"skipped": "no_branch_key"})));
    let run = service.run(&run_body("fake")).await;
    assert_eq!(service.ended(&run).await["result"]["relay"], Value::Null);
    setup.stop(service);
}

/// A3: A grant for some agents does not learn the names of others.
#[tokio::test(flavor = "multi_thread")]
async fn agents_of_other_grants_are_not_named() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    // The grant may name an agent that the service does not have yet.
    let known = setup.path().join("agents");
    fs::create_dir(&known).unwrap();
    for name in ["agent", "openclaw", "open"] {
        let file = if name == "open" { "agent" } else { name };
        let text = fs::read_to_string(format!("config/agents/sandbox-{file}.toml")).unwrap();
        let text = text.replace("\"sandbox:agent\"", &format!("\"sandbox:{name}\""));
        fs::write(known.join(format!("sandbox-{name}.toml")), text).unwrap();
    }
    let known = known.to_str().unwrap();
    let ask = async |agents: &str| {
        let terms = ["--allow-sandbox", "--agent", agents, "--account", "a"];
        let grant = setup.mint(&[&terms[..], &["--agents-dir", known]].concat());
        let mut body = run_body("fake");
        body["agent"] = "sandbox:open".into();
        grant.post("/api/v1/runs", &body).await.json()["error"]["message"].clone()
    };
    assert_eq!(ask("sandbox:open").await, "there is no agent `sandbox:open`");
    assert_eq!(
        ask("sandbox:open*").await,
        "there is no agent `sandbox:open`; there is `sandbox:openclaw`"
    );
    setup.stop(service);
}
