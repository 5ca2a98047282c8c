//! T8: Tests of budgets that ask, in a real service: who may raise a budget, how far, and what a killed process leaves.

use std::fs;

use serde_json::{Value, json};

use super::approvals::{caller_setup, text, wait_for_questions};
use super::{ServiceSetup, conversation_body};
use crate::support::service::{MintedGrant, tool_call_script};

const ASKING: &str = "[tools.approvals]\non_budget = 'ask'\n";

async fn raise(grant: &MintedGrant, question: &Value, raise: Value) -> (u16, Value) {
    let path = format!("/api/v1/approvals/{}/decision", text(&question["id"]));
    let body = json!({"decision": "approve", "digest": question["digest"], "raise": raise});
    let answered = grant.post(&path, &body).await;
    let json = answered.json();
    let told = if json["error"].is_object() { &json["error"]["code"] } else { &json["state"] };
    (answered.status.as_u16(), told.clone())
}

/// Approves a question with the command line.
fn approve_by_command(
    setup: &ServiceSetup,
    approver: &MintedGrant,
    (id, digest): (&str, &str),
    raise: &str,
) -> String {
    let (socket, file) = (setup.path().join("api.sock"), setup.path().join("token"));
    fs::write(&file, &approver.token).unwrap();
    let (at, file) = (format!("unix:{}", socket.display()), file.to_str().unwrap());
    let place = ["--service", &at, "--token-file", file];
    let answer = ["approvals", "approve", id, "--digest", digest, "--raise", raise];
    tokio::task::block_in_place(|| setup.cogni(&[&answer[..], &place].concat()))
}

/// An agent's second turn is beyond its budget. It waits for a person, who raises the turns within the grant from the
/// command line, and the run succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_person_raises_the_turns_of_a_run() {
    let setup = ServiceSetup::new(&tool_call_script("echo worked")).await;
    setup.write_config(ASKING);
    let service = setup.start();
    let starter = setup.mint(&[
        "--access",
        "read,runs,approve",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "acct-1",
        "--max-turns",
        "4",
    ]);
    let approver = setup.mint(&["--access", "approve"]);
    let mut body = conversation_body("hello");
    body["budget"] = json!({"max_turns": 1});
    let run = starter.run(&body).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    let question = &asked[0];
    assert_eq!(
        [&question["tool"], &question["arguments"], &question["budget"]],
        [
            &json!("budget"),
            &Value::Null,
            &json!({
                "limit": "max_turns", "limits": {"max_turns": 1},
                "spent_turns": 1, "spent_input_tokens": question["budget"]["spent_input_tokens"],
                "spent_output_tokens": question["budget"]["spent_output_tokens"],
                "spent_cost_usd": "0",
            })
        ]
    );
    // 1. Another grant than the run's, not beyond the run's grant, and never down.
    let own = raise(&starter, question, json!({"max_turns": 2})).await;
    assert_eq!(own, (403, json!("forbidden_own_run")));
    for wrong in [json!({"max_turns": 5}), json!({"max_turns": 1}), json!({}), json!({"turns": 2})]
    {
        let refused = raise(&approver, question, wrong.clone()).await;
        assert_eq!(refused, (422, json!("invalid_request")), "{wrong}");
    }
    // 2. The command line answers, and the waiting call goes on.
    let (id, digest) = (text(&question["id"]), text(&question["digest"]));
    let answered = approve_by_command(&setup, &approver, (id, digest), "max_turns=4");
    assert_eq!(answered, format!("question {id} is approved\n"));
    let row = starter.ended(&run).await;
    assert_eq!(row["error_code"], Value::Null, "{row}");
    let closed = approver.get(&format!("/api/v1/approvals/{id}")).await.json();
    assert_eq!(
        [&closed["state"], &closed["raised"], &closed["by"]],
        [&json!("consumed"), &json!({"max_turns": 4}), &json!(approver.id)]
    );
    let events = starter.events(&run).await;
    let told: Vec<_> = events
        .iter()
        .filter(|event| event.kind.starts_with("approval_"))
        .map(|event| json!([event.kind, event.data["state"], event.data["limit"]]))
        .collect();
    assert_eq!(
        told,
        [
            json!(["approval_requested", "pending", "max_turns"]),
            json!(["approval_resolved", "approved", "max_turns"])
        ]
    );
    setup.stop(service);
}

/// A raise of money is reserved under the caps of the grant, so a person cannot raise a run beyond them.
#[tokio::test(flavor = "multi_thread")]
async fn a_raise_stays_within_the_caps_of_the_grant() {
    // A third call costs more than any answer allows, so the run waits at a second question and keeps what it has reserved.
    let script =
        "for call in 1 2 3; do /run/cogni-tool exec core__get_current_time {} --wait 5m >&2; done";
    let (setup, mut body) =
        caller_setup(script, &format!("price_usd = '0.002'\n{ASKING}hold = '5m'\n")).await;
    let service = setup.start();
    let starter = setup.mint(&[
        "--access",
        "read,runs",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "acct-1",
        "--max-cost-usd-total",
        "0.005",
    ]);
    let approver = setup.mint(&["--access", "approve"]);
    body["budget"] = json!({"max_cost_usd": "0.001"});
    let run = starter.run(&body).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    let beyond = raise(&approver, &asked[0], json!({"max_cost_usd": "0.006"})).await;
    assert_eq!(beyond, (402, json!("grant_budget_exhausted")));
    // An answer that cannot count reserves nothing: a no with a raise, and all of several answers but one.
    let path = format!("/api/v1/approvals/{}/decision", text(&asked[0]["id"]));
    let no = json!({"decision": "deny", "digest": asked[0]["digest"], "raise": {"max_cost_usd": "0.005"}});
    assert_eq!(approver.post(&path, &no).await.status, 422);
    let reserved = async || {
        let shown = setup.cogni(&["grant", "show", &starter.id]);
        serde_json::from_str::<Value>(&shown).unwrap()["money"]["total"]["reserved_usd"].clone()
    };
    assert_eq!(reserved().await, "0.001");
    let amounts = ["0.003", "0.004", "0.005"];
    let answers =
        amounts.map(|amount| raise(&approver, &asked[0], json!({"max_cost_usd": amount})));
    let answers = futures_util::future::join_all(answers).await;
    let counted: Vec<_> =
        answers.iter().zip(amounts).filter(|((status, _), _)| *status == 200).collect();
    assert_eq!(counted.len(), 1, "{answers:?}");
    wait_for_questions(&approver, |found| found.iter().any(|next| next["id"] != asked[0]["id"]))
        .await;
    assert_eq!(reserved().await, counted[0].1);
    starter.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    starter.ended(&run).await;
    let printed = starter.get(&format!("/api/v1/runs/{run}/output")).await.json();
    assert!(text(&printed["stderr"]).contains("\"status\":\"completed\""), "{printed}");
    setup.stop(service);
}

/// The service is killed while a budget is asked about: the next process withdraws the question, raises nothing, and takes
/// no answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_service_raises_nothing() {
    let setup = ServiceSetup::new("").await;
    setup.write_config(ASKING);
    let mut service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let mut body = conversation_body("hello");
    body["budget"] = json!({"max_turns": 0});
    let run = service.run(&body).await;
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    service.process.signal("KILL");
    service.process.wait();

    let service = setup.start();
    assert_eq!(service.ended(&run).await["error_code"], "interrupted");
    let left = wait_for_questions(&approver, |found| found.len() == 1).await;
    assert_eq!(left[0]["state"], "withdrawn");
    let late = raise(&approver, &asked[0], json!({"max_turns": 2})).await;
    assert_eq!(late, (409, json!("approval_closed")));
    let log = fs::read_to_string(setup.audit_log(&run)).unwrap();
    assert!(!log.contains("budget.raised"));
    setup.stop(service);
}
