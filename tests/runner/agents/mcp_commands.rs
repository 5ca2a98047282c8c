//! T2: Tests of servers of MCP that are programs: each runs in a sandbox of its own, which serves the run to its end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};

use super::run_command::AgentRuns;

/// A server whose tool does what its argument `how` says.
const SERVER: &str = r#"
import json, os, sys, time
calls = 0
print('a greeting that is no message', flush=True)
for line in sys.stdin:
    try: message = json.loads(line)
    except ValueError: continue
    own = message.get('id')
    def say(**more): print(json.dumps({'jsonrpc': '2.0', 'id': own, **more}), flush=True)
    method = message['method']
    if method == 'server/discover' and os.environ.get('SILENT'):
        continue
    elif method == 'initialize':
        say(result={'protocolVersion': '2025-06-18', 'capabilities': {}, 'serverInfo': {'name': 'x', 'version': '1'}})
    elif method == 'tools/list':
        how = {'type': 'object', 'properties': {'how': {'type': 'string'}}}
        say(result={'tools': [{'name': 'act', 'description': os.environ.get('ABOUT', 'acts'), 'inputSchema': how}]})
    elif method == 'tools/call':
        calls += 1
        how = message['params']['arguments'].get('how')
        text = str(calls)
        if how == 'crash': sys.exit(3)
        if how == 'tell': text = os.environ['TOKEN']
        if how == 'ping':
            print('{"jsonrpc":"2.0","id":"p","method":"ping"}', flush=True)
            text = sys.stdin.readline().strip()
        if how == 'deaf':
            while True: print('{"jsonrpc":"2.0","id":"p","method":"ping"}')
        if how == 'hang': time.sleep(1000)
        while how == 'flood': print('x' * 4096)
        if how == 'large': text = 'x' * 1000000
        if how == 'ask':
            print(json.dumps({'jsonrpc': '2.0', 'id': 'e1', 'method': 'elicitation/create', 'params': {}}), flush=True)
            continue
        if how == 'chat':
            print('{"jsonrpc":"2.0","method":"notifications/message","params":{}}')
            print('{"jsonrpc":"2.0","id":12345,"result":{}}')
        if how == 'home': text = os.environ['HOME'] + ' ' + os.getcwd()
        if how == 'look':
            text = '|'.join([' '.join(os.listdir('/sys/class/net')), ' '.join(sorted(os.environ)), str(os.getuid() >= 1000)])
        say(result={'content': [{'type': 'text', 'text': text}]})
    elif own is not None:
        say(error={'code': -32601, 'message': 'there is no such method'})
"#;

/// Writes the settings of a server, pins its tool, and returns what `tools lock` has printed.
fn lock_server(runs: &AgentRuns, more: &str) -> String {
    let settings = |granted: &str| {
        format!(
            "[tools]\nlock = 'tools.lock'\ngranted = [{granted}]\n[tools.mcp.own]\ncommand = ['/usr/bin/python3', '-c', '''{SERVER}''']\n{more}"
        )
    };
    fs::write(runs.path("gateway.toml"), settings("")).unwrap();
    let output = tools_command(runs, "lock").output().unwrap();
    fs::write(runs.path("gateway.toml"), settings("'own__act'")).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{}", text(output.stderr));
    text(output.stdout)
}

fn tools_command(runs: &AgentRuns, command: &str) -> Command {
    let mut tools = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    tools.current_dir(runs.path("")).env_clear().env("COGNI_RUN_DIR", runs.path("r"));
    tools.env("COGNI_INIT", concat!(env!("OUT_DIR"), "/cogni-init"));
    tools.args(["tools", command, "--config", "gateway.toml"]);
    tools
}

/// Calls the tool once for each word, and returns the results' texts or the errors' codes.
async fn call_tool(runs: &AgentRuns, words: &str) -> Vec<String> {
    let script = format!(
        "for how in {words}; do /run/cogni-tool exec own__act \"{{\\\"how\\\":\\\"$how\\\"}}\"; done; true"
    );
    call_tool_in(runs, &["--config", "gateway.toml"], &script).await
}

/// Runs a script that calls the tool, and returns the results' texts or the errors' codes.
async fn call_tool_in(runs: &AgentRuns, flags: &[&str], script: &str) -> Vec<String> {
    let result = runs.run(&[flags, &["--", "sh", "-c", script]].concat()).await;
    let answers = result["stdout"].as_str().unwrap().lines().map(|line| {
        let answer: Value = serde_json::from_str(line).unwrap();
        let text = answer["result"]["content"][0]["text"].as_str();
        text.or(answer["error"]["code"].as_str()).unwrap_or(line).to_owned()
    });
    answers.collect()
}

/// T2: one program serves all calls of a run; another run has another program. The program has no network, none of the
/// host's variables and not the user of root, and is gone with the run.
#[tokio::test]
async fn a_program_serves_the_calls_of_a_run() {
    let runs = AgentRuns::new().await;
    assert_eq!(lock_server(&runs, ""), "+ own__act\n1 changes are pinned in tools.lock\n");
    let pong = r#"{"jsonrpc":"2.0","id":"p","result":{}}"#;
    assert_eq!(call_tool(&runs, "x chat ping x").await, ["1", "2", pong, "4"]);
    let seen = call_tool(&runs, "x look").await;
    assert_eq!(seen[0], "1");
    let parts: Vec<_> = seen[1].split('|').collect();
    assert_eq!((parts[0], parts[2]), ("lo", "True"));
    assert!(!parts[1].contains("LITELLM"), "{}", parts[1]);
    let diff = tools_command(&runs, "diff").output().unwrap();
    assert!(diff.status.success(), "{}", String::from_utf8_lossy(&diff.stdout));
}

/// T2: a client cannot write a message of its own with the line ends of its arguments.
#[tokio::test]
async fn a_client_writes_no_message_of_its_own() {
    let runs = AgentRuns::new().await;
    lock_server(&runs, "timeout = '5s'\n");
    let own = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"other","arguments":{}}}"#;
    let script = format!(
        "for n in 1 2; do /run/cogni-tool exec own__act '{{\"how\":\"x\",\"more\":\n{own}\n}}'; done; true"
    );
    let texts = call_tool_in(&runs, &["--config", "gateway.toml"], &script).await;
    assert_eq!(texts, ["1", "2"]);
}

/// T2, T6: the program that a table names gets its credential. The agent, the audit log and error messages do not have it.
#[tokio::test]
async fn a_credential_reaches_its_program_only() {
    let runs = AgentRuns::new().await;
    fs::write(runs.path("token"), "secret-4711-abcd\n").unwrap();
    lock_server(&runs, "env = { TOKEN = { file = 'token' }, PLAIN = 'x' }\n");
    let script = "for how in tell x look; do /run/cogni-tool exec own__act \"{\\\"how\\\":\\\"$how\\\"}\"; done; true";
    let audit = runs.path("audit.jsonl");
    let flags = ["--config", "gateway.toml", "--audit-log-path", audit.to_str().unwrap()];
    let texts = call_tool_in(&runs, &flags, script).await;
    assert_eq!(texts[..2], ["tool_failed", "2"]);
    let variables = texts[2].split('|').nth(1).unwrap();
    assert!(variables.contains("PLAIN") && variables.contains("TOKEN"), "{variables}");
    let audit = fs::read_to_string(audit).unwrap();
    assert!(audit.contains("own__act") && !audit.contains("4711"), "{audit}");
    // The operator reads what a program that fails has printed, unless it has a credential.
    let text = fs::read_to_string(runs.path("gateway.toml")).unwrap();
    let failing = "import os, sys; sys.exit(os.environ.get('TOKEN', 'there is no token'))";
    let failing = text.replace(SERVER, failing);
    let end =
        "error: the server `own`: the server's program serves no more: it has ended with status 1";
    let without = failing.replace("env = { TOKEN = { file = 'token' }, PLAIN = 'x' }", "");
    for (text, said) in [(failing, ""), (without, ": there is no token")] {
        fs::write(runs.path("gateway.toml"), text).unwrap();
        let diff = tools_command(&runs, "diff").output().unwrap();
        let text = String::from_utf8(diff.stderr).unwrap();
        assert_eq!(text.lines().last().unwrap(), format!("{end}{said}"));
    }
}

/// T2: a program that crashes, hangs, floods, asks or answers too much fails its call with a code, and the next call finds
/// a new program.
#[tokio::test]
async fn a_bad_program_fails_its_call_only() {
    let runs = AgentRuns::new().await;
    lock_server(&runs, "timeout = '3s'\nmax_result_bytes = 10000\n");
    let words = "x crash x flood x large x ask x deaf x hang x";
    let codes = [
        "1",
        "tool_failed",
        "1",
        "tool_output_too_large",
        "1",
        "tool_output_too_large",
        "1",
        "tool_asks_for_input",
        "1",
        "tool_timeout",
        "1",
        "tool_timeout",
        "1",
    ];
    assert_eq!(call_tool(&runs, words).await, codes);
}

/// T2: a server that does not answer before its greeting is greeted, and a definition that has changed runs nothing.
#[tokio::test]
async fn a_silent_program_is_greeted() {
    let runs = AgentRuns::new().await;
    lock_server(&runs, "env = { SILENT = '1' }\n");
    assert_eq!(call_tool(&runs, "x x").await, ["1", "2"]);
    let text = fs::read_to_string(runs.path("gateway.toml")).unwrap();
    let changed = text.replace("SILENT = '1'", "ABOUT = 'acts on everything'");
    fs::write(runs.path("gateway.toml"), changed).unwrap();
    assert_eq!(call_tool(&runs, "x").await, ["tool_definition_changed"]);
}

/// T2, T7: a program has no more of the workspace than its table says and its run has.
#[tokio::test]
async fn a_program_sees_the_workspace_that_its_table_names() {
    let runs = AgentRuns::new().await;
    fs::create_dir(runs.path("task")).unwrap();
    lock_server(&runs, "workspace = 'rw'\n");
    let script = "/run/cogni-tool exec own__act; true";
    let flags = ["--config", "gateway.toml", "--workspace", "task:ro", "--", "sh", "-c", script];
    let result = runs.run(&flags).await;
    let answer: Value = serde_json::from_str(result["stdout"].as_str().unwrap()).unwrap();
    assert_eq!(answer["error"]["code"], json!("policy_denied"), "{answer}");
    // An interpreter runs what it finds in its home and its working directory, so neither is the workspace.
    let script = "/run/cogni-tool exec own__act '{\"how\":\"home\"}'; true";
    let task = runs.path("task");
    fs::set_permissions(&task, fs::Permissions::from_mode(0o777)).unwrap();
    let flags = ["--config", "gateway.toml", "--workspace", "task:rw", "--", "sh", "-c", script];
    let result = runs.run(&flags).await;
    assert!(result["stdout"].as_str().unwrap().contains("\"/tmp /tmp\""), "{result}");
}

/// T2, T7: a table that contradicts itself is refused with its key and a remedy, and so is a process without sandboxes.
#[tokio::test]
async fn a_wrong_table_is_refused_before_the_run() {
    let runs = AgentRuns::new().await;
    fs::write(runs.path("tools.lock"), "{\"version\":1,\"servers\":{}}").unwrap();
    let mut errors = vec![];
    for table in [
        "",
        "command = ['python3']",
        "url = 'http://127.0.0.1:1/mcp'\ncommand = ['/usr/bin/python3']",
        "url = 'http://127.0.0.1:1/mcp'\nimage = 'x'",
        "command = ['/usr/bin/python3']\nheaders.authorization = { env = 'X' }",
        "command = ['/usr/bin/python3']\nenv.X = { env = 'X', file = 'x' }",
        "command = ['/usr/bin/python3']\nenv.X = 1",
        "command = ['/usr/bin/python3']\nlimits.max_memory = '1k'",
        "command = ['/usr/bin/python3']\nlimits.max_output = '1k'",
    ] {
        let text =
            format!("[tools]\nlock = 'tools.lock'\ngranted = []\n[tools.mcp.own]\n{table}\n");
        fs::write(runs.path("gateway.toml"), text).unwrap();
        let error = runs.wrong_use(&["--config", "gateway.toml", "--", "true"]).await;
        errors.push(error.lines().last().unwrap().to_owned());
    }
    lock_server(&runs, "");
    let mut proxy = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    proxy.current_dir(runs.path("")).env_clear().env("LITELLM_MASTER_KEY", "sk-real");
    proxy.args(["proxy", "--config", "gateway.toml", "--billing-account-id", "a", "--run-id", "r"]);
    let output = proxy.args(["--socket-path", "llm.sock"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    errors.push(error.lines().last().unwrap().to_owned());
    insta::assert_snapshot!(errors.join("\n"));
}
