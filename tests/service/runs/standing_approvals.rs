//! T9, T4: Tests of standing approvals in a real service: from a denial to a grant over the command line, what other grants
//! see, and what a killed process leaves.

use std::fs;

use cogni_gateway::telemetry::audit::verify;
use http::Method;
use serde_json::{Value, json};

use super::ServiceSetup;
use super::approvals::{assert_hidden, caller_body, configure_caller, text, wait_for_questions};
use crate::support::raw_upstream;
use crate::support::service::{MintedGrant, ServiceProcess};

const CALL: &str = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2; true";

/// A rule that denies every call, and the setting that lets people allow some.
const PROPOSING: &str = "when = \"run.id == 'none'\"\n[tools.approvals]\non_denial = 'propose'\n";

async fn proposing_setup() -> ServiceSetup {
    let setup = ServiceSetup::new("").await;
    configure_caller(&setup, CALL, PROPOSING);
    setup
}

/// Runs the agent to its end, and returns the run and what its client of the tools has printed.
async fn run_agent(grant: &MintedGrant) -> (String, String) {
    let run = grant.run(&caller_body()).await;
    grant.ended(&run).await;
    let printed = grant.get(&format!("/api/v1/runs/{run}/output")).await.json();
    (run, text(&printed["stderr"]).to_owned())
}

/// Returns the open proposals.
async fn proposals(grant: &MintedGrant) -> Vec<Value> {
    let listed = grant.get("/api/v1/standing-approvals?state=proposed").await.json();
    listed["standing_approvals"].as_array().unwrap().clone()
}

async fn post(grant: &MintedGrant, path: &str, body: &Value) -> (u16, Value) {
    let answered = grant.post(path, body).await;
    let json = answered.json();
    let told = if json["error"].is_object() { &json["error"]["code"] } else { &json["state"] };
    (answered.status.as_u16(), told.clone())
}

fn kill_and_restart(setup: &ServiceSetup, mut service: ServiceProcess) -> ServiceProcess {
    service.process.signal("KILL");
    service.process.wait();
    setup.start()
}

/// The whole way: a denied call, its proposal, a grant over the command line that a restart survives, the call in the next
/// run, and a denial with a new proposal.
#[tokio::test(flavor = "multi_thread")]
async fn a_denied_call_is_granted_over_the_command_line() {
    let setup = proposing_setup().await;
    let service = setup.start();
    let starter = setup.mint(&[
        "--access",
        "read,runs,approve",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "acct-1",
    ]);
    let approver = setup.mint(&["--access", "approve"]);
    // 1. The agent is refused, and told of the proposal.
    let (run, printed) = run_agent(&starter).await;
    let found = proposals(&approver).await;
    let (id, digest) = (text(&found[0]["id"]).to_owned(), text(&found[0]["digest"]).to_owned());
    assert!(printed.contains("policy_denied") && printed.contains(&id), "{printed}");
    assert_eq!((&found[0]["arguments"], &found[0]["run"]), (&Value::Null, &json!(run)));
    // 2. A person reads it and grants it, after a restart.
    let service = kill_and_restart(&setup, service);
    let (socket, file) = (setup.path().join("api.sock"), setup.path().join("token"));
    fs::write(&file, &approver.token).unwrap();
    let at = format!("unix:{}", socket.display());
    let flags = ["--service", &at, "--token-file", file.to_str().unwrap()];
    let cogni = |command: &[&str]| {
        let arguments = [&["approvals"], command, &flags].concat();
        tokio::task::block_in_place(|| setup.cogni(&arguments))
    };
    assert!(cogni(&["proposals"]).contains(&id));
    let shown = cogni(&["show", &id]);
    assert!(shown.contains(&digest) && shown.contains("arguments    {}"), "{shown}");
    assert!(shown.contains("rules        [\"ask-clock\"]"), "{shown}");
    let granted = cogni(&["grant", &id, "--digest", &digest, "--uses", "1", "--for", "1h"]);
    assert!(granted.starts_with(&format!("standing approval {id} is granted: 1 call until 2")));
    // 3. The same call of the next run begins, once; a further run is denied with another proposal.
    let (second, printed) = run_agent(&starter).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    let (third, printed) = run_agent(&starter).await;
    let next = proposals(&approver).await;
    assert_eq!(next.len(), 1);
    assert!(next[0]["id"] != id && printed.contains(text(&next[0]["id"])), "{printed}");
    assert!(cogni(&["proposals", "--all"]).contains("spent"));
    let revoked = cogni(&["revoke", text(&next[0]["id"])]);
    assert_eq!(revoked, format!("standing approval {} is revoked\n", text(&next[0]["id"])));
    assert!(cogni(&["proposals"]).contains("no proposal"));
    // 4. Watchers and records know each step.
    for (run, state) in [(&run, "proposed"), (&second, "spent")] {
        let events = starter.events(run).await;
        let told: Vec<_> = events
            .iter()
            .filter(|event| event.kind == "standing_approval")
            .map(|event| (text(&event.data["state"]), text(&event.data["id"])))
            .collect();
        assert_eq!(told, [(state, &*id)]);
    }
    for (run, expected) in [
        (&run, ["approval.proposed", "tool.refused"]),
        (&second, ["approval.used", "tool.admitted"]),
        (&third, ["approval.proposed", "tool.refused"]),
    ] {
        let log = setup.audit_log(run);
        verify::verify_file(&log, None).unwrap();
        let log = fs::read_to_string(log).unwrap();
        let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps: Vec<_> = records
            .map(|record| text(&record["event"]).to_owned())
            .filter(|event| expected.contains(&event.as_str()))
            .collect();
        assert_eq!(steps, expected);
    }
    setup.stop(service);
}

/// A standing approval is for one agent of the catalog, which the person reads, although another agent has the same name in the
/// records of its calls.
#[tokio::test(flavor = "multi_thread")]
async fn an_approval_counts_for_its_own_agent() {
    let setup = proposing_setup().await;
    let agents = setup.path().join("agents");
    let caller = fs::read_to_string(agents.join("caller.toml")).unwrap();
    let share = "version = 'a'\ngraph_id = 'team:caller'\n";
    let caller = caller.replace("version = 'a'\n", share);
    fs::write(agents.join("caller.toml"), &caller).unwrap();
    fs::write(agents.join("other.toml"), caller.replace("'caller'", "'other'")).unwrap();
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    run_agent(&service).await;
    let found = proposals(&approver).await;
    assert_eq!(found[0]["agent"], "caller");
    let path = format!("/api/v1/standing-approvals/{}/grant", text(&found[0]["id"]));
    let body = json!({"digest": found[0]["digest"], "max_uses": 9, "valid_for": "1h"});
    assert_eq!(post(&approver, &path, &body).await, (200, json!("granted")));
    let mut other = caller_body();
    other["agent"] = json!("other");
    let run = service.run(&other).await;
    service.ended(&run).await;
    let output = service.get(&format!("/api/v1/runs/{run}/output")).await.json();
    assert!(text(&output["stderr"]).contains("policy_denied"), "{output}");
    assert_eq!(proposals(&approver).await[0]["agent"], "other");
    let (_, printed) = run_agent(&service).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    setup.stop(service);
}

/// Only another grant with the access may grant, only by POST, only with the digest and within the bounds; a tenant sees
/// what is about its own runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_proposal_is_granted_by_another_grant_only() {
    let setup = proposing_setup().await;
    let service = setup.start();
    let tenant = |account: &str| {
        setup.mint(&[
            "--access",
            "read,runs,approve",
            "--allow-sandbox",
            "--agent",
            "*",
            "--account",
            account,
        ])
    };
    let (starter, approver) = (tenant("acct-1"), setup.mint(&["--access", "approve"]));
    let stranger = setup.mint(&["--access", "read"]);
    let (run, _) = run_agent(&starter).await;
    let found = proposals(&approver).await;
    let path = format!("/api/v1/standing-approvals/{}", text(&found[0]["id"]));
    let (grant, revoke) = (format!("{path}/grant"), format!("{path}/revoke"));
    let digest = &found[0]["digest"];
    let body = json!({"digest": digest, "max_uses": 1, "valid_for": "1h"});
    assert_eq!(post(&starter, &grant, &body).await, (403, json!("forbidden_own_run")));
    assert_eq!(post(&service, &grant, &body).await, (403, json!("forbidden")));
    assert_eq!(post(&stranger, &grant, &body).await, (403, json!("forbidden")));
    assert_eq!(post(&service, &revoke, &json!({})).await, (403, json!("forbidden")));
    assert_eq!(stranger.get(&path).await.status, 404);
    assert_eq!(stranger.get("/api/v1/standing-approvals").await.status, 403);
    assert_hidden(&setup, &path, "/api/v1/standing-approvals/sta-none").await;
    let of_run = format!("/api/v1/standing-approvals?run={run}");
    assert_eq!(stranger.get(&of_run).await.status, 404);
    assert_eq!(starter.get(&of_run).await.json()["standing_approvals"], json!(found));
    assert_eq!(approver.ask(Method::GET, &grant, "", &[]).await.status, 405);
    for (wrong, code) in [
        (json!({"digest": "other", "max_uses": 1, "valid_for": "1h"}), (409, "digest_mismatch")),
        (json!({"digest": digest, "valid_for": "1h"}), (422, "invalid_request")),
        (json!({"digest": digest, "max_uses": 1001, "valid_for": "1h"}), (422, "invalid_request")),
        (json!({"digest": digest, "max_uses": 1}), (422, "invalid_request")),
        (json!({"digest": digest, "max_uses": 1, "valid_for": "8days"}), (422, "invalid_request")),
        (
            json!({"digest": digest, "max_uses": 1, "not_after": "2020-01-01T00:00:00Z"}),
            (422, "invalid_request"),
        ),
        (
            json!({"digest": digest, "max_uses": 1, "scope": "once", "valid_for": "1h"}),
            (422, "invalid_request"),
        ),
        (json!({"digest": digest, "scope": "run"}), (409, "approval_closed")),
    ] {
        assert_eq!(post(&approver, &grant, &wrong).await, (code.0, json!(code.1)), "{wrong}");
    }
    // Another account's run is not allowed by the grant.
    assert_eq!(post(&approver, &grant, &body).await, (200, json!("granted")));
    assert_eq!(post(&approver, &grant, &body).await, (409, json!("approval_closed")));
    let (_, printed) = run_agent(&tenant("acct-2")).await;
    assert!(printed.contains("policy_denied"), "{printed}");
    assert_eq!(post(&approver, &revoke, &json!({})).await, (200, json!("revoked")));
    assert_eq!(post(&approver, &revoke, &json!({})).await, (409, json!("approval_closed")));
    let (_, printed) = run_agent(&starter).await;
    assert!(printed.contains("policy_denied"), "{printed}");
    setup.stop(service);
}

/// An answer for all runs counts in the next run; one whose scope is not allowed is refused with a reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_scope_that_is_not_allowed_is_refused() {
    let setup = ServiceSetup::new("").await;
    let rule = "approve = 'ask'\n[tools.approvals]\nhold = '5m'\nscopes = ['once', 'always']\n";
    configure_caller(&setup, CALL, rule);
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&caller_body()).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    let path = format!("/api/v1/approvals/{}/decision", text(&asked[0]["id"]));
    assert_eq!(asked[0]["scopes"], json!(["once", "always"]));
    let decide = |more: Value| {
        let mut body = json!({"decision": "approve", "digest": asked[0]["digest"]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let refused = approver.post(&path, &decide(json!({"scope": "run"}))).await;
    assert_eq!(refused.status, 422);
    insta::assert_snapshot!(
        text(&refused.json()["error"]["message"]),
        @"`scope` is invalid: `run` is not allowed; `tools.approvals.scopes` allows `once`, `always`"
    );
    for wrong in [
        json!({"scope": "always"}),
        json!({"scope": "always", "max_uses": 2}),
        json!({"scope": "always", "max_uses": 2, "valid_for": "1h", "not_after": "2030-01-01T00:00:00Z"}),
        json!({"max_uses": 2}),
        json!({"decision": "deny", "scope": "always", "max_uses": 2, "valid_for": "1h"}),
    ] {
        let answered = post(&approver, &path, &decide(wrong.clone())).await;
        assert_eq!(answered, (422, json!("invalid_request")), "{wrong}");
    }
    let wide = decide(json!({"scope": "always", "max_uses": 1, "valid_for": "1h"}));
    assert_eq!(post(&approver, &path, &wide).await, (200, json!("approved")));
    service.ended(&run).await;
    let (_, printed) = run_agent(&service).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    // The one later call is used up, so the next run asks.
    let run = service.run(&caller_body()).await;
    wait_for_questions(&approver, |found| found.len() == 2).await;
    service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    service.ended(&run).await;
    setup.stop(service);
}

/// T9: The operator revokes the grant of an approver on the command line: what it has allowed for later calls ends at once, and
/// the next run asks again.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_grant_takes_its_standing_approvals_with_it() {
    let setup = ServiceSetup::new("").await;
    let rule = "approve = 'ask'\n[tools.approvals]\nhold = '5m'\nscopes = ['once', 'always']\n";
    configure_caller(&setup, CALL, rule);
    let service = setup.start();
    let (giver, other) =
        (setup.mint(&["--access", "approve"]), setup.mint(&["--access", "approve"]));
    let run = service.run(&caller_body()).await;
    let asked = wait_for_questions(&giver, |found| found.len() == 1).await;
    let path = format!("/api/v1/approvals/{}/decision", text(&asked[0]["id"]));
    let body = json!({"decision": "approve", "digest": asked[0]["digest"], "scope": "always", "max_uses": 9, "valid_for": "1h"});
    assert_eq!(post(&giver, &path, &body).await, (200, json!("approved")));
    service.ended(&run).await;
    let (_, printed) = run_agent(&service).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    tokio::task::block_in_place(|| setup.cogni(&["grant", "revoke", &giver.id]));
    let listed = other.get("/api/v1/standing-approvals").await.json();
    let ended = &listed["standing_approvals"][0];
    assert_eq!(
        [&ended["state"], &ended["used"], &ended["by"], &ended["revoked_by"]],
        [&json!("revoked"), &json!(1), &json!(giver.id), &Value::Null]
    );
    let run = service.run(&caller_body()).await;
    wait_for_questions(&other, |found| found.len() == 2).await;
    service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    service.ended(&run).await;
    setup.stop(service);
}

/// The service is killed after a use was counted and while the tool runs. The next process counts no second use, and the
/// tool was asked once.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_service_uses_no_approval_twice() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\ntools = ['core__metrics_query']\nsetup = 'messages'\n\
         argv = ['sh', '-c', '''/run/cogni-tool exec core__metrics_query \"{\\\"query\\\": \\\"up\\\"}\" --wait 5m >&2; true''']\n";
    fs::write(agents.join("caller.toml"), entry).unwrap();
    setup.write_config(&format!(
        "agents_dir = \"{}\"\n[tools]\ngranted = ['core__metrics_query']\nmetrics = {{ url = 'http://{address}' }}\n\
         [[tools.rules]]\nname = 'closed'\ntool = 'core__metrics_query'\nwhen = \"args.query == 'down'\"\n\
         [tools.approvals]\non_denial = 'propose'\n",
        agents.display()
    ));
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    run_agent(&service).await;
    let found = proposals(&approver).await;
    let path = format!("/api/v1/standing-approvals/{}", text(&found[0]["id"]));
    let body = json!({"digest": found[0]["digest"], "max_uses": 1, "valid_for": "1h"});
    assert_eq!(post(&approver, &format!("{path}/grant"), &body).await, (200, json!("granted")));
    let run = service.run(&caller_body()).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    raw_upstream::read_request(&mut stream).await;
    let service = kill_and_restart(&setup, service);
    drop(stream);
    assert_eq!(service.ended(&run).await["error_code"], "interrupted");
    let used = approver.get(&path).await.json();
    assert_eq!([&used["state"], &used["used"]], [&json!("spent"), &json!(1)]);
    let (_, printed) = run_agent(&service).await;
    assert!(printed.contains("policy_denied"), "{printed}");
    let again = tokio::time::timeout(std::time::Duration::from_millis(100), listener.accept());
    assert!(again.await.is_err(), "the tool was asked twice");
    setup.stop(service);
}
