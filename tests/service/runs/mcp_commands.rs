//! T2: Tests of servers of MCP that are programs, in a real service.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::ServiceSetup;
use super::approvals::{caller_body, text, wait_for_questions};
use crate::support::process::wait_until;

/// A server whose tool returns the number of its call, or hangs.
const SERVER: &str = r"
import json, sys, time
calls = 0
for line in sys.stdin:
    message = json.loads(line)
    own = message.get('id')
    def say(**more): print(json.dumps({'jsonrpc': '2.0', 'id': own, **more}), flush=True)
    method = message['method']
    if method == 'initialize':
        say(result={'protocolVersion': '2025-06-18', 'capabilities': {}, 'serverInfo': {'name': 'x', 'version': '1'}})
    elif method == 'tools/list':
        how = {'type': 'object', 'properties': {'how': {'type': 'string'}}}
        say(result={'tools': [{'name': 'act', 'description': 'acts', 'inputSchema': how}]})
    elif method == 'tools/call':
        calls += 1
        if message['params']['arguments'].get('how') == 'hang': time.sleep(1000)
        say(result={'content': [{'type': 'text', 'text': str(calls)}]})
    elif own is not None:
        say(error={'code': -32601, 'message': 'there is no such method'})
";

/// Configures an agent that calls the tool of a server, which is pinned, once for each word.
fn configure_server(setup: &ServiceSetup, words: &str, more: &str) {
    let agents = setup.path().join("agents");
    fs::create_dir_all(&agents).unwrap();
    let script = format!(
        "for how in {words}; do /run/cogni-tool exec own__act \"{{\\\"how\\\":\\\"$how\\\"}}\" --wait 5m >&2; done; true"
    );
    let entry = format!(
        "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\ntools = ['own__act']\nsetup = 'messages'\n\
         argv = ['sh', '-c', '''{script}''']\n"
    );
    let (shown, lock) = (agents.display(), setup.path().join("tools.lock"));
    let settings = |granted: &str| {
        format!(
            "agents_dir = \"{shown}\"\n[tools]\nlock = '{}'\ngranted = [{granted}]\n\
             [tools.mcp.own]\ncommand = ['/usr/bin/python3', '-c', '''{SERVER}''', '{shown}']\n",
            lock.display()
        )
    };
    setup.write_config(&settings(""));
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command.env_clear().env("COGNI_RUN_DIR", setup.path().join("lock"));
    command.args(["tools", "lock", "--config"]).arg(setup.path().join("serve.toml"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(agents.join("caller.toml"), entry).unwrap();
    setup.write_config(&format!("{}{more}", settings("'own__act'")));
}

/// Returns the number of processes of this test's servers.
fn count_servers(setup: &ServiceSetup) -> usize {
    let own = setup.path().join("agents").display().to_string();
    let is_server = |pid: &str| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.starts_with("/usr/bin/python3\0") && line.contains(&own)
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|process| process.file_name().to_str().is_some_and(is_server)).count()
}

/// T2, T4, T8: one program serves a run, a person allows its call, and the log has the calls. Nothing of it is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_serves_the_run_of_a_service() {
    let setup = ServiceSetup::new("").await;
    let rule = "[[tools.rules]]\nname = 'ask-first'\ntool = 'own__act'\napprove = 'ask'\nprice_usd = '0.01'\n";
    configure_server(&setup, "x y", rule);
    let service = setup.start();
    let approver = setup.mint(&["--access", "approve"]);
    let run = service.run(&caller_body()).await;
    for number in 1..=2 {
        let questions = wait_for_questions(&approver, |found| found.len() == number).await;
        let question = &questions[number - 1];
        let path = format!("/api/v1/approvals/{}/decision", text(&question["id"]));
        let body = json!({"decision": "approve", "digest": question["digest"]});
        assert_eq!(approver.post(&path, &body).await.status, 200);
    }
    service.ended(&run).await;
    let printed = service.get(&format!("/api/v1/runs/{run}/output")).await.json();
    let answers: Vec<Value> =
        text(&printed["stderr"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<_> =
        answers.iter().map(|answer| &answer["result"]["content"][0]["text"]).collect();
    assert_eq!(texts, ["1", "2"], "{printed}");
    let log = fs::read_to_string(setup.audit_log(&run)).unwrap();
    assert_eq!(log.matches("\"tool.settled\"").count(), 2, "{log}");
    setup.stop(service);
    assert_eq!(count_servers(&setup), 0);
}

/// A service that is killed while a program serves a call leaves no program behind the next start.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_service_leaves_no_program() {
    let setup = ServiceSetup::new("").await;
    configure_server(&setup, "hang", "");
    let mut service = setup.start();
    let run = service.run(&caller_body()).await;
    tokio::task::block_in_place(|| {
        wait_until(|| count_servers(&setup) > 0, || "the server never starts".to_owned());
        service.process.signal("KILL");
        service.process.wait();
    });
    let service = setup.start();
    assert_eq!(service.ended(&run).await["error_code"], "interrupted");
    tokio::task::block_in_place(|| {
        wait_until(|| count_servers(&setup) == 0, || "the server is left".to_owned());
    });
    setup.stop(service);
}
