//! T4: Tests of tool calls that wait for a person: asked once, run once, and only as they were approved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::runner::tool_opener::{CompiledTools, RunToolOpener};
use cogni_gateway::service::auth::GRANT_SCHEMA;
use cogni_gateway::tools::approval::present_tools::PresentTools;
use cogni_gateway::tools::approval::store::{
    ApprovalDecision, ApprovalFilter, ApprovalStore, DecisionOutcome, MAX_QUESTIONS_PER_RUN,
};
use cogni_gateway::tools::approval::{
    APPROVAL_SCHEMA, ApprovalRow, ApprovalState, ApprovalSubject,
};
use futures_util::future::join_all;
use http::StatusCode;
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{CLOCK, execute_tool, read_response, tool_settings};
use crate::support::app::{TestApp, run_config};
use crate::support::client::build_request;

/// A run whose clock asks a person, and the store that the person answers in.
pub(super) struct AskingApp {
    pub(super) app: TestApp,
    pub(super) store: ApprovalStore,
    pub(super) directory: TempDir,
}

impl AskingApp {
    pub(super) async fn start(more: &str) -> Self {
        let more = if more.contains("[approvals]") {
            more.to_owned()
        } else {
            format!("{more}[approvals]\nhold = '0s'\n")
        };
        let directory = tempfile::tempdir().unwrap();
        let store = open_store(directory.path());
        let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
        let opener = Some(Arc::new(opener) as _);
        let table = Some(toml::from_str(&format!("{ASKING_CLOCK}{more}")).unwrap());
        let app = TestApp::with(|config| {
            config.tools = ToolSettings { table, opener, ..ToolSettings::default() };
            config.validate().unwrap();
        })
        .await;
        Self { app, store, directory }
    }

    /// Calls the clock without waiting, and returns the pending answer.
    pub(super) async fn ask(&self) -> Value {
        let (status, pending) = execute_tool(&self.app, json!({"tool": CLOCK, "wait": "0s"})).await;
        assert_eq!((status, &pending["status"]), (StatusCode::ACCEPTED, &json!("pending")));
        pending
    }

    pub(super) async fn row(&self, pending: &Value) -> ApprovalRow {
        self.store.find(pending["approval"]["id"].as_str().unwrap()).await.unwrap().unwrap()
    }

    pub(super) async fn decide(&self, pending: &Value, is_approved: bool) -> DecisionOutcome {
        let row = self.row(pending).await;
        let decision = decision(is_approved, &row.digest);
        self.store.decide(&row.id, decision, SystemTime::now()).await.unwrap()
    }

    /// Waits for the end of a call.
    pub(super) async fn end(&self, pending: &Value) -> Value {
        let path = format!("/tool/exec/{}?wait=1m", pending["id"].as_str().unwrap());
        let (status, ended) = read_response(&self.app.client().get(&path).await);
        assert_eq!(status, 200, "{ended}");
        ended
    }

    pub(super) fn executions(&self) -> usize {
        let records = self.app.records();
        records.iter().filter(|record| record["event"] == "tool.admitted").count()
    }
}

pub(super) fn open_store(directory: &Path) -> ApprovalStore {
    let file = directory.join("state.db");
    ApprovalStore::new(
        SqliteDatabase::open_database(&file, &[GRANT_SCHEMA, APPROVAL_SCHEMA]).unwrap(),
    )
}

pub(super) fn decision(is_approved: bool, digest: &str) -> ApprovalDecision {
    let (digest, by) = (digest.to_owned(), "grant-2".to_owned());
    ApprovalDecision {
        is_approved,
        digest,
        by,
        reason: Some("because".to_owned()),
        raise: None,
        standing: None,
        reply: None,
    }
}

/// A call waits, is approved, runs once, and is found in the records with its question.
#[tokio::test]
async fn an_approved_call_runs_once_and_is_recorded() {
    let asking = AskingApp::start("").await;
    let pending = asking.ask().await;
    let row = asking.row(&pending).await;
    assert_eq!((row.state, row.arguments.as_deref()), (ApprovalState::Pending, Some("{}")));
    assert_eq!(asking.executions(), 0);
    // The same call joins the question, also over MCP, and asks no second time.
    assert_eq!(asking.ask().await, pending);
    let told = call_over_mcp(&asking.app).await;
    let id = pending["approval"]["id"].as_str().unwrap();
    let said = told["content"][0]["text"].as_str().unwrap();
    assert!(said.starts_with("waiting for approval:") && said.contains(id), "{said}");
    assert_eq!((&told["isError"], asking.executions()), (&json!(true), 0));

    assert!(matches!(asking.decide(&pending, true).await, DecisionOutcome::Decided(_)));
    let ended = asking.end(&pending).await;
    assert_eq!((&ended["status"], &ended["cost_usd"]), (&json!("completed"), &json!("0.002")));
    assert_eq!(asking.executions(), 1);
    let row = asking.row(&pending).await;
    assert_eq!((row.state, row.arguments), (ApprovalState::Consumed, None));
    assert_eq!(row.call.as_deref(), ended["id"].as_str());
    // The end was received, so the same call is a new call, with a new question.
    assert_ne!(asking.ask().await["approval"]["id"], pending["approval"]["id"]);
    assert_eq!(asking.executions(), 1);

    let records = asking.app.stop().await;
    let of = |event: &str| records.iter().find(|record| record["event"] == event).unwrap().clone();
    let (asked, resolved, admitted) =
        (of("approval.requested"), of("approval.resolved"), of("tool.admitted"));
    assert_eq!([&asked["approval"], &resolved["approval"], &admitted["approval"]], [id; 3]);
    assert_eq!((&asked["digest"], &resolved["digest"]), (&json!(row.digest), &json!(row.digest)));
    assert_eq!((&resolved["decision"], &resolved["by"]), (&json!("approved"), &json!("grant-2")));
    assert!(resolved["seq"].as_u64() < admitted["seq"].as_u64());
}

/// A client of MCP that calls again after the answer receives the result of the one execution.
#[tokio::test]
async fn a_second_call_over_mcp_receives_the_result() {
    // The budget is spent when the client comes back for the result.
    let asking = AskingApp::start(ONE_CALL).await;
    call_over_mcp(&asking.app).await;
    let listed = asking.store.list(ApprovalFilter { limit: 9, ..ApprovalFilter::default() });
    let rows = listed.await.unwrap();
    assert_eq!(rows.len(), 1);
    let answer = decision(true, &rows[0].digest);
    asking.store.decide(&rows[0].id, answer, SystemTime::now()).await.unwrap();
    asking.app.recorded("tool.settled", 1).await;
    let told = call_over_mcp(&asking.app).await;
    assert_eq!(told["isError"], false, "{told}");
    assert_eq!(asking.executions(), 1);
}

/// 64 clients make the same call at the same time, before and after the answer: one question, one execution.
#[tokio::test(flavor = "multi_thread")]
async fn racing_calls_are_one_question_and_one_execution() {
    let asking = AskingApp::start("").await;
    let race = || async {
        let calls =
            (0..64).map(|_| execute_tool(&asking.app, json!({"tool": CLOCK, "wait": "0s"})));
        join_all(calls).await
    };
    let ids: BTreeSet<_> = race().await.iter().map(|(_, told)| told["id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let pending = asking.ask().await;
    let (_, outcome) = tokio::join!(race(), asking.decide(&pending, true));
    assert!(matches!(outcome, DecisionOutcome::Decided(_)), "{outcome:?}");
    assert_eq!(asking.end(&pending).await["status"], "completed");
    assert_eq!(asking.executions(), 1);
    assert_eq!(asking.app.run.ledger.spent_amount().cost, Nanodollars(2_000_000));
}

/// A denied call does not run, and no person is asked about it again.
#[tokio::test]
async fn a_denied_call_stays_denied() {
    let asking = AskingApp::start("").await;
    let pending = asking.ask().await;
    asking.decide(&pending, false).await;
    asking.end(&pending).await;
    for _ in 0..2 {
        let (status, told) = execute_tool(&asking.app, json!({"tool": CLOCK})).await;
        assert_eq!((status, &told["id"]), (StatusCode::OK, &pending["id"]));
        let error = (&told["error"]["code"], &told["error"]["message"]);
        let message = "a person has denied this call: because";
        assert_eq!(error, (&json!("approval_denied"), &json!(message)));
    }
    let refused = &asking.app.recorded("tool.refused", 1).await[0];
    assert_eq!((&refused["layer"], &refused["rule"]), (&json!("approval"), &json!("ask-clock")));
    assert_eq!(asking.executions(), 0);
    // An answer cannot be changed.
    let again = asking.decide(&pending, true).await;
    assert_eq!(again, DecisionOutcome::Closed(ApprovalState::Denied));
    assert_eq!(asking.executions(), 0);
}

/// Without an answer, the call ends; it can be asked about again.
#[tokio::test]
async fn a_question_without_an_answer_expires() {
    let asking = AskingApp::start("[approvals]\nttl = '1s'\nhold = '0s'\n").await;
    let pending = asking.ask().await;
    assert_eq!(asking.end(&pending).await["error"]["code"], "approval_expired");
    assert_eq!(asking.row(&pending).await.state, ApprovalState::Expired);
    let again = asking.decide(&pending, true).await;
    assert_eq!(again, DecisionOutcome::Closed(ApprovalState::Expired));
    assert_ne!(asking.ask().await["id"], pending["id"]);
    assert_eq!(asking.executions(), 0);
}

/// The budget is spent between the question and the answer: the approved call does not run.
#[tokio::test]
async fn a_spent_budget_stops_an_approved_call() {
    let asking = AskingApp::start(ONE_CALL).await;
    let first = asking.ask().await;
    let (_, second) = execute_tool(
        &asking.app,
        json!({"tool": CLOCK, "arguments": {}, "wait": "0s", "idempotency_key": "k"}),
    )
    .await;
    assert_eq!(second["id"], first["id"]);
    // Blanks make another call: the bytes differ.
    let body = format!(r#"{{"tool": "{CLOCK}", "arguments": {{ }}, "wait": "0s"}}"#);
    let request = build_request(http::Method::POST, "/tool/exec", &body, &[]);
    let (_, other) = read_response(&asking.app.client().send(request).await);
    assert_ne!(other["id"], first["id"]);
    asking.decide(&first, true).await;
    assert_eq!(asking.end(&first).await["status"], "completed");
    asking.decide(&other, true).await;
    assert_eq!(asking.end(&other).await["error"]["code"], "tool_call_budget_exhausted");
    assert_eq!(asking.row(&other).await.state, ApprovalState::Withdrawn);
    assert_eq!(asking.executions(), 1);
}

/// The run ends between the question and the answer: the question is withdrawn, and an answer does not count.
#[tokio::test]
async fn the_end_of_the_run_withdraws_its_questions() {
    let asking = AskingApp::start("").await;
    let pending = asking.ask().await;
    let row = asking.row(&pending).await;
    let AskingApp { app, store, directory: _directory } = asking;
    let records = app.stop().await;
    assert!(records.iter().all(|record| record["event"] != "tool.admitted"));
    let resolved = records.iter().find(|record| record["event"] == "approval.resolved").unwrap();
    assert_eq!(resolved["decision"], "withdrawn");
    let late = store.decide(&row.id, decision(true, &row.digest), SystemTime::now()).await;
    assert_eq!(late.unwrap(), DecisionOutcome::Closed(ApprovalState::Withdrawn));
}

/// A person's yes that comes at the moment of the run's end starts nothing, and the records have the yes.
#[tokio::test]
async fn an_answer_at_the_end_of_the_run_is_recorded() {
    let asking = AskingApp::start("").await;
    let pending = asking.ask().await;
    let row = asking.row(&pending).await;
    // The waiting call does not hear of an answer that another store writes, like one that comes too late for it.
    let other = open_store(asking.directory.path());
    let answer = other.decide(&row.id, decision(true, &row.digest), SystemTime::now()).await;
    assert!(matches!(answer.unwrap(), DecisionOutcome::Decided(_)));
    let AskingApp { app, store, directory: _directory } = asking;
    let records = app.stop().await;
    let of = |event: &str| records.iter().find(|record| record["event"] == event);
    let resolved = of("approval.resolved").unwrap();
    assert_eq!((&resolved["decision"], &resolved["by"]), (&json!("approved"), &json!("grant-2")));
    assert_eq!(of("tool.refused").unwrap()["code"], "approval_withdrawn");
    assert!(of("tool.admitted").is_none());
    assert_eq!(store.find(&row.id).await.unwrap().unwrap().state, ApprovalState::Withdrawn);
}

/// A tool that a reload takes away, or whose definition, rules or agent's list it changes, begins no approved call, and no
/// person is asked about it any more.
#[tokio::test]
async fn a_tool_that_is_configured_no_more_begins_no_call() {
    let asking = AskingApp::start("").await;
    let agents = |agent: &str, tool: &str| {
        BTreeMap::from([(agent.to_owned(), BTreeSet::from([tool.to_owned()]))])
    };
    let present = |more: &str, agents| {
        let table = Some(toml::from_str(&format!("{ASKING_CLOCK}{more}")).unwrap());
        let settings = ToolSettings { table, ..ToolSettings::default() };
        CompiledTools::from_settings(&settings).unwrap().to_present_tools(agents)
    };
    // The run of this test has no agent's name.
    let agent = "";
    let rule = format!("[[rules]]\nname = 'more'\ntool = '{CLOCK}'\nprice_usd = '0.1'\n");
    let taint = format!(
        "[taint]\nmarks = {{ {CLOCK} = 'seen' }}\n[[taint.rules]]\nname = 'once'\nwhen = 'run.saw.seen'\n\
         tools = ['{CLOCK}']\nthen = 'deny'\nmatch = [['seen']]\n"
    );
    for changed in [
        PresentTools::default(),
        present("", agents(agent, "other")),
        present("", agents("other", CLOCK)),
        present(&rule, agents(agent, CLOCK)),
        present(&taint, agents(agent, CLOCK)),
    ] {
        asking.store.set_present_tools(present("", agents(agent, CLOCK)));
        let pending = asking.ask().await;
        asking.store.set_present_tools(changed);
        asking.decide(&pending, true).await;
        assert_eq!(asking.end(&pending).await["error"]["code"], "approval_lost");
        let (status, refused) = execute_tool(&asking.app, json!({"tool": CLOCK})).await;
        assert_eq!(
            (status, &refused["error"]["code"]),
            (StatusCode::FORBIDDEN, &json!("approval_lost"))
        );
    }
    assert_eq!(asking.executions(), 0);
    asking.store.set_present_tools(present("", agents(agent, CLOCK)));
    let pending = asking.ask().await;
    asking.decide(&pending, true).await;
    assert_eq!(asking.end(&pending).await["status"], "completed");
}

/// An approval that is withdrawn, used or expired between the answer and the beginning starts nothing.
#[tokio::test]
async fn an_approval_counts_for_its_digest_once_and_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let consume = async |id: &str, digest: &str, second| {
        store.consume(id, digest, Some("tc-1"), time(second)).await.unwrap()
    };
    for id in ["apr-used", "apr-late", "apr-gone"] {
        drop(store.ask(question(id)).await.unwrap().unwrap());
        assert!(!consume(id, "d-1", 1).await, "no person has approved it");
        let other = store.decide(id, decision(true, "d-2"), time(1)).await.unwrap();
        assert_eq!(other, DecisionOutcome::OtherDigest);
        let decided = store.decide(id, decision(true, "d-1"), time(1)).await.unwrap();
        assert!(matches!(decided, DecisionOutcome::Decided(_)));
        assert!(!consume(id, "d-2", 1).await, "it is another call");
    }
    let racing = (0..64).map(|_| consume("apr-used", "d-1", 2));
    let begun = join_all(racing).await.into_iter().filter(|may_begin| *may_begin).count();
    assert_eq!(begun, 1);
    assert!(!consume("apr-late", "d-1", NOT_AFTER).await);
    assert_eq!(store.withdraw_run("run-1", time(3)).await.unwrap(), 2);
    assert!(!consume("apr-gone", "d-1", 2).await);
    // An answer that comes too late does not count, although nothing has noticed the time yet.
    drop(store.ask(question("apr-slow")).await.unwrap().unwrap());
    let late = store.decide("apr-slow", decision(true, "d-1"), time(NOT_AFTER)).await.unwrap();
    assert_eq!(late, DecisionOutcome::Closed(ApprovalState::Expired));
}

/// A run can ask so often and no more.
#[tokio::test]
async fn the_questions_of_a_run_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let ask = async |number| {
        let asked = store.ask(question(&format!("apr-{number}"))).await.unwrap();
        asked.is_some()
    };
    let asked = join_all((0..=MAX_QUESTIONS_PER_RUN).map(ask)).await;
    assert_eq!(asked.iter().filter(|is_asked| **is_asked).count(), 256);
}

/// Eight calls wait, and a further one is refused.
#[tokio::test]
async fn the_waiting_calls_of_a_run_are_bounded() {
    let asking = AskingApp::start("").await;
    for blanks in 0..9 {
        let arguments = " ".repeat(blanks);
        let body = format!(r#"{{"tool": "{CLOCK}", "arguments": {{{arguments}}}, "wait": "0s"}}"#);
        let request = build_request(http::Method::POST, "/tool/exec", &body, &[]);
        let (status, told) = read_response(&asking.app.client().send(request).await);
        if blanks < 8 {
            assert_eq!(status, StatusCode::ACCEPTED, "{told}");
        } else {
            assert_eq!(
                (status, &told["error"]["code"]),
                (StatusCode::TOO_MANY_REQUESTS, &json!("too_many_approvals"))
            );
        }
    }
}

/// A rule that asks is refused where no person can answer.
#[tokio::test]
async fn a_rule_that_asks_needs_someone_who_answers() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = run_config(directory.path(), ([127, 0, 0, 1], 1).into());
    config.tools = tool_settings(ASKING_CLOCK);
    let error = GatewayProcess::build_process(config).err();
    insta::assert_snapshot!(error.unwrap(), @r#"`tools.rules`: the rule `ask-clock` has `approve = "ask"`, and no person can answer here; take `approve` out, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers"#);
}

/// Each part of a call is in its digest.
#[test]
fn every_part_of_a_call_is_in_its_digest() {
    let subject = ApprovalSubject {
        run: "run-1",
        attempt: "0",
        agent: "a",
        tool: "t",
        definition: "f",
        program: None,
        arguments: "x",
        policy: "p",
        agent_policy: "o",
        scope: "once",
        not_after_ms: 1,
    };
    let others = [
        ApprovalSubject { run: "run-2", ..subject.clone() },
        ApprovalSubject { attempt: "1", ..subject.clone() },
        ApprovalSubject { agent: "b", ..subject.clone() },
        ApprovalSubject { tool: "u", ..subject.clone() },
        ApprovalSubject { definition: "g", ..subject.clone() },
        ApprovalSubject { program: Some("b"), ..subject.clone() },
        ApprovalSubject { arguments: "y", ..subject.clone() },
        ApprovalSubject { policy: "q", ..subject.clone() },
        ApprovalSubject { agent_policy: "r", ..subject.clone() },
        ApprovalSubject { scope: "run", ..subject.clone() },
        ApprovalSubject { not_after_ms: 2, ..subject.clone() },
    ];
    let digests: BTreeSet<_> =
        others.iter().chain([&subject]).map(ApprovalSubject::digest).collect();
    assert_eq!(digests.len(), 12);
}

/// The database itself refuses a step that is not an arrow of the diagram.
#[test]
fn the_database_refuses_a_wrong_step() {
    for from in ApprovalState::ALL {
        for to in ApprovalState::ALL {
            let file = rusqlite::Connection::open_in_memory().unwrap();
            for step in GRANT_SCHEMA.migrations.iter().chain(APPROVAL_SCHEMA.migrations) {
                file.execute_batch(step).unwrap();
            }
            let insert = "INSERT INTO approval (id, run, agent, tool, rule, definition, policy, digest, evidence, price, state, requested, not_after)
                          VALUES ('a', 'r', 'a', 't', 'r', 'd', 'p', 'd', '{}', 0, 'pending', 0, 1)";
            file.execute_batch(insert).unwrap();
            let set = |state: ApprovalState| {
                file.execute("UPDATE approval SET state = ?1", [state.as_str()]).is_ok()
            };
            // Each state is reached along the arrows.
            if from == ApprovalState::Consumed {
                assert!(set(ApprovalState::Approved));
            }
            if from != ApprovalState::Pending {
                assert!(set(from));
            }
            assert_eq!(set(to), from.may_become(to), "{from:?} {to:?}");
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Approve,
    Deny,
    Consume,
    Expire,
    Withdraw,
    Restart,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever happens in whatever order and at whatever time, a question moves forward only and lets one call begin.
    #[test]
    fn a_question_moves_forward_only(
        steps in proptest::collection::vec((0..6_u8, 0..NOT_AFTER + 2), 1..12),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let store = open_store(directory.path());
            drop(store.ask(question("apr-1")).await.unwrap().unwrap());
            let (mut state, mut begun) = (ApprovalState::Pending, 0);
            for (step, second) in steps {
                let step = [Step::Approve, Step::Deny, Step::Consume, Step::Expire, Step::Withdraw, Step::Restart][usize::from(step)];
                begun += usize::from(take_step(&store, step, second).await);
                let row = store.find("apr-1").await.unwrap().unwrap();
                assert!(row.state == state || state.may_become(row.state), "{step:?}: {state:?} {row:?}");
                // A call begins only by an answer, and the answer stays known.
                if row.state == ApprovalState::Consumed {
                    assert_eq!(row.by.as_deref(), Some("grant-2"));
                }
                state = row.state;
            }
            assert_eq!(begun, usize::from(state == ApprovalState::Consumed));
        });
    }
}

/// Takes a step, and returns true if a call may begin.
async fn take_step(store: &ApprovalStore, step: Step, second: u64) -> bool {
    let now = time(second);
    match step {
        Step::Approve | Step::Deny => {
            let is_approved = matches!(step, Step::Approve);
            store.decide("apr-1", decision(is_approved, "d-1"), now).await.unwrap();
        }
        Step::Consume => return store.consume("apr-1", "d-1", Some("tc-1"), now).await.unwrap(),
        Step::Expire => {
            store.close("apr-1", (ApprovalState::Expired, "late"), now).await.unwrap();
        }
        Step::Withdraw => {
            store.withdraw_run("run-1", now).await.unwrap();
        }
        Step::Restart => {
            store.withdraw_all(now).await.unwrap();
        }
    }
    false
}

pub(super) fn question(id: &str) -> ApprovalRow {
    let text = str::to_owned;
    ApprovalRow {
        id: text(id),
        run: text("run-1"),
        account: text("acct-1"),
        agent: text("a"),
        tool: text("t"),
        rule: text("r"),
        definition: text("f"),
        policy: text("p"),
        digest: text("d-1"),
        arguments: Some(text("{}")),
        evidence: BTreeMap::new(),
        price: Nanodollars::ZERO,
        state: ApprovalState::Pending,
        requested_ms: 0,
        not_after_ms: i64::try_from(NOT_AFTER * 1000).unwrap(),
        resolved_ms: None,
        by: None,
        reason: None,
        call: None,
        budget: None,
        raised: None,
        standing: None,
    }
}

fn time(second: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(second)
}

/// Calls the clock over MCP, and returns the result of the call.
async fn call_over_mcp(app: &TestApp) -> Value {
    let params = json!({"name": CLOCK, "arguments": {}});
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
    let headers = [("mcp-protocol-version", "2025-11-25")];
    app.client().post_with("/mcp", &message, &headers).await.json()["result"].clone()
}

/// The second after which the questions of these tests take no answer.
const NOT_AFTER: u64 = 9;

const ASKING_CLOCK: &str = "
granted = ['core__get_current_time']
[[rules]]
name = 'ask-clock'
tool = 'core__get_current_time'
price_usd = '0.002'
approve = 'ask'
";

const ONE_CALL: &str = "
[[rules]]
name = 'one'
tool = 'core__get_current_time'
budget = { calls = 1 }
";
