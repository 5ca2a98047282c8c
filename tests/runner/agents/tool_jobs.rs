//! T3: Tests of tools that are files, called from inside a run: each call has a sandbox of its own of the embedded driver.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use cogni_gateway::base::digest::sha256_hex;
use serde_json::{Value, json};

use super::run_command::AgentRuns;

/// Writes a tool whose program is a shell script that gets the path of the arguments.
fn write_tool(runs: &AgentRuns, name: &str, script: &str, more: &str) {
    let tools = runs.path("tools");
    fs::create_dir_all(&tools).unwrap();
    let text = format!(
        "name = '{name}'\ndescription = 'a test'\nargv = ['/bin/sh', '-c', '''{script}''', '${{ARGUMENTS_FILE}}']\n{more}"
    );
    fs::write(tools.join(format!("{name}.toml")), text).unwrap();
}

/// Runs a script that calls tools with `cogni-tool`, and returns the gateway's answers and all records of the run.
async fn tool_answers(
    runs: &AgentRuns,
    granted: &[&str],
    script: &str,
    flags: &[&str],
) -> (Vec<Value>, Vec<Value>) {
    let gateway = format!("[tools]\ndirectory = 'tools'\ngranted = {granted:?}\n");
    fs::write(runs.path("gateway.toml"), gateway).unwrap();
    let own = ["--config", "gateway.toml", "--audit-log-path", "audit.jsonl"];
    let program = ["--", "sh", "-c", script];
    let result = runs.run(&[&own[..], flags, &program[..]].concat()).await;
    let lines = |text: &str| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let records = fs::read_to_string(runs.path("audit.jsonl")).unwrap();
    fs::remove_file(runs.path("audit.jsonl")).unwrap();
    (lines(result["stdout"].as_str().unwrap()), lines(&records))
}

fn prepare_workspace(runs: &AgentRuns) {
    let task = runs.path("task");
    fs::create_dir(&task).unwrap();
    fs::set_permissions(&task, Permissions::from_mode(0o777)).unwrap();
    fs::write(task.join("seen"), "by the tool").unwrap();
}

/// T3: the arguments arrive as one JSON file, whatever they contain; no shell reads them.
#[tokio::test]
async fn a_job_gets_its_arguments_as_a_file() {
    let runs = AgentRuns::new().await;
    let schema =
        "[parameters]\nrequired = ['text']\n[parameters.properties.text]\ntype = 'string'\n";
    write_tool(&runs, "t__echo", "cat \"$0\"; echo beside >&2", schema);
    let arguments = r#"{"text":"$(id) `id`; \"'"'"' --flag"}"#;
    let script = format!(
        "/run/cogni-tool exec t__echo '{arguments}'; /run/cogni-tool exec t__echo '{{}}'; true"
    );
    let (answers, records) = tool_answers(&runs, &["t__echo"], &script, &[]).await;
    let text = "$(id) `id`; \"' --flag";
    assert_eq!(
        answers[0]["result"],
        json!({"exit_code": 0, "stdout": {"text": text}, "stderr": "beside\n"})
    );
    assert_eq!(answers[1]["error"]["code"], "invalid_arguments");
    assert!(!format!("{records:?}").contains("--flag"));
    let admitted = records.iter().find(|record| record["event"] == "tool.admitted").unwrap();
    let file = fs::read(runs.path("tools/t__echo.toml")).unwrap();
    assert_eq!(admitted["definition"], sha256_hex(&file));
    let settled = records.iter().filter(|record| record["event"] == "tool.settled").count();
    assert_eq!(settled, 1);
}

/// T3: a job has no network, no gateway, no way to change its root, and not the user of root.
#[tokio::test]
async fn a_job_is_as_confined_as_an_agent() {
    let runs = AgentRuns::new().await;
    let look = "
        echo $(ls /sys/class/net) \\| $(ls /llm-sock)
        touch /usr/x /arguments.json 2>/dev/null || echo read-only
        [ $(id -u) -ge 1000 ] && echo own user
        grep -h CapBnd /proc/self/status
        grep -h NoNewPrivs /proc/self/status
        (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null && echo gateway
        env | grep -c -e sk- -e COGNI_MODEL
        true
    ";
    write_tool(&runs, "t__look", look, "");
    let script = "/run/cogni-tool exec t__look";
    let (answers, _) = tool_answers(&runs, &["t__look"], script, &[]).await;
    let seen = answers[0]["result"]["stdout"].as_str().unwrap();
    insta::assert_snapshot!(seen, @r"
    lo | hosts
    read-only
    own user
    CapBnd:	0000000000000000
    NoNewPrivs:	1
    0
    ");
}

/// T3: a job has no more of the workspace than its file says and its run has.
#[tokio::test]
async fn a_job_writes_to_the_workspace_only_if_its_run_may() {
    let runs = AgentRuns::new().await;
    prepare_workspace(&runs);
    let write = "cat /workspace/seen; touch /workspace/$(basename $PWD)-made 2>/dev/null || echo , read-only";
    for access in ["none", "ro", "rw"] {
        write_tool(&runs, &format!("t__{access}"), write, &format!("workspace = '{access}'\n"));
    }
    let granted = ["t__none", "t__ro", "t__rw"];
    let script = "for tool in none ro rw; do /run/cogni-tool exec t__$tool; done; true";
    let (writable, _) = tool_answers(&runs, &granted, script, &["--workspace", "task:rw"]).await;
    let read_only = "by the tool, read-only\n";
    assert_eq!(writable[0]["error"]["code"], Value::Null, "{writable:?}");
    assert_eq!(writable[1]["result"]["stdout"], read_only);
    assert_eq!(writable[2]["result"]["stdout"], "by the tool");
    // A run that only reads its workspace loses the tools that write.
    let (restricted, records) =
        tool_answers(&runs, &granted, script, &["--workspace", "task:ro"]).await;
    assert_eq!(restricted[1]["result"]["stdout"], read_only);
    assert_eq!(restricted[2]["error"]["code"], "policy_denied");
    let refused = records.iter().find(|record| record["event"] == "tool.refused").unwrap();
    assert_eq!((&refused["tool"], &refused["layer"]), (&json!("t__rw"), &json!("sandbox")));
}

/// T3, R6: a job that outlives the agent's program fills the workspace no further than its bound, and the run ends typed.
#[tokio::test]
async fn a_job_that_outlives_the_agent_fills_no_workspace() {
    let runs = AgentRuns::new().await;
    let fill = "head -c 64000000 /dev/zero > /workspace/large";
    // One job writes and goes on, and the other one ends before the next periodic measurement.
    let (hanging, ending) = (format!("sleep 2; {fill}; sleep 600"), format!("sleep 0.3; {fill}"));
    write_tool(&runs, "t__hanging", &hanging, "workspace = 'rw'\n");
    write_tool(&runs, "t__ending", &ending, "workspace = 'rw'\n");
    let gateway = "drain_timeout = '5m'\n[tools]\ndirectory = 'tools'\ngranted = ['t__ending', 't__hanging']\n";
    fs::write(runs.path("gateway.toml"), gateway).unwrap();
    fs::create_dir(runs.path("agents")).unwrap();
    for tool in ["t__hanging", "t__ending"] {
        let script = format!(
            r#"/run/cogni-tool exec {tool} {{}} --wait 0s >&2; echo '{{"payloads":[{{"text":"done"}}],"meta":{{}}}}'"#
        );
        let agent = format!(
            "name = 'caller'\ndescription = 'calls tools'\nversion = 'a'\ntools = ['{tool}']\nargv = ['sh', '-c', \"\"\"{}\"\"\"]\n",
            script.replace('"', "\\\"")
        );
        fs::write(runs.path("agents/caller.toml"), agent).unwrap();
        let flags = "--config gateway.toml --agents-dir agents --agent caller --message x --model m-1 --max-workspace 16m";
        let result = runs.run(&flags.split(' ').collect::<Vec<_>>()).await;
        assert_eq!(result["error_code"], "workspace_full", "{result}");
        assert_eq!(result["exit_code"], 0, "{result}");
        assert!(result["timings"]["total_ms"].as_u64() < Some(60_000), "{result}");
    }
}

/// T3: a job that fails, hangs, floods, takes all memory or does not exist ends with a code, and the run goes on.
#[tokio::test]
async fn a_bad_job_ends_typed_and_bounded() {
    let runs = AgentRuns::new().await;
    let limits =
        "[limits]\nmax_runtime = '2s'\nmax_output = '10k'\nmax_memory = '48m'\npids = 16\n";
    write_tool(&runs, "t__fail", "echo bad >&2; exit 3", limits);
    write_tool(&runs, "t__hang", "sleep 1000 & sleep 1000", limits);
    write_tool(&runs, "t__flood", "yes", limits);
    write_tool(&runs, "t__large", "head -c 200000 /dev/zero | tr '\\0' x", limits);
    write_tool(&runs, "t__hungry", "exec dd if=/dev/zero of=/dev/null bs=300M count=1", limits);
    let missing = "name = 't__missing'\ndescription = 'x'\nargv = ['/no/such/program']\n";
    fs::write(runs.path("tools/t__missing.toml"), missing).unwrap();
    let granted = ["t__fail", "t__flood", "t__hang", "t__hungry", "t__large", "t__missing"];
    let script = "for tool in fail hang flood large hungry missing; do /run/cogni-tool exec t__$tool; done; echo '{\"error\":{\"code\":\"alive\"}}'";
    let (answers, records) = tool_answers(&runs, &granted, script, &[]).await;
    let codes: Vec<_> =
        answers.iter().map(|answer| answer["error"]["code"].as_str().unwrap()).collect();
    assert_eq!(
        codes,
        [
            "tool_failed",
            "tool_timeout",
            "tool_output_too_large",
            "tool_output_too_large",
            "tool_oom_killed",
            "tool_failed",
            "alive"
        ]
    );
    assert_eq!(answers[0]["error"]["message"], "the tool has ended with status 3: bad");
    let settled = records.iter().filter(|record| record["event"] == "tool.settled").count();
    assert_eq!(settled, 6);
}

/// T3: a tool's JSON reaches the client as the tool wrote it, and JSON that two readers read differently is no result.
#[tokio::test]
async fn the_json_of_a_job_is_not_changed() {
    let runs = AgentRuns::new().await;
    write_tool(&runs, "t__exact", r#"echo '{"b":12345678901234567890123,"a":1.50}'; true"#, "");
    write_tool(&runs, "t__doubtful", r#"echo '[{"a":1,"a":2}]'; true"#, "");
    let script = "/run/cogni-tool exec t__exact | grep -c '\"stdout\":{\"b\":12345678901234567890123,\"a\":1.50}'; /run/cogni-tool exec t__doubtful; true";
    let granted = ["t__doubtful", "t__exact"];
    let (answers, _) = tool_answers(&runs, &granted, script, &[]).await;
    assert_eq!(answers[0], 1);
    assert_eq!(answers[1]["error"]["code"], "tool_failed");
    let message = answers[1]["error"]["message"].as_str().unwrap();
    assert!(message.contains("duplicate key `a`"), "{message}");
}

/// T3, T7: a tool's file that is wrong is refused with its name, its key and a remedy.
#[tokio::test]
async fn a_wrong_tool_file_is_refused_before_the_run() {
    let runs = AgentRuns::new().await;
    fs::create_dir(runs.path("tools")).unwrap();
    fs::write(runs.path("gateway.toml"), "[tools]\ndirectory = 'tools'\ngranted = []\n").unwrap();
    let mut errors = vec![];
    for text in [
        "name = 'other'\ndescription = 'x'\nargv = ['/bin/true']",
        "name = 'core__x'\ndescription = 'x'\nargv = ['/bin/true']",
        "name = 't__a'\ndescription = 'x'\nargv = ['true']",
        "name = 't__a'\ndescription = 'x'\nargv = ['/bin/true']\nnetwork = 'host'",
        "name = 't__a'\ndescription = 'x'\nargv = ['/bin/true']\n[parameters.properties.a]\ntype = 'string'",
        "name = 't__a'\ndescription = 'x'\nargv = ['/bin/true']\n[parameters]\nrequired = ['a']",
    ] {
        fs::write(runs.path("tools/t__a.toml"), text).unwrap();
        let error = runs.wrong_use(&["--config", "gateway.toml", "--", "true"]).await;
        errors.push(error.lines().last().unwrap().to_owned());
    }
    insta::assert_snapshot!(errors.join("\n"));
}
