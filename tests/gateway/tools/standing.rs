//! T9, T4: Tests of standing approvals: a denied call is proposed, granted, used as often as a person says, and denied again;
//! and an answer that counts for later calls, too.

mod clock;
mod several;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::runner::tool_opener::{CompiledTools, RunToolOpener};
use cogni_gateway::service::auth::{GRANT_SCHEMA, GrantScope, GrantStore, GrantTerms};
use cogni_gateway::tools::approval::agent_policy::{AgentToolPolicy, PolicyChange};
use cogni_gateway::tools::approval::standing::{
    ApprovalScope, ProposalOutcome, StandingAnswer, StandingApproval, StandingFilter,
    StandingGrant, StandingOutcome, StandingState, StandingTerms,
};
use cogni_gateway::tools::approval::store::{ApprovalDecision, ApprovalStore, DecisionOutcome};
use cogni_gateway::tools::approval::{APPROVAL_SCHEMA, to_unix_millis};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::approvals::{AskingApp, decision, open_store};
use super::{CLOCK, read_response, tool_settings};
use crate::support::app::TestApp;
use crate::support::client::build_request;

/// Starts the run `run` with a table and a store.
async fn start_run(run: &str, table: &str, store: &ApprovalStore) -> TestApp {
    let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
    TestApp::with(|config| {
        let opener = Some(Arc::new(opener) as _);
        run.clone_into(&mut config.identity.run);
        config.tools = ToolSettings { opener, ..tool_settings(table) };
        config.validate().unwrap();
    })
    .await
}

async fn start(table: &str) -> AskingApp {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let app = start_run("run-1", table, &store).await;
    AskingApp { app, store, directory }
}

/// Calls the clock with these bytes of arguments.
async fn call(app: &TestApp, arguments: &str) -> (StatusCode, Value) {
    let body = format!(r#"{{"tool": "{CLOCK}", "arguments": {arguments}, "wait": "0s"}}"#);
    let request = build_request(Method::POST, "/tool/exec", &body, &[]);
    read_response(&app.client().send(request).await)
}

/// Calls the clock, and returns the proposal of the denied call; `None` if it is denied without one.
async fn denied(app: &TestApp, arguments: &str) -> Option<String> {
    let (status, refused) = call(app, arguments).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{refused}");
    assert_eq!(refused["error"]["code"], "policy_denied", "{refused}");
    refused["error"]["proposal"].as_str().map(str::to_owned)
}

async fn completes(app: &TestApp, arguments: &str) -> bool {
    let (status, ended) = call(app, arguments).await;
    // A call of the clock ends at once, and the answer may still be the pending one.
    let id = ended["id"].as_str().map(str::to_owned);
    if status == StatusCode::ACCEPTED && ended["approval"].is_null() {
        let path = format!("/tool/exec/{}?wait=1m", id.unwrap());
        return app.client().get(&path).await.json()["status"] == "completed";
    }
    ended["status"] == "completed"
}

fn terms(scope: ApprovalScope, max_uses: u32, lifetime: Duration) -> StandingTerms {
    let not_after_ms = to_unix_millis(SystemTime::now() + lifetime);
    StandingTerms { scope, not_after_ms, max_uses }
}

async fn grant_by(
    store: &ApprovalStore,
    id: &str,
    by: &str,
    terms: StandingTerms,
) -> StandingOutcome {
    let digest = store.find_standing(id).await.unwrap().unwrap().digest;
    let grant = StandingGrant { digest, terms, by: by.to_owned(), reason: None };
    store.grant_standing(id, grant).await.unwrap()
}

/// Grants a proposal for calls of all runs within an hour.
async fn grant(store: &ApprovalStore, id: &str, max_uses: u32) {
    let terms = terms(ApprovalScope::Always, max_uses, HOUR);
    let granted = grant_by(store, id, "grant-2", terms).await;
    assert!(matches!(granted, StandingOutcome::Changed(_)), "{granted:?}");
}

async fn row(store: &ApprovalStore, id: &str) -> StandingApproval {
    store.find_standing(id).await.unwrap().unwrap()
}

/// A denied call carries a proposal, a person grants it for two calls, two calls run, and the third is denied with another
/// proposal. The log has each step.
#[tokio::test]
async fn a_denied_call_is_proposed_granted_used_and_denied_again() {
    let asking = start(DENIED_CLOCK).await;
    let (app, store) = (&asking.app, &asking.store);
    let id = denied(app, "{}").await.unwrap();
    assert_eq!(denied(app, "{}").await.as_ref(), Some(&id), "the open proposal is found again");
    let proposed = row(store, &id).await;
    assert_eq!((proposed.state, proposed.scope), (StandingState::Proposed, ApprovalScope::Always));
    assert_eq!(
        (proposed.arguments.as_deref(), &*proposed.rules),
        (Some("{}"), &["closed".to_owned()][..])
    );
    let other = StandingGrant {
        digest: "other".to_owned(),
        terms: terms(ApprovalScope::Run, 1, HOUR),
        by: "grant-2".to_owned(),
        reason: None,
    };
    assert_eq!(store.grant_standing(&id, other).await.unwrap(), StandingOutcome::OtherDigest);
    assert_eq!(asking.executions(), 0);

    grant(store, &id, 2).await;
    // Blanks make another call.
    let second = denied(app, "{ }").await.unwrap();
    assert_ne!(second, id);
    assert!(completes(app, "{}").await && completes(app, "{}").await);
    let spent = row(store, &id).await;
    assert_eq!((spent.state, spent.used, spent.arguments), (StandingState::Spent, 2, None));
    let third = denied(app, "{}").await.unwrap();
    assert!(third != id && third != second);
    assert_eq!(asking.executions(), 2);

    let AskingApp { app, directory: _directory, .. } = asking;
    let records = app.stop().await;
    let of = |event: &str| -> Vec<_> {
        records.iter().filter(|record| record["event"] == event).collect()
    };
    let ids: Vec<_> =
        of("approval.proposed").iter().map(|record| record["approval"].clone()).collect();
    assert_eq!(ids, [json!(id), json!(second), json!(third)]);
    let refused: Vec<_> =
        of("tool.refused").iter().map(|record| record["proposal"].clone()).collect();
    assert_eq!(refused, [json!(id), json!(id), json!(second), json!(third)]);
    for (number, (used, admitted)) in
        of("approval.used").iter().zip(of("tool.admitted")).enumerate()
    {
        assert_eq!((&used["approval"], &admitted["approval"]), (&json!(id), &json!(id)));
        assert_eq!((&used["by"], &used["used"]), (&json!("grant-2"), &json!(number + 1)));
        assert_eq!(used["call"], admitted["call"]);
        assert!(used["seq"].as_u64() < admitted["seq"].as_u64());
    }
}

/// A client of MCP reads the proposal, too, and a lost answer of an allowed call is found by its key.
#[tokio::test]
async fn clients_find_the_proposal_and_the_result() {
    let asking = start(DENIED_CLOCK).await;
    let (app, store) = (&asking.app, &asking.store);
    let params = json!({"name": CLOCK, "arguments": {}});
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
    let headers = [("mcp-protocol-version", "2025-11-25")];
    let told = app.client().post_with("/mcp", &message, &headers).await.json()["result"].clone();
    let id = told["_meta"]["cogni-gateway/call"]["proposal"].as_str().unwrap();
    insta::assert_snapshot!(
        told["content"][0]["text"].as_str().unwrap().replace(id, "ID"),
        @"policy_denied: the rule `closed` does not allow this call; a person may allow it by the proposal ID, call again when one has"
    );
    grant(store, id, 1).await;
    let body = json!({"tool": CLOCK, "arguments": {}, "idempotency_key": "k"});
    let first = app.client().post("/tool/exec", &body).await.json();
    assert_eq!(first["status"], "completed", "{first}");
    assert_eq!(app.client().post("/tool/exec", &body).await.json(), first);
    assert_eq!(asking.executions(), 1);
}

/// 64 calls race for an approval of one call: one begins.
#[tokio::test(flavor = "multi_thread")]
async fn racing_calls_use_an_approval_as_often_as_it_says() {
    for uses in [1_u32, 5] {
        let asking = start(DENIED_CLOCK).await;
        let id = denied(&asking.app, "{}").await.unwrap();
        grant(&asking.store, &id, uses).await;
        join_all((0..64).map(|_| call(&asking.app, "{}"))).await;
        // Some were too many at one time; they come again.
        while denied_or_done(&asking.app).await.is_none() {}
        assert_eq!(asking.executions(), uses as usize);
        assert_eq!(row(&asking.store, &id).await.used, uses);
    }
}

/// Calls again, and returns the proposal once the call is denied.
async fn denied_or_done(app: &TestApp) -> Option<String> {
    let (_, told) = call(app, "{}").await;
    told["error"]["proposal"].as_str().map(str::to_owned)
}

/// An approval that is revoked or expired allows nothing, and the next denial makes a new proposal.
#[tokio::test]
async fn a_revoked_or_expired_approval_allows_nothing() {
    let asking = start(DENIED_CLOCK).await;
    let (app, store) = (&asking.app, &asking.store);
    // 1. A proposal that a person takes back is not given again.
    let dismissed = denied(app, "{}").await.unwrap();
    let outcome = store.revoke_standing(&dismissed, "grant-2").await.unwrap();
    assert!(matches!(outcome, StandingOutcome::Changed(_)), "{outcome:?}");
    // 2. Neither is an approval that is revoked before its use.
    let revoked = denied(app, "{}").await.unwrap();
    grant(store, &revoked, 9).await;
    assert!(completes(app, "{}").await);
    store.revoke_standing(&revoked, "grant-3").await.unwrap();
    let late = denied(app, "{}").await.unwrap();
    assert_eq!(row(store, &revoked).await.revoked_by.as_deref(), Some("grant-3"));
    assert_eq!(
        store.revoke_standing(&revoked, "grant-3").await.unwrap(),
        StandingOutcome::Closed(StandingState::Revoked)
    );
    // 3. Nor one whose time is over.
    let short = terms(ApprovalScope::Always, 9, Duration::from_secs(3));
    grant_by(store, &late, "grant-2", short).await;
    assert!(completes(app, "{}").await);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let last = denied(app, "{}").await.unwrap();
    assert_eq!(row(store, &late).await.state, StandingState::Expired);
    let ids = [dismissed, revoked, late, last];
    assert!((1..4).all(|end| !ids[..end].contains(&ids[end])), "{ids:?}");
    assert_eq!(asking.executions(), 2);
}

/// T9: Standing approvals end with the revocation of the grant that has given them, also when another process revokes it and a
/// call is about to use one. What a revoked grant still says does not count.
#[tokio::test]
async fn the_approvals_of_a_revoked_grant_end() {
    let asking = start(DENIED_CLOCK).await;
    let (app, store) = (&asking.app, &asking.store);
    let file = asking.directory.path().join("state.db");
    let grants = GrantStore::new(SqliteDatabase::open_database(&file, &[GRANT_SCHEMA]).unwrap());
    let approve = GrantTerms { access: [GrantScope::Approve].into(), ..GrantTerms::default() };
    let (giver, _) = grants.mint_grant("giver", approve.clone(), None).await.unwrap();
    let (other, _) = grants.mint_grant("other", approve, None).await.unwrap();
    let always = || terms(ApprovalScope::Always, 9, HOUR);
    // 1. A call that has found the approval does not begin once the grant is revoked.
    let id = denied(app, "{}").await.unwrap();
    grant_by(store, &id, &giver.id, always()).await;
    assert!(completes(app, "{}").await);
    let found = row(store, &id).await;
    assert_eq!(store.find_granted(&found.key, "run-1").await.unwrap().len(), 1);
    grants.revoke_grant(&giver.id).await.unwrap();
    assert_eq!(store.use_standing((&id, &found.digest), "run-1").await.unwrap(), None);
    let ended = row(store, &id).await;
    assert_eq!((ended.state, ended.used, ended.revoked_by), (StandingState::Revoked, 1, None));
    // 2. What the grant says later does not count, and what another grant says does.
    let next = denied(app, "{}").await.unwrap();
    let late = grant_by(store, &next, &giver.id, always()).await;
    assert_eq!(late, StandingOutcome::GrantRevoked);
    let policy = AgentToolPolicy::default();
    let base = policy.digest();
    let replaced = store.replace_agent_policy(("a", &base), policy, &giver.id).await.unwrap();
    assert_eq!(replaced, PolicyChange::GrantRevoked);
    grant_by(store, &next, &other.id, always()).await;
    assert!(completes(app, "{}").await);
    // 3. A second revocation, and that of a grant that has given nothing, change nothing.
    grants.revoke_grant(&giver.id).await.unwrap();
    assert!(completes(app, "{}").await);
}

/// T9: An answer of a grant that was revoked meanwhile does not count.
#[tokio::test]
async fn an_answer_of_a_revoked_grant_does_not_count() {
    let asking = start(ASKING_CLOCK).await;
    let file = asking.directory.path().join("state.db");
    let grants = GrantStore::new(SqliteDatabase::open_database(&file, &[GRANT_SCHEMA]).unwrap());
    let approve = GrantTerms { access: [GrantScope::Approve].into(), ..GrantTerms::default() };
    let (giver, _) = grants.mint_grant("giver", approve, None).await.unwrap();
    grants.revoke_grant(&giver.id).await.unwrap();
    let pending = asking.ask().await;
    let question = asking.row(&pending).await;
    let late = ApprovalDecision { by: giver.id, ..decision(true, &question.digest) };
    let decided = asking.store.decide(&question.id, late, SystemTime::now()).await.unwrap();
    assert_eq!(decided, DecisionOutcome::GrantRevoked);
    assert!(matches!(asking.decide(&pending, true).await, DecisionOutcome::Decided(_)));
}

/// Who has started a run does not allow its calls, also not by an approval for the runs of others.
#[tokio::test]
async fn an_approval_does_not_count_for_runs_of_who_has_granted_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path())
        .with_owners(|run| Box::pin(async move { Some(format!("grant-of-{run}")) }));
    let first = start_run("run-1", DENIED_CLOCK, &store).await;
    let id = denied(&first, "{}").await.unwrap();
    assert_eq!(row(&store, &id).await.owner.as_deref(), Some("grant-of-run-1"));
    let terms = terms(ApprovalScope::Always, 9, HOUR);
    grant_by(&store, &id, "grant-of-run-2", terms).await;
    let own = start_run("run-2", DENIED_CLOCK, &store).await;
    assert!(denied(&own, "{}").await.is_some_and(|proposal| proposal != id));
    let other = start_run("run-3", DENIED_CLOCK, &store).await;
    assert!(completes(&other, "{}").await && completes(&first, "{}").await);
}

/// An approval for one run counts for that run, and ends with it. One for all runs counts for the account's runs only.
#[tokio::test]
async fn an_approval_counts_for_its_run_and_its_account() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let first = start_run("run-1", DENIED_CLOCK, &store).await;
    let second = start_run("run-2", DENIED_CLOCK, &store).await;
    let id = denied(&first, "{}").await.unwrap();
    grant_by(&store, &id, "grant-2", terms(ApprovalScope::Run, 9, HOUR)).await;
    assert!(completes(&first, "{}").await);
    let of_second = denied(&second, "{}").await.unwrap();
    store.withdraw_run("run-1", store.read_time()).await.unwrap();
    assert!(denied(&first, "{}").await.is_some());
    assert_eq!(row(&store, &id).await.state, StandingState::Expired);
    grant(&store, &of_second, 9).await;
    assert!(completes(&first, "{}").await && completes(&second, "{}").await);
    // A restart ends the approvals for runs, and no others.
    store.withdraw_all(store.read_time()).await.unwrap();
    assert!(completes(&second, "{}").await);
    let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
    let stranger = TestApp::with(|config| {
        "acct-2".clone_into(&mut config.identity.account);
        let opener = Some(Arc::new(opener) as _);
        config.tools = ToolSettings { opener, ..tool_settings(DENIED_CLOCK) };
    })
    .await;
    assert!(denied(&stranger, "{}").await.is_some());
}

/// Nothing is proposed that no person may allow.
#[tokio::test]
async fn what_policy_must_not_allow_is_not_proposed() {
    let taint = format!(
        "[taint]\nmarks = {{ {CLOCK} = 'seen' }}\n[[taint.rules]]\nname = 'once'\nwhen = '!run.saw.seen'\n\
         tools = ['{CLOCK}']\nthen = 'ask'\nmatch = [[]]\n"
    );
    let faulty = format!(
        "[[rules]]\nname = 'faulty'\ntool = '{CLOCK}'\nwhen = '1 / (size(run.id) - 5) > 0'\n"
    );
    for (case, table) in [
        ("off", DENIED_CLOCK.replace("propose", "refuse")),
        ("final", DENIED_CLOCK.replace("when =", "final = true\nwhen =")),
        ("taint", format!("{DENIED_CLOCK}{taint}")),
        ("faulty", DENIED_CLOCK.replace("[approvals]", &format!("{faulty}[approvals]"))),
    ] {
        let asking = start(&table).await;
        assert_eq!(denied(&asking.app, "{}").await, None, "{case}");
    }
    let asking = start(DENIED_CLOCK).await;
    let (status, refused) = call(&asking.app, r#"{"x": 1}"#).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (StatusCode::BAD_REQUEST, &json!("invalid_arguments"))
    );
    let body = json!({"tool": "core__metrics_query", "arguments": {"query": "up"}});
    let refused = asking.app.client().post("/tool/exec", &body).await.json();
    assert!(refused["error"]["proposal"].is_null(), "{refused}");
    let long = format!("{{{}}}", " ".repeat(16 * 1024));
    assert_eq!(denied(&asking.app, &long).await, None);
    assert!(
        asking
            .store
            .list_standing(StandingFilter { limit: 9, ..StandingFilter::default() })
            .await
            .unwrap()
            .is_empty()
    );
}

/// A changed rule or definition, and a reload that takes the tool or the setting away, end an approval.
#[tokio::test]
async fn an_approval_ends_with_what_it_was_granted_for() {
    let asking = start(DENIED_CLOCK).await;
    let (app, store) = (&asking.app, &asking.store);
    let present = |table: &str| {
        let table = Some(toml::from_str(table).unwrap());
        let settings = ToolSettings { table, ..ToolSettings::default() };
        let agents = [(String::new(), [CLOCK.to_owned()].into())].into();
        CompiledTools::from_settings(&settings).unwrap().to_present_tools(agents)
    };
    let id = denied(app, "{}").await.unwrap();
    grant(store, &id, 9).await;
    store.set_present_tools(present(DENIED_CLOCK));
    assert!(completes(app, "{}").await);
    for changed in [
        DENIED_CLOCK
            .replace("granted = ['core__get_current_time']", "granted = []")
            .split("[[rules]]")
            .next()
            .unwrap()
            .to_owned(),
        DENIED_CLOCK.replace("'other'", "'another'"),
        DENIED_CLOCK.replace("propose", "refuse"),
    ] {
        store.set_present_tools(present(&changed));
        assert_eq!(denied(app, "{}").await, None, "{changed}");
    }
    store.set_present_tools(present(DENIED_CLOCK));
    assert!(completes(app, "{}").await);
    // A run with another rule has another digest.
    let changed = DENIED_CLOCK.replace("'other'", "'another'");
    let other = start_run("run-2", &changed, store).await;
    store.set_present_tools(present(&changed));
    assert!(denied(&other, "{}").await.is_some_and(|proposal| proposal != id));
    assert_eq!(row(store, &id).await.used, 2);
}

/// A run proposes so often and no more, and finds its open proposals all the same.
#[tokio::test]
async fn the_proposals_of_a_run_are_bounded() {
    let asking = start(DENIED_CLOCK).await;
    let arguments = |blanks: usize| format!("{{{}}}", " ".repeat(blanks));
    let mut proposals = vec![];
    for blanks in 0..33 {
        proposals.push(denied(&asking.app, &arguments(blanks)).await);
    }
    assert!(proposals[..32].iter().all(Option::is_some) && proposals[32].is_none());
    assert_eq!(denied(&asking.app, "{}").await, proposals[0]);
}

/// No more approvals are in force than people can know.
#[tokio::test]
async fn the_standing_approvals_in_force_are_bounded() {
    let asking = start(DENIED_CLOCK).await;
    let id = denied(&asking.app, "{}").await.unwrap();
    fill_with_granted(asking.directory.path());
    let terms = terms(ApprovalScope::Always, 1, HOUR);
    let full = grant_by(&asking.store, &id, "grant-2", terms.clone()).await;
    assert_eq!(full, StandingOutcome::Full);
    asking.store.revoke_standing("sta-7", "grant-2").await.unwrap();
    let granted = grant_by(&asking.store, &id, "grant-2", terms).await;
    assert!(matches!(granted, StandingOutcome::Changed(_)), "{granted:?}");
}

fn fill_with_granted(directory: &Path) {
    let file = rusqlite::Connection::open(directory.join("state.db")).unwrap();
    let not_after = to_unix_millis(SystemTime::now() + HOUR);
    file.execute_batch(&format!(
        "WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 4096)
         INSERT INTO standing_approval (id, state, scope, call_key, digest, run, account, agent, tool, rules, definition, evidence, price, created, not_after, max_uses, granted_by)
         SELECT 'sta-' || n, 'granted', 'always', 'k', 'd', 'r', 'a', 'a', 't', '[]', 'f', '{{}}', 0, 0, {not_after}, 1, 'g' FROM number"
    ))
    .unwrap();
}

/// An answer for the run lets the same call begin later without a question. Other bytes, and other runs, ask.
#[tokio::test]
async fn an_answer_for_the_run_counts_for_later_calls() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let app = start_run("run-1", ASKING_CLOCK, &store).await;
    let asking = AskingApp { app, store, directory };
    let pending = call(&asking.app, "{}").await.1;
    let decided = answer(&asking, &pending, ApprovalScope::Run).await;
    assert!(matches!(decided, DecisionOutcome::Decided(_)), "{decided:?}");
    // The client that comes back receives the end of its call, and makes no second one.
    let first = asking.end(&pending).await;
    assert_eq!(first["status"], "completed");
    assert!(completes(&asking.app, "{}").await && completes(&asking.app, "{}").await);
    let (status, _) = call(&asking.app, "{ }").await;
    assert_eq!(status, StatusCode::ACCEPTED, "another call asks");
    let other = start_run("run-2", ASKING_CLOCK, &asking.store).await;
    assert_eq!(call(&other, "{}").await.1["status"], "pending");
    assert_eq!(asking.executions(), 3);
    let standing = format!("sta-{}", &pending["approval"]["id"].as_str().unwrap()[4..]);
    let used = row(&asking.store, &standing).await;
    assert_eq!(
        (used.state, used.used),
        (StandingState::Granted, 2),
        "the first call has used the answer itself"
    );
}

/// An answer for all runs counts in the next run of the account, as often as it says.
#[tokio::test]
async fn an_answer_for_all_runs_counts_in_the_next_run() {
    let asking = start(ASKING_CLOCK).await;
    let pending = call(&asking.app, "{}").await.1;
    answer(&asking, &pending, ApprovalScope::Always).await;
    assert_eq!(asking.end(&pending).await["status"], "completed");
    let next = start_run("run-2", ASKING_CLOCK, &asking.store).await;
    assert!(
        completes(&next, "{}").await
            && completes(&next, "{}").await
            && completes(&next, "{}").await
    );
    assert_eq!(call(&next, "{}").await.1["status"], "pending", "three uses are spent");
}

/// A question takes no wider answer than its run's configuration offers.
#[tokio::test]
async fn an_answer_has_an_offered_scope() {
    let asking = start(&ASKING_CLOCK.replace("'run', 'always'", "'run'")).await;
    let pending = call(&asking.app, "{}").await.1;
    let wide = answer(&asking, &pending, ApprovalScope::Always).await;
    assert_eq!(wide, DecisionOutcome::ScopeNotOffered);
    assert!(matches!(
        answer(&asking, &pending, ApprovalScope::Run).await,
        DecisionOutcome::Decided(_)
    ));
    assert_eq!(asking.end(&pending).await["status"], "completed");
}

async fn answer(asking: &AskingApp, pending: &Value, scope: ApprovalScope) -> DecisionOutcome {
    let row = asking.row(pending).await;
    let (terms, account) = (terms(scope, 3, HOUR), "acct-1".to_owned());
    let standing = Some(StandingAnswer { terms, owner: "grant-1".to_owned(), account });
    let decision = ApprovalDecision { standing, ..decision(true, &row.digest) };
    asking.store.decide(&row.id, decision, asking.store.read_time()).await.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever happens in whatever order, a standing approval moves forward only, and no more calls begin than it says.
    #[test]
    fn a_standing_approval_moves_forward_only(
        steps in proptest::collection::vec(0..5_u8, 1..16),
        max_uses in 1..4_u32,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let store = open_store(directory.path());
            assert_eq!(store.propose(proposal("sta-1")).await.unwrap(), ProposalOutcome::New);
            let (mut state, mut begun) = (StandingState::Proposed, 0);
            for step in steps {
                begun += u32::from(take_step(&store, step, max_uses).await);
                let row = row(&store, "sta-1").await;
                assert!(row.state == state || state.may_become(row.state), "{step}: {state:?} {row:?}");
                assert_eq!(row.used, begun);
                state = row.state;
            }
            assert!(begun <= max_uses);
        });
    }
}

/// Takes a step, and returns true if a call may begin.
async fn take_step(store: &ApprovalStore, step: u8, max_uses: u32) -> bool {
    match step {
        0 => {
            let terms = terms(ApprovalScope::Run, max_uses, HOUR);
            grant_by(store, "sta-1", "grant-2", terms).await;
        }
        1 | 2 => return store.use_standing(("sta-1", "d"), "run-1").await.unwrap().is_some(),
        3 => {
            store.revoke_standing("sta-1", "grant-2").await.unwrap();
        }
        _ => {
            store.withdraw_run("run-1", store.read_time()).await.unwrap();
        }
    }
    false
}

fn proposal(id: &str) -> StandingApproval {
    let text = str::to_owned;
    StandingApproval {
        id: text(id),
        state: StandingState::Proposed,
        scope: ApprovalScope::Always,
        key: text("k"),
        digest: text("d"),
        run: text("run-1"),
        owner: None,
        account: text("acct-1"),
        agent: text("a"),
        tool: text("t"),
        rules: vec![text("r")],
        definition: text("f"),
        arguments: Some(text("{}")),
        evidence: BTreeMap::new(),
        price: Nanodollars::ZERO,
        created_ms: 0,
        not_after_ms: to_unix_millis(SystemTime::now() + HOUR),
        max_uses: 1,
        used: 0,
        granted_ms: None,
        by: None,
        reason: None,
        revoked_by: None,
    }
}

/// The database itself refuses a step that is not an arrow of the diagram, and one use too many.
#[test]
fn the_database_refuses_a_wrong_step_of_a_standing_approval() {
    for from in StandingState::ALL {
        for to in StandingState::ALL {
            let file = rusqlite::Connection::open_in_memory().unwrap();
            for step in GRANT_SCHEMA.migrations.iter().chain(APPROVAL_SCHEMA.migrations) {
                file.execute_batch(step).unwrap();
            }
            let insert = "INSERT INTO standing_approval (id, state, scope, call_key, digest, run, account, agent, tool, rules, definition, evidence, price, created, not_after, max_uses)
                          VALUES ('a', 'proposed', 'run', 'k', 'd', 'r', 'a', 'a', 't', '[]', 'f', '{}', 0, 0, 1, 1)";
            file.execute_batch(insert).unwrap();
            let set = |state: StandingState| {
                let update = "UPDATE standing_approval SET state = ?1, granted_by = 'g'";
                file.execute(update, [state.as_str()]).is_ok()
            };
            // Each state is reached along the arrows.
            if matches!(from, StandingState::Granted | StandingState::Spent) {
                assert!(set(StandingState::Granted));
            }
            if !matches!(from, StandingState::Proposed | StandingState::Granted) {
                assert!(set(from));
            }
            assert_eq!(set(to), from.may_become(to), "{from:?} {to:?}");
            let more = "UPDATE standing_approval SET used = 2, state = 'granted'";
            assert!(file.execute(more, []).is_err());
        }
    }
}

const HOUR: Duration = Duration::from_hours(1);

const DENIED_CLOCK: &str = "
granted = ['core__get_current_time']
[[rules]]
name = 'closed'
tool = 'core__get_current_time'
when = \"run.id == 'other'\"
[approvals]
on_denial = 'propose'
";

const ASKING_CLOCK: &str = "
granted = ['core__get_current_time']
[[rules]]
name = 'ask-clock'
tool = 'core__get_current_time'
approve = 'ask'
[approvals]
hold = '0s'
scopes = ['once', 'run', 'always']
";
