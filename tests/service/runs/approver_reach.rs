//! A3, T4: Tests of grants with the access `approve` that name agents or accounts: they see and answer what is about the runs
//! of these only.

use http::Method;
use serde_json::{Value, json};

use super::ServiceSetup;
use super::approvals::{caller_body, configure_caller, text, wait_for_questions};
use crate::support::service::{MintedGrant, ServiceProcess};

const CALL: &str = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2; true";

const RULE: &str = "approve = 'ask'\n[tools.approvals]\nhold = '5m'\nscopes = ['once', 'always']\n";

/// Starts with an agent whose calls wait for a person.
async fn asking_setup() -> (ServiceSetup, ServiceProcess) {
    let setup = ServiceSetup::new("").await;
    configure_caller(&setup, CALL, RULE);
    let service = setup.start();
    (setup, service)
}

/// Makes a grant that answers, with these flags.
fn mint_approver(setup: &ServiceSetup, more: &[&str]) -> MintedGrant {
    let agents = setup.path().join("agents");
    let flags = ["--access", "approve", "--agents-dir", agents.to_str().unwrap()];
    setup.mint(&[&flags[..], more].concat())
}

/// Starts a run for each account, and returns the question of each.
async fn ask_for_accounts(service: &MintedGrant, approver: &MintedGrant) -> [Value; 2] {
    let mut runs = vec![];
    for account in ["acct-1", "acct-2"] {
        let mut body = caller_body();
        body["account"] = json!(account);
        runs.push(service.run(&body).await);
    }
    let asked = wait_for_questions(approver, |found| found.len() == 2).await;
    let of_run = |run: &String| asked.iter().find(|row| row["run"] == json!(run)).unwrap().clone();
    [of_run(&runs[0]), of_run(&runs[1])]
}

async fn decide(grant: &MintedGrant, question: &Value, more: &Value) -> (u16, Value) {
    let path = format!("/api/v1/approvals/{}/decision", text(&question["id"]));
    let mut body = json!({"decision": "approve", "digest": question["digest"]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answered = grant.post(&path, &body).await;
    (answered.status.as_u16(), answered.json())
}

async fn status(grant: &MintedGrant, path: &str) -> u16 {
    grant.get(path).await.status.as_u16()
}

/// A3: A question about an agent or an account that a grant does not name is in none of its lists, is not shown to it, and
/// takes no answer of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_answers_questions_of_the_agents_and_accounts_that_it_names() {
    let (setup, service) = asking_setup().await;
    let all = mint_approver(&setup, &[]);
    let asked = ask_for_accounts(&service, &all).await;
    for (flags, seen) in [
        (&["--account", "acct-1"][..], [true, false]),
        (&["--account", "acct-2", "--agent", "caller"], [false, true]),
        (&["--account", "acct-*", "--agent", "call*"], [true, true]),
        (&["--account", "*", "--agent", "*"], [true, true]),
        (&["--account", "acct", "--agent", "caller"], [false, false]),
    ] {
        let grant = mint_approver(&setup, flags);
        // A page is full, whatever the questions are that the grant does not see.
        let page = grant.get("/api/v1/approvals?limit=1").await.json();
        let listed = page["approvals"].as_array().unwrap().len();
        assert_eq!(listed, usize::from(seen.contains(&true)), "{flags:?}");
        assert_eq!(page["next"].is_string(), seen == [true, true], "{flags:?}");
        for (question, is_seen) in asked.iter().zip(seen) {
            let (id, run) = (text(&question["id"]), text(&question["run"]));
            let shown = status(&grant, &format!("/api/v1/approvals/{id}")).await;
            assert_eq!(shown, if is_seen { 200 } else { 404 }, "{flags:?}");
            let of_run = grant.get(&format!("/api/v1/approvals?run={run}")).await.json();
            let of_run = of_run["approvals"].as_array().unwrap().len();
            assert_eq!(of_run, usize::from(is_seen), "{flags:?}");
            let after = status(&grant, &format!("/api/v1/approvals?cursor={id}")).await;
            assert_eq!(after, if is_seen { 200 } else { 400 }, "{flags:?}");
            if !is_seen {
                let (status, refused) = decide(&grant, question, &json!({})).await;
                assert_eq!((status, &refused["error"]["code"]), (404, &json!("not_found")));
            }
        }
    }
    let other_agent = setup.mint(&["--access", "approve", "--agent", "sandbox:*"]);
    let nothing = json!({"approvals": [], "next": null});
    assert_eq!(other_agent.get("/api/v1/approvals").await.json(), nothing);
    assert_eq!(decide(&other_agent, &asked[0], &json!({})).await.0, 404);
    // The access `admin` shows all questions, and lets a grant answer no more of them.
    let admin = setup.mint(&["--access", "approve,admin", "--account", "acct-2"]);
    assert_eq!(status(&admin, &format!("/api/v1/approvals/{}", text(&asked[0]["id"]))).await, 200);
    let (code, refused) = decide(&admin, &asked[0], &json!({})).await;
    assert_eq!((code, &refused["error"]["code"]), (403, &json!("forbidden_account")));
    for question in &asked {
        assert_eq!(decide(&admin, question, &json!({"decision": "deny"})).await.0, {
            if question == &asked[1] { 200 } else { 403 }
        });
    }
    assert_eq!(decide(&all, &asked[0], &json!({})).await.0, 200);
    for question in &asked {
        service.ended(text(&question["run"])).await;
    }
    setup.stop(service);
}

/// A3: A grant that names accounts reads and revokes the standing approvals of these accounts only.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_takes_back_standing_approvals_of_the_accounts_that_it_names() {
    let (setup, service) = asking_setup().await;
    let first = mint_approver(&setup, &["--account", "acct-1"]);
    let second = mint_approver(&setup, &["--account", "acct-2"]);
    let asked = ask_for_accounts(&service, &mint_approver(&setup, &[])).await;
    let wide = json!({"scope": "always", "max_uses": 9, "valid_for": "1h"});
    let mut paths = vec![];
    for (grant, question) in [&first, &second].into_iter().zip(&asked) {
        let (status, answered) = decide(grant, question, &wide).await;
        assert_eq!(status, 200, "{answered}");
        let id = text(&answered["standing_approval"]);
        paths.push(format!("/api/v1/standing-approvals/{id}"));
    }
    for question in &asked {
        service.ended(text(&question["run"])).await;
    }
    let listed = first.get("/api/v1/standing-approvals").await.json();
    let listed = listed["standing_approvals"].as_array().unwrap();
    assert_eq!((listed.len(), &listed[0]["account"]), (1, &json!("acct-1")));
    assert_eq!([status(&first, &paths[0]).await, status(&first, &paths[1]).await], [200, 404]);
    let foreign = paths[1].rsplit('/').next().unwrap();
    let after = format!("/api/v1/standing-approvals?cursor={foreign}");
    assert_eq!(status(&first, &after).await, 400);
    for step in ["revoke", "grant"] {
        let body = json!({"digest": "d", "max_uses": 1, "valid_for": "1h"});
        let refused = first.post(&format!("{}/{step}", paths[1]), &body).await;
        assert_eq!(refused.status, 404, "{step}");
    }
    let revoked = first.post(&format!("{}/revoke", paths[0]), &json!({})).await;
    assert_eq!(revoked.status, 200);
    assert_eq!(second.get(&paths[1]).await.json()["state"], "granted");
    setup.stop(service);
}

/// A3: A grant reads and sets the policies of the agents that it names. One that names accounts sets none, because a policy
/// is about the runs of all accounts.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_sets_policies_of_the_agents_that_it_names() {
    const POLICY: &str = "/api/v1/ai/agents/caller/policy";
    let (setup, service) = asking_setup().await;
    let base = mint_approver(&setup, &[]).get(POLICY).await.json()["digest"].clone();
    let body = json!({"base": base, "security": "full", "ask": "off"}).to_string();
    for (flags, read, set) in [
        (&["--agent", "call*"][..], 200, (200, Value::Null)),
        (&["--account", "*"], 200, (200, Value::Null)),
        (&["--account", "acct-1"], 200, (403, json!("forbidden_account"))),
        (&["--account", "acct-1", "--agent", "caller"], 200, (403, json!("forbidden_account"))),
    ] {
        let grant = mint_approver(&setup, flags);
        assert_eq!(status(&grant, POLICY).await, read, "{flags:?}");
        let json = [("content-type", "application/json")];
        let answered = grant.ask(Method::PUT, POLICY, &body, &json).await;
        let code = answered.json()["error"]["code"].clone();
        assert_eq!((answered.status.as_u16(), code), set, "{flags:?}");
    }
    let other = setup.mint(&["--access", "approve", "--agent", "sandbox:*"]);
    let json = [("content-type", "application/json")];
    assert_eq!(status(&other, POLICY).await, 404);
    assert_eq!(other.ask(Method::PUT, POLICY, &body, &json).await.status, 404);
    setup.stop(service);
}
