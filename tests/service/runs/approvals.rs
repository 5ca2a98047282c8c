//! T4: Tests of questions about tool calls in a real service: who may answer, what watchers learn, and what a killed
//! process leaves.

use std::fs;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::service::MintedGrant;

/// Starts with an agent whose script calls tools, and a rule that asks a person about each call.
async fn asking_setup(script: &str, rule: &str) -> ServiceSetup {
    let rule = format!("approve = 'ask'\n{rule}\n[tools.approvals]\nhold = '5m'\n");
    caller_setup(script, &rule).await.0
}

/// Starts with an agent whose script calls the clock, and a rule about it. Returns also the request of a run.
pub(super) async fn caller_setup(script: &str, rule: &str) -> (ServiceSetup, Value) {
    let setup = ServiceSetup::new("").await;
    configure_caller(&setup, script, rule);
    (setup, caller_body())
}

/// Configures an agent whose script calls the clock, and a rule about it.
pub(super) fn configure_caller(setup: &ServiceSetup, script: &str, rule: &str) {
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = format!(
        "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\ntools = ['core__get_current_time']\n\
         setup = 'messages'\nargv = ['sh', '-c', '''{script}''']\n"
    );
    fs::write(agents.join("caller.toml"), entry).unwrap();
    setup.write_config(&format!(
        "agents_dir = \"{}\"\n[tools]\ngranted = ['core__get_current_time']\n[[tools.rules]]\nname = 'ask-clock'\n\
         tool = 'core__get_current_time'\n{rule}",
        agents.display()
    ));
}

pub(super) fn caller_body() -> Value {
    let mut body = conversation_body("hello");
    body["agent"] = json!("caller");
    body
}

/// Waits until the questions are as expected, and returns them, the oldest first.
pub(super) async fn wait_for_questions(
    grant: &MintedGrant,
    is_expected: impl Fn(&[Value]) -> bool,
) -> Vec<Value> {
    for _ in 0..3000 {
        let listed = grant.get("/api/v1/approvals").await.json();
        let mut questions = listed["approvals"].as_array().unwrap().clone();
        questions.reverse();
        if is_expected(&questions) {
            return questions;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the questions never become as expected");
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

async fn answer(grant: &MintedGrant, question: &Value, digest: &str) -> (u16, Value) {
    let path = format!("/api/v1/approvals/{}/decision", text(&question["id"]));
    let body = json!({"decision": "approve", "digest": digest, "reason": "fine"});
    let answered = grant.post(&path, &body).await;
    let json = answered.json();
    let told = if json["error"].is_object() { &json["error"]["code"] } else { &json["state"] };
    (answered.status.as_u16(), told.clone())
}

/// Asserts that a grant without the access does not learn that there is something at `path`.
pub(super) async fn assert_hidden(setup: &ServiceSetup, path: &str, empty_path: &str) {
    let accountant = setup.mint(&["--access", "billing"]);
    let (known, unknown) = (accountant.get(path).await, accountant.get(empty_path).await);
    assert_eq!(known.status, 403);
    assert_eq!((known.status, known.json()), (unknown.status, unknown.json()));
}

/// A run waits for a person, another grant approves with the digest from the command line, and the tool runs once.
#[tokio::test(flavor = "multi_thread")]
async fn another_grant_approves_a_call() {
    let script = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2";
    let setup = asking_setup(script, "").await;
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
    let stranger = setup.mint(&["--access", "read"]);
    let run = starter.run(&caller_body()).await;
    let pending = wait_for_questions(&approver, |found| found.len() == 1).await;
    // The list has no arguments: they may be long.
    assert_eq!(pending[0]["arguments"], Value::Null);
    let path = format!("/api/v1/approvals/{}", text(&pending[0]["id"]));
    let question = &approver.get(&path).await.json();
    let (id, digest) = (text(&question["id"]), text(&question["digest"]));
    assert_eq!(
        [&question["state"], &question["arguments"], &question["run"], &question["rule"]],
        [&json!("pending"), &json!("{}"), &json!(run), &json!("ask-clock")]
    );
    // 1. Only another grant with the access may answer, only with the digest, and only by POST.
    assert_eq!(answer(&starter, question, digest).await, (403, json!("forbidden_own_run")));
    assert_eq!(answer(&service, question, digest).await, (403, json!("forbidden")));
    assert_eq!(answer(&approver, question, "other").await, (409, json!("digest_mismatch")));
    assert_eq!(stranger.get(&path).await.status, 404);
    assert_eq!(stranger.get("/api/v1/approvals").await.status, 403);
    assert_eq!(starter.get(&path).await.json(), *question);
    assert_hidden(&setup, &path, "/api/v1/approvals/apr-none").await;
    let by_get = approver.ask(Method::GET, &format!("{path}/decision"), "", &[]).await;
    assert_eq!(by_get.status, 405);
    // 2. The command line answers.
    let (socket, file) = (setup.path().join("api.sock"), setup.path().join("token"));
    fs::write(&file, &approver.token).unwrap();
    let at = format!("unix:{}", socket.display());
    let flags = ["--service", &at, "--token-file", file.to_str().unwrap()];
    let cogni = |command: &[&str]| {
        let arguments = [&["approvals"], command, &flags].concat();
        tokio::task::block_in_place(|| setup.cogni(&arguments))
    };
    assert!(cogni(&["list"]).contains(id));
    let shown = cogni(&["show", id]);
    assert!(shown.contains(digest) && shown.contains("arguments    {}"), "{shown}");
    let shown_run = format!("account      acct-1\ngrant        {}\n", starter.id);
    assert!(shown.contains(&shown_run), "{shown}");
    let answered = cogni(&["approve", id, "--digest", digest, "--reason", "fine"]);
    assert_eq!(answered, format!("question {id} is approved\n"));
    // 3. The call has run once, and watchers and records know why.
    starter.ended(&run).await;
    let printed = starter.get(&format!("/api/v1/runs/{run}/output")).await.json();
    assert!(text(&printed["stderr"]).contains("\"status\":\"completed\""), "{printed}");
    let closed = approver.get(&path).await.json();
    assert_eq!(
        [&closed["state"], &closed["arguments"], &closed["by"], &closed["reason"]],
        [&json!("consumed"), &Value::Null, &json!(approver.id), &json!("fine")]
    );
    assert_eq!(answer(&approver, question, digest).await, (409, json!("approval_closed")));
    let events = starter.events(&run).await;
    let told: Vec<_> = events
        .iter()
        .filter(|event| event.kind.starts_with("approval_"))
        .map(|event| (event.kind.as_str(), text(&event.data["state"]), text(&event.data["id"])))
        .collect();
    let requested = ("approval_requested", "pending", id);
    assert_eq!(told, [requested, ("approval_resolved", "approved", id)]);
    assert!(events.iter().all(|event| event.data.get("arguments").is_none()));
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 1);
    assert!(cogni(&["list"]).contains("no question"));
    setup.stop(service);
}

/// The service is killed while one question is used, one is approved and one is pending. The next process starts
/// nothing, keeps the answers, and takes no new ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_service_runs_nothing_twice() {
    let call = |arguments: &str| {
        format!("/run/cogni-tool exec core__get_current_time \"{arguments}\" --wait 9m >&2 & ")
    };
    // The rate lets one call begin in a minute, so the second approved call stays approved.
    let script = [call("{}"), call("{ }"), call("{  }"), "wait".to_owned()].concat();
    let setup = asking_setup(&script, "budget = { per_minute = 1 }\n").await;
    let mut service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&caller_body()).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 3).await;
    // A page has the oldest pending questions, and the way to the next page.
    let path = "/api/v1/approvals?state=pending&limit=2";
    let page = approver.get(path).await.json();
    assert_eq!(page["approvals"], json!(asked[..2]));
    let rest = approver.get(&format!("{path}&cursor={}", text(&page["next"]))).await.json();
    assert_eq!(rest, json!({"approvals": asked[2..], "next": null}));
    assert_eq!(approver.get(&format!("{path}&cursor=apr-none")).await.status, 400);
    for question in &asked[..2] {
        let digest = text(&question["digest"]);
        assert_eq!(answer(&approver, question, digest).await, (200, json!("approved")));
        wait_for_questions(&approver, |found| {
            found.iter().any(|question| question["state"] == "consumed")
        })
        .await;
    }
    service.process.signal("KILL");
    service.process.wait();

    let service = setup.start();
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], "interrupted", "{row}");
    let left = wait_for_questions(&approver, |found| found.len() == 3).await;
    let states: Vec<_> =
        left.iter().map(|question| json!([question["state"], question["by"]])).collect();
    let by = json!(approver.id);
    let expected = [json!(["consumed", by]), json!(["withdrawn", by]), json!(["withdrawn", null])];
    assert_eq!(states, expected);
    for (question, asked) in left.iter().zip(&asked) {
        assert_eq!((&question["id"], &question["arguments"]), (&asked["id"], &Value::Null));
        let late = answer(&approver, question, text(&question["digest"])).await;
        assert_eq!(late, (409, json!("approval_closed")));
    }
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 1);
    setup.stop(service);
}

/// A cancelled run withdraws its question, and a later answer starts nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_run_withdraws_its_question() {
    let script = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2";
    let setup = asking_setup(script, "").await;
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&caller_body()).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    assert_eq!(service.ended(&run).await["error_code"], "cancelled");
    let late = answer(&approver, &asked[0], text(&asked[0]["digest"])).await;
    assert_eq!(late, (409, json!("approval_closed")));
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 0);
    assert_eq!(count_records(&setup, &run, "approval.resolved"), 1);
    setup.stop(service);
}

/// The operator takes a tool away and reloads: an approved call of it does not begin, though its run goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_without_the_tool_stops_an_approved_call() {
    let script = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2; true";
    let setup = asking_setup(script, "").await;
    let mut service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&caller_body()).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    let agents = setup.path().join("agents");
    let file = agents.join("caller.toml");
    let entry = fs::read_to_string(&file).unwrap();
    fs::write(&file, entry.replace("tools = ['core__get_current_time']\n", "")).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    service.process.signal("HUP");
    tokio::task::block_in_place(|| {
        service.process.until(|output| output.contains("relay are read again"));
    });
    let digest = text(&asked[0]["digest"]);
    assert_eq!(answer(&approver, &asked[0], digest).await, (200, json!("approved")));
    service.ended(&run).await;
    let printed = service.get(&format!("/api/v1/runs/{run}/output")).await.json();
    assert!(text(&printed["stderr"]).contains("approval_lost"), "{printed}");
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 0);
    setup.stop(service);
}

/// T7: A mode lets a person be asked about each command. A reload that switches commands off stops an approved call.
#[tokio::test(flavor = "multi_thread")]
async fn the_mode_of_an_agent_asks_about_commands() {
    let script = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2; true";
    let groups = "price_usd = '0.01'\n[tools.groups]\ncommands = ['core__*']\n";
    let (setup, body) = caller_setup(script, groups).await;
    let file = setup.path().join("agents/caller.toml");
    let entry = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{entry}[modes]\ncommands = 'ask'\n")).unwrap();
    let mut service = setup.start();
    let listed = service.get("/api/v1/ai/agents").await.json();
    assert_eq!(listed["agents"][0]["modes"]["commands"], "ask", "{listed}");
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&body).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    assert_eq!(asked[0]["rule"], "modes.commands");
    let digest = text(&asked[0]["digest"]);
    assert_eq!(answer(&approver, &asked[0], digest).await, (200, json!("approved")));
    service.ended(&run).await;
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 1);
    // The next call is approved only after its group was switched off.
    let run = service.run(&body).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 2).await;
    fs::write(&file, format!("{entry}[modes]\ncommands = 'off'\n")).unwrap();
    service.process.signal("HUP");
    tokio::task::block_in_place(|| {
        service.process.until(|output| output.contains("relay are read again"));
    });
    let digest = text(&asked[1]["digest"]);
    assert_eq!(answer(&approver, &asked[1], digest).await, (200, json!("approved")));
    service.ended(&run).await;
    let printed = service.get(&format!("/api/v1/runs/{run}/output")).await.json();
    assert!(text(&printed["stderr"]).contains("approval_lost"), "{printed}");
    assert_eq!(count_records(&setup, &run, "tool.admitted"), 0);
    setup.stop(service);
}

/// A service without grants has no person who may answer, so a rule that asks is refused when the file is loaded.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_grants_cannot_ask() {
    let setup = asking_setup("true", "").await;
    let mut command = setup.command();
    let output = command.arg("--insecure-no-auth").output().unwrap();
    assert!(!output.status.success());
    let printed = String::from_utf8(output.stderr).unwrap();
    insta::assert_snapshot!(printed.trim(), @r#"error: `tools.rules`: the rule `ask-clock` has `approve = "ask"`, and a service without grants has no person who can answer: take `insecure_no_auth` out, and make a grant with `cogni-gateway grant mint --access approve`"#);
}

fn count_records(setup: &ServiceSetup, run: &str, event: &str) -> usize {
    let log = fs::read_to_string(setup.audit_log(run)).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["event"] == event).count()
}
