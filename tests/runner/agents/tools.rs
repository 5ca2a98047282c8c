//! T1, T5, T7: Tests of tools called from inside a sandbox of the embedded driver, with the client in `cogni-init`.

use std::fs;

use serde_json::{Value, json};

use super::run_command::AgentRuns;

/// Writes the gateway's file and a catalog with one agent, whose script calls tools. Returns the flags of its run.
fn caller_flags(runs: &AgentRuns, tools: &str, script: &str) -> Vec<String> {
    fs::write(runs.path("gateway.toml"), GATEWAY).unwrap();
    let agents = runs.path("agents");
    fs::create_dir_all(&agents).unwrap();
    let text = format!(
        "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\n{tools}\nargv = ['sh', '-c', '''{script}''']\n"
    );
    fs::write(agents.join("caller.toml"), text).unwrap();
    let flags = "--config gateway.toml --agents-dir agents --agent caller --message x --model m-1";
    flags.split(' ').map(str::to_owned).collect()
}

async fn call_tool(runs: &AgentRuns, tools: &str, script: &str) -> Value {
    let flags = caller_flags(runs, tools, script);
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    runs.run(&flags).await
}

/// T1, T5: An agent calls a granted tool with `cogni-tool`, and the run's result has the cost.
#[tokio::test]
async fn an_agent_calls_a_tool_from_its_sandbox() {
    let runs = AgentRuns::new().await;
    let script = "
        /run/cogni-tool list >&2
        /run/cogni-tool exec core__get_current_time >&2; echo exit $? >&2
        /cogni-init --tool exec core__get_current_time {} >&2; echo exit $? >&2
        /run/cogni-tool exec core__metrics_query {} >&2; echo exit $? >&2
        /run/cogni-tool exec 'no such tool' >&2; echo exit $? >&2
    ";
    let result = call_tool(&runs, "tools = ['core__get_current_time']", script).await;
    let stderr = result["stderr"].as_str().unwrap();
    let exits: Vec<_> = stderr.lines().filter(|line| line.starts_with("exit ")).collect();
    assert_eq!(exits, ["exit 0", "exit 1", "exit 1", "exit 2"], "{stderr}");
    let answers: Vec<Value> =
        stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(answers[0]["tools"][0]["name"], "core__get_current_time");
    assert!(answers[1]["result"]["unix_seconds"].is_u64(), "{stderr}");
    assert_eq!(answers[2]["error"]["code"], "tool_call_budget_exhausted");
    assert_eq!(answers[3]["error"]["code"], "policy_denied");
    assert_eq!(result["usage"]["cost_usd"], "0.25");
}

/// T7: An agent whose file lists no tool has none, whatever its gateway grants.
#[tokio::test]
async fn an_agent_without_a_list_has_no_tools() {
    let runs = AgentRuns::new().await;
    let script = "/run/cogni-tool list >&2; /run/cogni-tool exec core__get_current_time >&2";
    let result = call_tool(&runs, "", script).await;
    let stderr = result["stderr"].as_str().unwrap();
    let answers: Vec<Value> =
        stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(answers[0], json!({"tools": []}), "{stderr}");
    assert_eq!(answers[1]["error"]["code"], "policy_denied", "{stderr}");
    assert_eq!(result["usage"]["cost_usd"], Value::Null);
}

/// T7: An agent whose file lists a tool that its gateway does not grant is a contradiction, found before the run.
#[tokio::test]
async fn a_contradiction_between_layers_ends_before_the_run() {
    let runs = AgentRuns::new().await;
    let flags = caller_flags(&runs, "tools = ['core__metrics_query']", "true");
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let error = runs.wrong_use(&flags).await;
    insta::assert_snapshot!(error, @"error: `tools.granted`: the agent's file lists the tool `core__metrics_query`, which is not granted here; add it to `tools.granted`, or remove it from `tools` in the agent's file");
}

const GATEWAY: &str = "
    [tools]
    granted = ['core__get_current_time']
    [[tools.rules]]
    name = 'clock'
    tool = 'core__get_current_time'
    when = 'agent.name == \"caller\"'
    price_usd = '0.25'
    budget = { calls = 1 }
";
