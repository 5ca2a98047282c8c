//! T3: Tests of tools whose sandbox is a container, and of escape attempts from the sandbox of a tool.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::driver::{TestedRunner, list_containers, shell_argv};
use super::escape::{HostTargets, PIDS, PROGRAM};
use super::sweep::run_sweep;
use crate::support::docker_engine::{HOST, docker_output};
use crate::support::process::{ChildProcess, wait_until};

/// Writes a tool, and the gateway's file that grants it. Returns the path of that file.
fn write_tool(runner: &TestedRunner, argv: &[&str], more: &str) -> String {
    let tools = runner.path().join("tools");
    fs::create_dir_all(&tools).unwrap();
    let tool = format!("name = 't__job'\ndescription = 'a test'\nargv = {}\n{more}", json!(argv));
    fs::write(tools.join("t__job.toml"), tool).unwrap();
    let gateway = runner.path().join("gateway.toml");
    let tools = tools.display();
    fs::write(&gateway, format!("[tools]\ndirectory = '{tools}'\ngranted = ['t__job']\n")).unwrap();
    gateway.to_str().unwrap().to_owned()
}

/// Runs an agent that calls the tool, and returns the answers.
fn call_tool(runner: &TestedRunner, config: &str, flags: &[&str], script: &str) -> Vec<Value> {
    let result = runner.run(&[&["--config", config], flags].concat(), &shell_argv(script));
    let stdout = result.json["stdout"].as_str().unwrap();
    let answers = stdout.lines().map(serde_json::from_str);
    answers
        .collect::<Result<_, _>>()
        .unwrap_or_else(|_| panic!("{}\n{}", result.json, result.shown))
}

/// Returns the calls of a runner that have a container, in any state.
fn list_job_containers(runner: &TestedRunner) -> String {
    let directory = format!("label=cogni.dir={}", runner.run_dir().display());
    let format = "{{.Label \"cogni.run\"}}";
    let runs = docker_output(&["ps", "--all", "--filter", &directory, "--format", format]);
    runs.lines().filter(|run| run.starts_with("tc-")).collect()
}

/// T3: A call runs in a container of the tool's image, with its arguments as a file and without a network. Its
/// container and its directory are gone when the run goes on.
#[test]
fn a_job_runs_in_a_container_of_its_image() {
    let runner = TestedRunner::new();
    let look = "cat \"$0\"; echo; echo $(ls /sys/class/net) \"|\" $(ls /llm-sock) \"|\" $(id -u) \"|\" $(ls -A /workspace); \
                touch /x 2>/dev/null || echo read-only; grep -h CapBnd /proc/self/status";
    let argv = ["/bin/sh", "-c", look, "${ARGUMENTS_FILE}"];
    let config = write_tool(&runner, &argv, &format!("image = '{HOST}'\n{PARAMETERS}"));
    let script = r#"/run/cogni-tool exec t__job '{"text":"$(id)"}'"#;
    let answers = call_tool(&runner, &config, &["--run-id", "run-job"], script);
    let seen = answers[0]["result"]["stdout"].as_str().unwrap_or_else(|| panic!("{answers:?}"));
    let lines: Vec<_> = seen.lines().collect();
    assert_eq!(lines[0], r#"{"text":"$(id)"}"#);
    let [network, socket, uid, workspace] =
        lines[1].split('|').map(str::trim).collect::<Vec<_>>()[..]
    else {
        panic!("{seen}")
    };
    // The file is the sandbox's own `/etc/hosts`. There is no socket.
    assert_eq!((network, socket, workspace), ("lo", "hosts", ""));
    assert!(uid.parse::<u32>().unwrap() > 0);
    assert_eq!(lines[2..], ["read-only", "CapBnd:\t0000000000000000"]);
    assert_eq!(list_containers("run-job") + &list_job_containers(&runner), "");
}

/// T3: A call in a container that hangs, floods, takes all memory or has no program ends with a code. Nothing remains.
#[test]
fn a_bad_job_in_a_container_ends_typed_and_bounded() {
    let runner = TestedRunner::new();
    let limits =
        "[limits]\nmax_runtime = '3s'\nmax_output = '10k'\nmax_memory = '48m'\npids = 16\n";
    let more = format!("image = '{HOST}'\n{limits}{PARAMETERS}");
    let script = "case $(cat $0) in *hang*) sleep 1000 & sleep 1000;; *flood*) yes;; *fail*) echo bad >&2; exit 3;; *) exec dd if=/dev/zero of=/dev/null bs=300M count=1;; esac";
    let config = write_tool(&runner, &["/bin/sh", "-c", script, "${ARGUMENTS_FILE}"], &more);
    let agent = "for what in hang flood fail hungry; do /run/cogni-tool exec t__job \"{\\\"text\\\":\\\"$what\\\"}\"; done; true";
    let answers = call_tool(&runner, &config, &[], agent);
    let codes: Vec<_> = answers.iter().map(|answer| &answer["error"]["code"]).collect();
    assert_eq!(codes, ["tool_timeout", "tool_output_too_large", "tool_failed", "tool_oom_killed"]);
    assert_eq!(list_job_containers(&runner), "");
}

/// T3, R5: After `kill -9` in the middle of a call, the sweep removes the call's container and directory, too.
#[test]
fn a_job_of_a_killed_runner_is_swept() {
    let runner = TestedRunner::new();
    let more = format!("image = '{HOST}'\n");
    let config = write_tool(&runner, &["/bin/sleep", "1000"], &more);
    let argv = shell_argv("/run/cogni-tool exec t__job");
    let mut command = runner.prepare(&["--config", &config, "--run-id", "run-killed-job"], &argv);
    let mut process = ChildProcess::start(&mut command, "");
    wait_until(|| !list_job_containers(&runner).is_empty(), || "no call has begun".to_owned());
    process.signal("KILL");
    process.wait();
    assert_eq!(run_sweep(&runner, &["--apply"]).0, 0);
    assert_eq!(list_job_containers(&runner), "");
    runner.assert_nothing_is_left("run-killed-job");
}

/// A server whose tool says which call it is, and what the server sees.
const SERVER: &str = r#"
    calls=0
    while read -r line; do
        id=${line#*'"id":'}; id=${id%%,*}
        case $line in
        *'"server/discover"'*) said='"error":{"code":-32601,"message":"unknown"}';;
        *'"initialize"'*) said='"result":{"protocolVersion":"2025-06-18","capabilities":{}}';;
        *'"tools/list"'*) said='"result":{"tools":[{"name":"look","description":"x","inputSchema":{"type":"object"}}]}';;
        *'"tools/call"'*)
            calls=$((calls + 1))
            text="$calls $(ls /sys/class/net) $(ls /llm-sock | grep -c llm.sock)"
            said='"result":{"content":[{"type":"text","text":"'$text'"}]}';;
        *) continue;;
        esac
        echo '{"jsonrpc":"2.0","id":'$id','$said'}'
    done
"#;

/// Writes the gateway's file with a server in an image, pins the server's tool, and returns the path of the file.
fn lock_server(runner: &TestedRunner) -> String {
    let gateway = runner.path().join("gateway.toml");
    let config = gateway.to_str().unwrap();
    let lock = runner.path().join("tools.lock");
    let write = |granted: &str| {
        let text = format!(
            "[tools]\nlock = '{}'\ngranted = [{granted}]\n[tools.mcp.own]\nimage = '{HOST}'\ncommand = ['/bin/sh', '-c', \"\"\"{}\"\"\"]\n",
            lock.display(),
            SERVER.replace('"', "\\\"")
        );
        fs::write(&gateway, text).unwrap();
    };
    write("");
    let mut tools = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    tools.args(["tools", "lock", "--config", config]).env("COGNI_RUN_DIR", runner.run_dir());
    let output = tools.env("COGNI_INIT", concat!(env!("OUT_DIR"), "/cogni-init")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    write("'own__look'");
    config.to_owned()
}

/// Returns the number of containers of a runner.
fn count_containers(runner: &TestedRunner) -> usize {
    let directory = format!("label=cogni.dir={}", runner.run_dir().display());
    docker_output(&["ps", "--all", "--quiet", "--filter", &directory]).lines().count()
}

/// T2: The program of an MCP server runs in a container of its image, serves the run, and is gone with the run.
#[test]
fn a_program_of_a_server_runs_in_a_container_of_its_image() {
    let runner = TestedRunner::new();
    let config = lock_server(&runner);
    let script = "/run/cogni-tool exec own__look; /run/cogni-tool exec own__look";
    let answers = call_tool(&runner, &config, &["--run-id", "run-server"], script);
    let texts: Vec<_> =
        answers.iter().map(|answer| &answer["result"]["content"][0]["text"]).collect();
    assert_eq!(texts, ["1 lo 0", "2 lo 0"]);
    assert_eq!(count_containers(&runner), 0);
}

/// T2, R5: After `kill -9` of a run whose server waits for calls, the sweep removes the server's container, too.
#[test]
fn a_server_of_a_killed_runner_is_swept() {
    let runner = TestedRunner::new();
    let config = lock_server(&runner);
    let argv = shell_argv("/run/cogni-tool exec own__look; sleep 1000");
    let mut command = runner.prepare(&["--config", &config, "--run-id", "run-killed"], &argv);
    let mut process = ChildProcess::start(&mut command, "");
    // The run has a container, and the server.
    wait_until(|| count_containers(&runner) == 2, || "no server has begun".to_owned());
    process.signal("KILL");
    process.wait();
    assert_eq!(run_sweep(&runner, &["--apply"]).0, 0);
    assert_eq!(count_containers(&runner), 0);
    runner.assert_nothing_is_left("run-killed");
}

/// T3: An image that is not here is not pulled, and a container is not made.
#[test]
fn a_job_without_its_image_fails() {
    let runner = TestedRunner::new();
    let config = write_tool(&runner, &["/bin/true"], "image = 'cogni-gateway-test:absent'\n");
    let answers = call_tool(&runner, &config, &[], "/run/cogni-tool exec t__job; true");
    assert_eq!(answers[0]["error"]["code"], "tool_failed");
    assert_eq!(list_job_containers(&runner), "");
}

/// T3: Each attempt of `tests/escape` is refused in the sandbox of a tool, in a container and in the embedded driver.
#[test]
fn nothing_gets_out_of_a_job() {
    for image in [Some(HOST), None] {
        let runner = TestedRunner::new();
        let workspace = runner.path().join("task");
        fs::create_dir(&workspace).unwrap();
        fs::set_permissions(&workspace, fs::Permissions::from_mode(0o755)).unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(PROGRAM);
        fs::copy(&program, workspace.join("escape"))
            .unwrap_or_else(|error| panic!("{error}: make {PROGRAM} with `tests/run image`"));
        let image = image.map_or(String::new(), |image| format!("image = '{image}'\n"));
        let more = format!("{image}workspace = 'ro'\n[limits]\npids = {PIDS}\n");
        let targets = HostTargets::listen();
        let attempts = format!("/workspace/escape {}; true", targets.facts.join(" "));
        let config = write_tool(&runner, &["/bin/sh", "-c", &attempts], &more);
        let root = runner.path();
        let root = root.to_str().unwrap();
        let flags = ["--root", root, "--workspace", &format!("{}:ro", workspace.display())];
        let answers = call_tool(&runner, &config, &flags, "/run/cogni-tool exec t__job; true");
        let text = answers[0]["result"]["stdout"].as_str().unwrap_or_else(|| panic!("{answers:?}"));
        let is_held = |line: &str| line.split('\t').nth(2) == Some("held");
        assert!(text.lines().count() > 70 && text.lines().all(is_held), "{image}{text}");
    }
}

/// The schema of the arguments.
const PARAMETERS: &str =
    "[parameters]\nrequired = ['text']\n[parameters.properties.text]\ntype = 'string'\n";
