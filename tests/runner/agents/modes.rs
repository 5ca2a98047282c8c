//! T7: Tests of the modes of agents: what they take away from the tools, the connections, the workspace and the provider's
//! capabilities of a run, in sandboxes of the embedded driver.

use std::fs;

use cogni_gateway::cli::explain;
use serde_json::{Value, json};

use super::run_command::AgentRuns;
use super::{AgentDirectory, PLAIN, agent_definition};

/// Writes the gateway's file, three tools and a catalog with one agent, which has all of them and the modes in `more`.
fn caller_flags(runs: &AgentRuns, more: &str, script: &str) -> Vec<String> {
    let (tools, agents) = (runs.path("tools"), runs.path("agents"));
    for directory in [&tools, &agents] {
        fs::create_dir_all(directory).unwrap();
    }
    let write = "cat /workspace/.cogni/messages.json; touch /workspace/made || echo no";
    for (name, access) in [("run__free", "none"), ("run__read", "ro"), ("run__write", "rw")] {
        let text = format!(
            "name = '{name}'\ndescription = 'a test'\nargv = ['/bin/sh', '-c', '''{write}''']\nworkspace = '{access}'\n"
        );
        fs::write(tools.join(format!("{name}.toml")), text).unwrap();
    }
    fs::write(runs.path("gateway.toml"), GATEWAY).unwrap();
    let names = "['core__get_current_time', 'run__free', 'run__read', 'run__write', 'connect__docs', 'connect__other']";
    let text = format!(
        "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\ntools = {names}\nargv = ['sh', '-c', '''{script}''', '${{MESSAGE}}']\n{more}"
    );
    fs::write(agents.join("caller.toml"), text).unwrap();
    let flags = "--config gateway.toml --agents-dir agents --agent caller --message hello --model m-1 --audit-log-path audit.jsonl";
    flags.split(' ').map(str::to_owned).collect()
}

/// The end of a run: the lines that its script has printed, and the records of its refusals.
struct CallerEnd {
    printed: String,
    refused: Vec<Value>,
}

impl CallerEnd {
    fn listed_tools(&self) -> Vec<&str> {
        let lines = self.printed.lines().filter_map(|line| line.strip_prefix("tool "));
        lines.collect()
    }
}

async fn run_caller(more: &str, script: &str) -> CallerEnd {
    let runs = AgentRuns::new().await;
    let list =
        r#"/run/cogni-tool list | tr ',{' '\n\n' | sed -n 's/^"name":"\(.*__.*\)"/tool \1/p' >&2"#;
    let flags = caller_flags(&runs, more, &format!("{list}\n{script}"));
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let result = runs.run(&flags).await;
    let log = fs::read_to_string(runs.path("audit.jsonl")).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let refused = records.filter(|record| record["event"] == "tool.refused").collect();
    CallerEnd { printed: result["stderr"].as_str().unwrap().to_owned(), refused }
}

/// T7: a mode that is off takes every tool and connection of its group away, and the others stay.
#[tokio::test]
async fn a_mode_takes_a_group_away() {
    let all = run_caller("", "env | grep -c ^DOCS_URL >&2").await;
    assert_eq!(
        all.listed_tools(),
        ["core__get_current_time", "run__free", "run__read", "run__write"],
        "{}",
        all.printed
    );
    assert!(all.printed.ends_with("\n1\n"), "{}", all.printed);
    let calls = "
        /run/cogni-tool exec run__free >&2
        /run/cogni-tool exec core__get_current_time >&2
        env | grep ^DOCS_URL >&2
        wget -q -O - http://localhost:8080/connect/docs/x >&2; wget -S -q -O - http://localhost:8080/connect/other/x >&2; true
    ";
    let off = run_caller("[modes]\ncommands = 'off'\nweb = 'off'\n", calls).await;
    assert_eq!(off.listed_tools(), [] as [&str; 0], "{}", off.printed);
    assert!(!off.printed.contains("DOCS_URL"), "{}", off.printed);
    let named: Vec<_> =
        off.refused.iter().map(|record| (&record["layer"], &record["rule"])).collect();
    let (agent, commands, web) = (json!("agent"), json!("modes.commands"), json!("modes.web"));
    assert_eq!(named, [(&agent, &commands), (&agent, &web)]);
    // The agent cannot tell a mode from a tool that does not exist.
    let is_hidden = off.printed.contains("\"layer\":\"run\"") && !off.printed.contains("modes");
    assert!(is_hidden, "{}", off.printed);
}

/// T7, R6: `ro` takes the tools away that write to the workspace, and the agent's own sandbox reads it only.
#[tokio::test]
async fn a_read_only_workspace_takes_the_write_tools_away() {
    let script = "
        grep -c hello /workspace/.cogni/messages.json >&2
        touch /workspace/own 2>/dev/null || echo agent cannot write >&2
        /run/cogni-tool exec run__read >&2
        /run/cogni-tool exec run__write >&2
    ";
    let end = run_caller("[modes]\nworkspace = 'ro'\n", script).await;
    assert_eq!(end.listed_tools(), ["core__get_current_time", "run__free", "run__read"]);
    assert!(end.printed.contains("\n1\nagent cannot write\n"), "{}", end.printed);
    assert!(end.printed.contains("hello") && end.printed.contains("no\\n"), "{}", end.printed);
    assert_eq!(
        (&end.refused[0]["tool"], &end.refused[0]["layer"]),
        (&json!("run__write"), &json!("sandbox"))
    );
}

/// T7, R6: without a workspace, the agent's home is empty and in memory, and its tools see none.
#[tokio::test]
async fn an_agent_without_a_workspace_gets_its_message_as_an_argument() {
    let script = "
        echo said $0 >&2; ls -A /workspace | wc -l >&2; touch /workspace/own && echo in memory >&2
        /run/cogni-tool exec run__read >&2
    ";
    let end = run_caller("[modes]\nworkspace = 'none'\n", script).await;
    assert_eq!(end.listed_tools(), ["core__get_current_time", "run__free"], "{}", end.printed);
    assert!(end.printed.contains("said hello\n0\nin memory\n"), "{}", end.printed);
    assert_eq!(end.refused[0]["layer"], "sandbox");
}

/// T7: a mode that no call would meet, or that asks where no person can answer, is refused before the run.
#[tokio::test]
async fn a_mode_without_effect_is_refused() {
    let runs = AgentRuns::new().await;
    let mut errors = vec![];
    for (more, commands) in [
        ("commands = 'ask'", "run__*"),
        ("commands = 'ask'", "run__free"),
        ("files = 'off'", "run__*"),
        ("web = 'off'", "run__no"),
        ("web = 'off'", "connect__docs"),
    ] {
        let flags = caller_flags(&runs, &format!("[modes]\n{more}\n"), "true");
        let gateway = GATEWAY.replace("['run__*']", &format!("['{commands}']"));
        fs::write(runs.path("gateway.toml"), gateway).unwrap();
        let flags: Vec<_> =
            flags.iter().map(String::as_str).filter(|flag| !flag.contains("audit")).collect();
        errors.push(runs.wrong_use(&flags).await.lines().last().unwrap().to_owned());
    }
    insta::assert_snapshot!(errors.join("\n"));
}

/// T7: modes that contradict other keys of the agent's file are refused with their key and a remedy.
#[test]
fn modes_that_contradict_the_file_are_refused() {
    let mut messages = vec![];
    for text in [
        "[modes]\ncommands = 'on'\n",
        "[modes]\nfile = 'off'\n",
        "[modes]\nsandbox = 'off'\n",
        "[modes]\nsandbox = 'non-main'\n",
        "capabilities = ['web_fetch']\n[modes]\nweb = 'off'\n",
        "capabilities = ['code_interpreter']\n[modes]\ncommands = 'ask'\n",
        "[modes]\nscope = 'shared'\n",
        "[modes]\nworkspace = 'none'\n",
        "slots = 1\n[modes]\nworkspace = 'ro'\n",
        "setup = 'openclaw'\n[modes]\nworkspace = 'ro'\n",
    ] {
        messages.push(AgentDirectory::new(&format!("{PLAIN}{text}")).load().unwrap_err());
    }
    insta::assert_snapshot!(messages.join("\n"));
}

/// T7, G6: a mode takes the capabilities of the provider away that do the same.
#[test]
fn a_mode_takes_capabilities_of_the_provider_away() {
    let text =
        "[body]\ncapabilities = ['background', 'code_interpreter', 'file_ids', 'web_search']\n";
    let left = |modes: &str| {
        let mut policy = toml::from_str(text).unwrap();
        agent_definition(&format!("[modes]\n{modes}\n")).apply_to(&mut policy).unwrap();
        policy.body.capabilities.iter().map(|left| left.name()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(left(""), "web_search code_interpreter file_ids background");
    assert_eq!(left("web = 'off'"), "code_interpreter file_ids background");
    assert_eq!(left("commands = 'ask'\nfiles = 'off'"), "web_search background");
}

/// T7: `explain --agent` gives the answer for an agent, and names the mode that decides.
#[tokio::test]
async fn explain_names_the_mode_of_an_agent() {
    let runs = AgentRuns::new().await;
    caller_flags(&runs, "[modes]\nweb = 'off'\nworkspace = 'ro'\n", "true");
    let path = |name: &str| runs.path(name).display().to_string();
    let gateway = GATEWAY.replace("'tools'", &format!("'{}'", path("tools")));
    fs::write(runs.path("gateway.toml"), gateway).unwrap();
    let explained = |request: &str| {
        let (config, agents) = (path("gateway.toml"), path("agents"));
        let arguments =
            ["explain", "-", "--config", &config, "--agents-dir", &agents, "--agent", "caller"];
        let matches = explain::command().try_get_matches_from(arguments).unwrap();
        let mut output = vec![];
        explain::run(&matches, request.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap()
    };
    let calls = ["core__get_current_time", "run__free", "run__read", "run__write"];
    let calls = calls.map(|tool| json!({"tool": tool, "arguments": {}}).to_string());
    let fetch = "GET /connect/docs/x HTTP/1.1\nhost: localhost\n\n".to_owned();
    let texts: String = calls.into_iter().chain([fetch]).map(|text| explained(&text)).collect();
    insta::assert_snapshot!(texts);
}

const GATEWAY: &str = "
[tools]
directory = 'tools'
granted = ['core__get_current_time', 'run__free', 'run__read', 'run__write']
[tools.groups]
commands = ['run__*']
web = ['core__get_current_time', 'connect__docs']
[tools.connections.docs]
url = 'https://docs.example.com'
env = { DOCS_URL = '${URL}' }
[tools.connections.other]
url = 'https://other.example.com'
";
