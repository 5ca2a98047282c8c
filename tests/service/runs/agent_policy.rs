//! T4: Tests of the policies that people set for the tools of agents, in a real service: over the command line and the API,
//! beside questions and standing approvals, and between an answer and the beginning of its call.

use std::fs;

use http::Method;
use serde_json::{Value, json};

use super::ServiceSetup;
use super::approvals::{caller_body, configure_caller, text, wait_for_questions};
use crate::support::service::{MintedGrant, ServiceProcess};

/// Lists the tools and calls the clock.
const CALL: &str =
    "/run/cogni-tool list >&2; /run/cogni-tool exec core__get_current_time {} --wait 5m >&2; true";

const POLICY: &str = "/api/v1/ai/agents/caller/policy";

async fn policy_setup(rule: &str) -> (ServiceSetup, ServiceProcess, MintedGrant) {
    let setup = ServiceSetup::new("").await;
    configure_caller(&setup, CALL, rule);
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    (setup, service, approver)
}

async fn put(grant: &MintedGrant, body: &Value) -> (u16, Value) {
    let json = [("content-type", "application/json")];
    let answered = grant.ask(Method::PUT, POLICY, &body.to_string(), &json).await;
    (answered.status.as_u16(), answered.json())
}

/// Replaces the policy, whatever it was before.
async fn set(grant: &MintedGrant, security: &str, ask: &str, allowlist: &[&str]) {
    let base = grant.get(POLICY).await.json()["digest"].clone();
    let body = json!({"base": base, "security": security, "ask": ask, "allowlist": allowlist});
    let (status, answered) = put(grant, &body).await;
    assert_eq!(status, 200, "{answered}");
}

async fn start(grant: &MintedGrant) -> String {
    grant.run(&caller_body()).await
}

/// Waits for the run's end, and returns what its client of the tools has printed.
async fn end(grant: &MintedGrant, run: &str) -> String {
    grant.ended(run).await;
    let printed = grant.get(&format!("/api/v1/runs/{run}/output")).await.json();
    text(&printed["stderr"]).to_owned()
}

async fn decide(grant: &MintedGrant, question: &Value, decision: &str) -> u16 {
    let path = format!("/api/v1/approvals/{}/decision", text(&question["id"]));
    let body = json!({"decision": decision, "digest": question["digest"]});
    grant.post(&path, &body).await.status.as_u16()
}

/// The whole way over the command line: nothing is set, a policy denies, another one asks, a restart keeps it.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_set_over_the_command_line() {
    let (setup, service, approver) = policy_setup("price_usd = '0.01'").await;
    let (socket, file) = (setup.path().join("api.sock"), setup.path().join("token"));
    fs::write(&file, &approver.token).unwrap();
    let at = format!("unix:{}", socket.display());
    let flags = ["--service", &at, "--token-file", file.to_str().unwrap()];
    let cogni = |command: &[&str]| {
        let arguments = [&["approvals", "policy", "caller"], command, &flags].concat();
        tokio::task::block_in_place(|| setup.cogni(&arguments))
    };
    let digest = |shown: &str| {
        let line = shown.lines().find_map(|line| line.strip_prefix("digest"));
        line.unwrap().trim().to_owned()
    };
    // 1. Without a policy, the other layers decide.
    let shown = cogni(&[]);
    assert!(shown.contains("security     full") && shown.contains("ask          off"), "{shown}");
    let run = start(&service).await;
    assert!(end(&service, &run).await.contains("\"status\":\"completed\""));
    // 2. A policy that denies hides the tool, and refuses its call.
    let denying = cogni(&["--base", &digest(&shown), "--security", "deny"]);
    assert!(denying.contains("security     deny") && denying.contains(&approver.id), "{denying}");
    let run = start(&service).await;
    let printed = end(&service, &run).await;
    assert!(
        printed.contains("\"layer\":\"approval\"") && printed.contains("agent_policy"),
        "{printed}"
    );
    assert!(!printed.contains("Returns the current time"), "{printed}");
    // 3. A policy that asks about tools that its list does not name. A restart keeps it.
    let asking = ["--security", "allowlist", "--ask", "on-miss", "--allow", "text__*"];
    cogni(&[&["--base", &digest(&denying)][..], &asking].concat());
    setup.stop(service);
    let service = setup.start();
    assert!(cogni(&[]).contains("allow        text__*"));
    let run = start(&service).await;
    let questions = wait_for_questions(&approver, |found| found.len() == 1).await;
    assert_eq!(
        (&questions[0]["rule"], &questions[0]["run"]),
        (&json!("agent_policy"), &json!(run))
    );
    assert_eq!(decide(&approver, &questions[0], "approve").await, 200);
    let printed = end(&service, &run).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    // 4. The list names the tool now, so no person is asked.
    set(&approver, "allowlist", "on_miss", &["text__*", "core__*"]).await;
    let run = start(&service).await;
    let printed = end(&service, &run).await;
    assert!(printed.contains("\"status\":\"completed\""), "{printed}");
    setup.stop(service);
}

/// A policy that changes between a person's answer and the beginning of the call: the call does not begin.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_has_changed_lets_no_approved_call_begin() {
    let (setup, service, approver) = policy_setup("price_usd = '0.01'").await;
    for (security, ask, allowlist, code) in [
        ("deny", "off", &[][..], "policy_denied"),
        ("allowlist", "on_miss", &["text__*"], "approval_lost"),
    ] {
        set(&approver, "full", "always", &[]).await;
        let run = start(&service).await;
        let is_open = |found: &[Value]| found.iter().any(|question| question["state"] == "pending");
        let questions = wait_for_questions(&approver, is_open).await;
        set(&approver, security, ask, allowlist).await;
        assert_eq!(decide(&approver, questions.last().unwrap(), "approve").await, 200);
        let printed = end(&service, &run).await;
        assert!(printed.contains(code) && !printed.contains("completed"), "{security}: {printed}");
        let log = fs::read_to_string(setup.audit_log(&run)).unwrap();
        assert!(!log.contains("tool.admitted"), "{log}");
    }
    setup.stop(service);
}

/// A reload takes an agent out of the catalog: people still read and set its policy while a run of it goes on, and after its
/// end if they have set one.
#[tokio::test(flavor = "multi_thread")]
async fn the_policy_of_an_agent_without_a_file_is_set_while_its_run_goes_on() {
    let rule = "approve = 'ask'\n[tools.approvals]\nhold = '5m'\n";
    let (setup, mut service, approver) = policy_setup(rule).await;
    let reload = |service: &mut ServiceProcess, times: usize| {
        service.process.signal("HUP");
        let is_read = |output: &str| output.matches("relay are read again").count() == times;
        tokio::task::block_in_place(|| service.process.until(is_read));
    };
    let file = setup.path().join("agents/caller.toml");
    let entry = fs::read_to_string(&file).unwrap();
    // A catalog has one agent at least.
    let other = entry.replace("name = 'caller'", "name = 'other'");
    fs::write(setup.path().join("agents/other.toml"), other).unwrap();
    // 1. A run that goes on makes its agent known, and the policy counts for its next call.
    let run = start(&service).await;
    let questions = wait_for_questions(&approver, |found| found.len() == 1).await;
    fs::remove_file(&file).unwrap();
    reload(&mut service, 1);
    assert_eq!(approver.get(POLICY).await.status, 200);
    // 2. After its end, the agent is unknown.
    assert_eq!(decide(&approver, &questions[0], "deny").await, 200);
    assert!(end(&service, &run).await.contains("approval_denied"));
    assert_eq!(approver.get(POLICY).await.status, 404);
    // 3. A policy that was set in time stays known, and counts for the call that waits.
    fs::write(&file, entry).unwrap();
    reload(&mut service, 2);
    let run = start(&service).await;
    let questions = wait_for_questions(&approver, |found| found.len() == 2).await;
    fs::remove_file(&file).unwrap();
    reload(&mut service, 3);
    set(&approver, "deny", "off", &[]).await;
    assert_eq!(decide(&approver, &questions[1], "approve").await, 200);
    let printed = end(&service, &run).await;
    assert!(!printed.contains("completed"), "{printed}");
    assert_eq!(approver.get(POLICY).await.json()["security"], "deny");
    set(&approver, "full", "off", &[]).await;
    setup.stop(service);
}

/// While a policy asks about every call, no earlier yes counts, and none for later calls is offered.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_always_asks_lets_no_standing_approval_count() {
    let rule = "price_usd = '0.01'\n[tools.approvals]\nscopes = ['once', 'run', 'always']\n";
    let (setup, service, approver) = policy_setup(rule).await;
    set(&approver, "allowlist", "on_miss", &[]).await;
    let run = start(&service).await;
    let questions = wait_for_questions(&approver, |found| found.len() == 1).await;
    assert_eq!(questions[0]["scopes"], json!(["once", "run", "always"]));
    let path = format!("/api/v1/approvals/{}/decision", text(&questions[0]["id"]));
    let digest = &questions[0]["digest"];
    let body = json!({"decision": "approve", "digest": digest, "scope": "always", "max_uses": 9, "valid_for": "1h"});
    assert_eq!(approver.post(&path, &body).await.status, 200);
    assert!(end(&service, &run).await.contains("\"status\":\"completed\""));
    // The earlier yes counts for the next run.
    let run = start(&service).await;
    assert!(end(&service, &run).await.contains("\"status\":\"completed\""));
    // With `always`, each call is asked about, and a yes is for one call.
    set(&approver, "full", "always", &[]).await;
    let run = start(&service).await;
    let questions = wait_for_questions(&approver, |found| found.len() == 2).await;
    assert_eq!(questions[1]["scopes"], json!(["once"]));
    assert_eq!(decide(&approver, &questions[1], "deny").await, 200);
    assert!(end(&service, &run).await.contains("approval_denied"));
    setup.stop(service);
}

/// Two people change a policy at the same time, and those who may not, and a policy that contradicts itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_replaced_by_its_digest_only() {
    let (setup, service, approver) = policy_setup("price_usd = '0.01'").await;
    let first = approver.get(POLICY).await.json();
    assert_eq!((&first["by"], &first["changed_at"]), (&Value::Null, &Value::Null));
    let body =
        |security: &str| json!({"base": first["digest"], "security": security, "ask": "off"});
    let code = |answered: (u16, Value)| (answered.0, text(&answered.1["error"]["code"]).to_owned());
    let starter = setup.mint(&[
        "--access",
        "read,runs,approve",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "a",
    ]);
    let refused = |status, code: &str| (status, code.to_owned());
    assert_eq!(code(put(&starter, &body("full")).await), refused(403, "forbidden_with_runs"));
    assert_eq!(code(put(&service, &body("full")).await), refused(403, "forbidden"));
    let reader = setup.mint(&["--access", "read"]);
    assert_eq!(reader.get(POLICY).await.status, 403);
    let mut wrong = body("full");
    wrong["ask"] = json!("on_miss");
    assert_eq!(code(put(&approver, &wrong).await), refused(422, "invalid_request"));
    let unknown = approver.get("/api/v1/ai/agents/unknown/policy").await;
    let missing = "there is no agent `unknown`; `GET /api/v1/ai/agents?all=1` lists them";
    assert_eq!(
        (unknown.status.as_u16(), &unknown.json()["error"]["message"]),
        (404, &json!(missing))
    );
    // Of many at once, one is the first.
    let changes = (0..8).map(|number| {
        let change = body(if number % 2 == 0 { "deny" } else { "allowlist" });
        let approver = &approver;
        async move { put(approver, &change).await.0 }
    });
    let mut statuses = futures_util::future::join_all(changes).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 409, 409, 409, 409, 409, 409, 409]);
    assert_eq!(code(put(&approver, &body("full")).await), refused(409, "base_mismatch"));
    let now = approver.get(POLICY).await.json();
    assert_eq!(now["by"], json!(approver.id));
    assert_ne!(now["digest"], first["digest"]);
    setup.stop(service);
}
