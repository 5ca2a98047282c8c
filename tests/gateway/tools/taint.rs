//! T9: Tests of taint rules: what a run has seen decides whether a tool asks a person, or is denied.

use std::sync::Arc;
use std::time::SystemTime;

use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::tools::approval::store::ApprovalStore;
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::approvals::{decision, open_store};
use super::{CLOCK, METRICS, accept_query, answer_query, execute_tool, start_app, tool_settings};
use crate::support::app::TestApp;
use crate::support::raw_upstream;

const TAINT: &str = "
[taint]
marks = { core__metrics_query = 'untrusted' }
[[taint.rules]]
name = 'seen-the-web'
when = 'run.saw.untrusted'
tools = ['*__get_*']
match = [['untrusted']]
not_match = [[]]
";

fn table(address: impl std::fmt::Display, effect: &str, more: &str) -> String {
    format!(
        "granted = ['{CLOCK}', '{METRICS}']\nmetrics = {{ url = 'http://{address}' }}\n{more}{TAINT}then = '{effect}'\n"
    )
}

/// Calls the marked tool once, to its end.
async fn see(app: &TestApp, listener: &TcpListener) {
    let body = json!({"tool": METRICS, "arguments": {"query": "up"}});
    let (called, ()) = tokio::join!(execute_tool(app, body), async {
        let (mut stream, _) = accept_query(listener).await;
        answer_query(&mut stream, r#"{"status":"success","data":1}"#).await;
    });
    assert_eq!((called.0, &called.1["status"]), (StatusCode::OK, &json!("completed")));
}

/// A run may use the guarded tool until it has seen the mark. Afterwards the rule denies it, for good.
#[tokio::test]
async fn a_run_that_has_seen_a_mark_is_denied() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&table(address, "deny", "")).await;
    let call = || execute_tool(&app, json!({"tool": CLOCK}));
    assert_eq!(call().await.0, StatusCode::OK);
    see(&app, &listener).await;
    for _ in 0..2 {
        let (status, denied) = call().await;
        assert_eq!(
            (status, &denied["error"]["code"], &denied["error"]["rule"]),
            (StatusCode::FORBIDDEN, &json!("policy_denied"), &json!("seen-the-web"))
        );
    }
    // The marked tool itself is not guarded.
    see(&app, &listener).await;
    let records = app.stop().await;
    let refused = records.iter().filter(|record| record["event"] == "tool.refused");
    assert!(refused.clone().all(|record| record["rule"] == "seen-the-web"));
    assert_eq!(refused.count(), 2);
}

/// A run and the store in which a person answers.
struct AskingRun {
    app: TestApp,
    store: ApprovalStore,
    _directory: TempDir,
}

async fn start_asking(table: &str) -> AskingRun {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
    let app = TestApp::with(|config| {
        let opener = Some(Arc::new(opener) as _);
        config.tools = ToolSettings { opener, ..tool_settings(table) };
        config.validate().unwrap();
    })
    .await;
    AskingRun { app, store, _directory: directory }
}

impl AskingRun {
    async fn answer_yes(&self, pending: &Value) {
        let id = pending["approval"]["id"].as_str().unwrap();
        let row = self.store.find(id).await.unwrap().unwrap();
        self.store.decide(id, decision(true, &row.digest), SystemTime::now()).await.unwrap();
    }

    async fn end(&self, pending: &Value) -> Value {
        let path = format!("/tool/exec/{}?wait=1m", pending["id"].as_str().unwrap());
        self.app.client().get(&path).await.json()
    }
}

/// A rule that asks lets the call wait for a person, who sees the rule and allows this one call.
#[tokio::test]
async fn a_run_that_has_seen_a_mark_asks() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let asking = start_asking(&table(address, "ask", "")).await;
    let call = || execute_tool(&asking.app, json!({"tool": CLOCK, "wait": "0s"}));
    assert_eq!(call().await.0, StatusCode::OK);
    see(&asking.app, &listener).await;
    let (status, pending) = call().await;
    assert_eq!((status, &pending["status"]), (StatusCode::ACCEPTED, &json!("pending")));
    let id = pending["approval"]["id"].as_str().unwrap();
    assert_eq!(asking.store.find(id).await.unwrap().unwrap().rule, "seen-the-web");
    asking.answer_yes(&pending).await;
    assert_eq!(asking.end(&pending).await["status"], "completed");
    assert_eq!(call().await.0, StatusCode::ACCEPTED, "the next call asks again");
}

/// The run sees the mark between the question and the answer: the approved call is denied.
#[tokio::test]
async fn a_mark_that_is_seen_meanwhile_counts() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let rule = format!("[[rules]]\nname = 'ask-clock'\ntool = '{CLOCK}'\napprove = 'ask'\n");
    let asking = start_asking(&table(address, "deny", &rule)).await;
    let (_, pending) = execute_tool(&asking.app, json!({"tool": CLOCK, "wait": "0s"})).await;
    see(&asking.app, &listener).await;
    asking.answer_yes(&pending).await;
    assert_eq!(asking.end(&pending).await["error"]["code"], "policy_denied");
    let records = asking.app.records();
    let is_clock = |record: &&Value| record["event"] == "tool.admitted" && record["tool"] == CLOCK;
    assert_eq!(records.iter().filter(is_clock).count(), 0);
}

/// Of 64 racing calls of a tool that may run only in a run that has not seen it, at most one runs.
#[tokio::test]
async fn racing_calls_see_each_other() {
    let table = format!(
        "granted = ['{CLOCK}']\n[taint]\nmarks = {{ {CLOCK} = 'seen' }}\n[[taint.rules]]\nname = 'once'\n\
         when = 'run.saw.seen'\ntools = ['{CLOCK}']\nthen = 'deny'\nmatch = [['seen']]\n"
    );
    let app = start_app(&table).await;
    let calls = join_all((0..64).map(|_| execute_tool(&app, json!({"tool": CLOCK})))).await;
    let begun = calls.iter().filter(|(status, _)| *status == StatusCode::OK).count();
    assert!(begun <= 1, "{begun} calls have run");
    let (status, _) = execute_tool(&app, json!({"tool": CLOCK})).await;
    assert_eq!(status == StatusCode::OK, begun == 0);
    let records = app.stop().await;
    let admitted = records.iter().filter(|record| record["event"] == "tool.admitted");
    assert_eq!(admitted.count(), 1);
}

/// A rule that asks is refused where no person can answer, and a wrong table names its key and a remedy.
#[test]
fn a_wrong_taint_table_is_refused() {
    let with = |marks: &str, rule: &str| {
        format!(
            "granted = ['{CLOCK}']\n[taint]\nmarks = {{ {marks} }}\n[[taint.rules]]\nname = 'r'\n{rule}"
        )
    };
    let clock = format!("{CLOCK} = 'seen'");
    let rule = |when: &str, tools: &str, examples: &str| {
        format!("when = '{when}'\ntools = [{tools}]\nthen = 'deny'\n{examples}\n")
    };
    let good = "match = [['seen']]";
    let tables = [
        with("no__tool = 'seen'", &rule("run.saw.seen", "'*'", good)),
        with(&format!("{CLOCK} = 'Seen it'"), &rule("run.saw.seen", "'*'", good)),
        with(&clock, &rule("run.saw.other", "'*'", good)),
        with(&clock, &rule("run.id == \"x\"", "'*'", good)),
        with(&clock, &rule("run.saw.seen", "", good)),
        with(&clock, &rule("run.saw.seen", "'mail__*'", good)),
        with(&clock, &rule("run.saw.seen", "'*'", "")),
        with(&clock, &rule("run.saw.seen", "'*'", "match = [[]]")),
        with(&clock, &rule("run.saw.seen", "'*'", "match = [['seen']]\nnot_match = [['seen']]")),
        with(&clock, &rule("run.saw.seen", "'*'", "match = [['other']]")),
        with(&clock, &rule("true", "'*'", good)),
        with(&clock, "when = 'run.saw.seen'\ntools = ['*']\nthen = 'warn'\n"),
        format!("granted = ['{CLOCK}']\n[taint]\nmarks = {{ {clock} }}\n"),
    ];
    let errors: Vec<_> =
        tables.iter().map(|table| tool_settings(table).check().unwrap_err().to_string()).collect();
    insta::assert_snapshot!(errors.join("\n"));
}
