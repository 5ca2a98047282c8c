//! Tests of the policy about tools: layers, conditions, and configurations that cannot be loaded.

use cogni_gateway::cli::explain;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use serde_json::json;

use super::{
    CLOCK, METRICS, accept_query, agent_listing, answer_query, app_with, execute_tool,
    tool_settings,
};
use crate::support::raw_upstream;

/// T7: a condition over the arguments decides, and the audit has the listed arguments only.
#[tokio::test]
async fn a_rule_decides_by_the_arguments() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let table = format!(
        r#"
        granted = ["core__metrics_query"]
        metrics = {{ url = "http://{address}" }}
        [[rules]]
        name = "own-metrics"
        tool = "core__metrics_query"
        when = 'args.query.startsWith("agent_") && run.account == "acct-1"'
        evidence = ["step"]
        match = [{{ args = {{ query = "agent_x" }}, run = {{ account = "acct-1" }} }}]
        not_match = [{{ args = {{ query = "up" }}, run = {{ account = "acct-1" }} }}]
        "#
    );
    let directory = tempfile::tempdir().unwrap();
    let access_log = directory.path().join("access.log");
    let app = app_with(&table, |config| {
        config.access_log = AccessLogDestination::File(access_log.clone());
    })
    .await;
    let (status, denied) =
        execute_tool(&app, json!({"tool": METRICS, "arguments": {"query": "up-secret-1"}})).await;
    assert_eq!(status, 403);
    insta::assert_json_snapshot!(denied, @r#"
    {
      "error": {
        "code": "policy_denied",
        "layer": "tool",
        "message": "the rule `own-metrics` does not allow this call",
        "rule": "own-metrics",
        "type": "tool_error"
      }
    }
    "#);
    let serve = async {
        let (mut stream, line) = accept_query(&listener).await;
        answer_query(&mut stream, r#"{"status":"success","data":"secret-3"}"#).await;
        line
    };
    let arguments =
        json!({"query": "agent_{secret-2} & x", "start": "1", "end": "2", "step": "30s"});
    let call = execute_tool(&app, json!({"tool": METRICS, "arguments": arguments}));
    let ((status, called), line) = tokio::join!(call, serve);
    assert_eq!((status, &called["result"]), (http::StatusCode::OK, &json!("secret-3")));
    assert!(line.starts_with("GET /api/v1/query_range?limit=1000&query=agent_%7B"), "{line}");
    let admitted = &app.recorded("tool.admitted", 1).await[0];
    assert_eq!(admitted["evidence"], json!({"step": "30s"}));
    // Arguments and results are in no record and in no line of the access log.
    let records = format!("{:?}", app.stop().await);
    let lines = std::fs::read_to_string(access_log).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(!records.contains("secret") && !lines.contains("secret"));
}

/// T7: a configuration that is ambiguous or contradicts itself is refused with its key and a remedy.
#[test]
fn a_wrong_table_names_its_key_and_a_remedy() {
    let rule = |text: &str| {
        format!(
            "granted = ['core__get_current_time']\n[[rules]]\nname = 'r'\ntool = 'core__get_current_time'\n{text}"
        )
    };
    let metrics = |text: &str| {
        format!(
            "granted = ['core__metrics_query']\nmetrics = {{ url = 'http://x' }}\n[[rules]]\nname = 'r'\ntool = 'core__metrics_query'\n{text}"
        )
    };
    let tables = [
        "grant = []".to_owned(),
        "granted = ['no_such_tool']".to_owned(),
        "granted = ['core__metrics_query']".to_owned(),
        "granted = ['core__get_current_time', 'core__get_current_time']".to_owned(),
        "granted = ['Bad Name']".to_owned(),
        "granted = []\nmetrics = { url = 'ftp://x' }".to_owned(),
        "[[rules]]\nname = 'r'\ntool = 'core__get_current_time'\nprice_usd = '1'".to_owned(),
        rule(""),
        rule("approve = 'always'"),
        "granted = []\napprovals = { ttl = '0s' }".to_owned(),
        "granted = []\napprovals = { hold = '1h' }".to_owned(),
        rule("budget = { calls = 0 }"),
        rule("price_usd = '2'\nbudget = { cost_usd = '1' }"),
        rule("evidence = ['owner']"),
        rule("match = [{}]"),
        metrics("when = 'args.owner == \"x\"'"),
        metrics("when = 'args.query'"),
        metrics("when = 'args.query == \"up\"'\nmatch = [{ args = { query = 'down' } }]"),
        metrics("when = 'args.query == \"up\"'\nnot_match = [{ args = { query = 'up' } }]"),
        metrics("when = 'args.query == \"up\"'\nmatch = [{ args = { query = 1 } }]"),
    ];
    let errors: Vec<_> =
        tables.iter().map(|table| tool_settings(table).check().unwrap_err().to_string()).collect();
    insta::assert_snapshot!(errors.join("\n"));
    let mut agent = tool_settings("granted = []");
    agent.agent = Some(agent_listing(&[CLOCK]).into());
    insta::assert_snapshot!(agent.check().unwrap_err(), @"`tools.granted`: the agent's file lists the tool `core__get_current_time`, which is not granted here; add it to `tools.granted`, or remove it from `tools` in the agent's file");
}

/// T7: `explain` names the layer that decides about a tool call.
#[test]
fn explain_names_the_layer() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    let table = "[tools]\ngranted = ['core__get_current_time']\n[[tools.rules]]\nname = 'only-ci'\ntool = 'core__get_current_time'\nwhen = 'run.account == \"ci\"'\nprice_usd = '0.5'\n";
    std::fs::write(&file, table).unwrap();
    let explained = |account: &str, tool: &str| {
        let config =
            ["explain", "-", "--config", file.to_str().unwrap(), "--billing-account-id", account];
        let matches = explain::command().try_get_matches_from(config).unwrap();
        let body = json!({"tool": tool, "arguments": {}}).to_string();
        let mut output = vec![];
        explain::run(&matches, body.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap()
    };
    insta::assert_snapshot!(explained("ci", CLOCK), @r"
    tool      core__get_current_time
    allowed   by every layer; rules: only-ci
    reserves  1 call, $0.5
    ");
    insta::assert_snapshot!(explained("other", CLOCK), @r"
    tool      core__get_current_time
    refused   policy_denied: layer tool, rule only-ci
              the rule `only-ci` does not allow this call
    ");
    insta::assert_snapshot!(explained("ci", "no_such_tool"), @r"
    tool      no_such_tool
    refused   policy_denied: layer run, rule granted
              this run may not call this tool; `GET /tool/list` names the tools that it may call
    ");
}
