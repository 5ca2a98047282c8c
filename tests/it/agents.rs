//! A1, R1–R5: agents as their makers ship them, unmodified, in sandboxes of a real Docker Engine. `tests/run agents` makes
//! their images.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::engine::{self, must};
use crate::support::provider;

/// A1, R3, R4, G9, G11: `OpenClaw` is told by its model to run a command, does so where it may, and says what the model says
/// then. The socket is all it has, and both calls are on record.
#[tokio::test(flavor = "multi_thread")]
async fn openclaw_runs_a_command_and_answers() {
    let provider = provider::start(&format!("tool=exec,arguments={}", call(LOOK))).await;
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().canonicalize().unwrap();
    let workspace = directory.join("task");
    write_workspace(&workspace);
    let run = format!("run-openclaw-{}", std::process::id());
    let result = openclaw(&directory, &run, provider.addr);
    assert_eq!((&result["ok"], &result["exit_code"]), (&json!(true), &json!(0)), "{result:#}");

    let envelope: Value = serde_json::from_str(result["stdout"].as_str().unwrap()).unwrap();
    assert_eq!(envelope["payloads"][0]["text"], "hello from the fake provider");
    assert!(envelope["meta"]["durationMs"].is_u64() && envelope["meta"]["error"].is_null());
    insta::assert_snapshot!(fs::read_to_string(workspace.join("found")).unwrap(), @r"
    lo
    0
    192.0.2.1 ENETUNREACH
    example.com EAI_AGAIN
    ");

    assert_eq!(result["usage"]["turns"], 2);
    insta::assert_snapshot!(records(&directory.join("audit.jsonl")), @r#"
    "run.started"
    "connection.opened"
    "request.admitted" "chat_completions"
    "request.settled" "completed" {"input":11,"output":4,"source":"provider"}
    "request.admitted" "chat_completions"
    "request.settled" "completed" {"input":11,"output":5,"source":"provider"}
    "run.finished"
    "log.checkpoint"
    "#);
    let asked: Vec<_> = provider.seen.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(asked, ["/v1/chat/completions"; 2]);
    assert_eq!(
        must(&["ps", "--all", "--quiet", "--filter", &format!("label=cogni.run={run}")]),
        ""
    );
    assert_eq!(fs::read_dir(directory.join("r")).unwrap().count(), 0);
}

/// The result of one conversation.
fn openclaw(directory: &Path, run: &str, upstream: SocketAddr) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .env_clear()
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-real")
        .env("LITELLM_HOST", upstream.to_string())
        .env("RUN_ID", run)
        .env("AUDIT_LOG_PATH", directory.join("audit.jsonl"))
        .env("COGNI_INIT", engine::init())
        .env("COGNI_RUN_DIR", directory.join("r"))
        .current_dir(directory)
        .args(["run", "--image", IMAGE, "--workspace", "task:rw", "--max-memory", "2g"])
        .args(["--max-runtime", "4m", "--env", "COGNI_MODEL=gpt-5", "--"])
        .args(["openclaw", "agent", "--local", "--agent", "main", "--session-id", "s1"])
        .args(["--message", "look around", "--json", "--timeout", "200"])
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{shown}"))
}

/// What the model wants: the arguments of `OpenClaw`'s tool `exec`, as a script of the provider takes them.
fn call(command: &str) -> String {
    json!({ "command": command })
        .to_string()
        .replace('%', "%25")
        .replace(',', "%2c")
        .replace(';', "%3b")
}

/// A workspace as a run of `OpenClaw` finds it: writable, with the configuration that this tree ships.
fn write_workspace(workspace: &Path) {
    let settings = workspace.join(".openclaw");
    fs::create_dir_all(&settings).unwrap();
    fs::copy("config/agents/openclaw/openclaw.json", settings.join("openclaw.json")).unwrap();
    for folder in [workspace, &settings] {
        fs::set_permissions(folder, Permissions::from_mode(0o777)).unwrap();
    }
}

/// What happened to each call, and what it cost.
fn records(log: &Path) -> String {
    let log = fs::read_to_string(log).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let lines = lines.map(|line| {
        format!("{} {} {} {}", line["event"], line["route"], line["outcome"], line["usage"])
    });
    lines.collect::<Vec<_>>().join("\n").replace(" null", "")
}

/// What it looks for: other networks, the provider's key, and ways out.
const LOOK: &str = r#"{ ls /sys/class/net; env | grep -c sk-real; node -e '(async () => {
    for (const to of ["192.0.2.1", "example.com"]) {
        await fetch("http://" + to).then(() => console.log(to), error => console.log(to, error.cause.code))
    }
})()'; } > found 2>&1"#;

/// From `docker/openclaw/build`.
const IMAGE: &str = "cogni-openclaw:dev";
