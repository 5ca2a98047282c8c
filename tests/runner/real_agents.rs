//! A1, R1–R5: Tests of third-party agents, unmodified, in sandboxes of a real Docker Engine. `tests/run agents` builds
//! their images.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::docker_engine::{self, docker_output};
use crate::support::{model_provider, service};

/// A1, R3, R4, G9, G11: `OpenClaw`'s model asks it to run a command; it runs the command in its allowed place and
/// prints the model's final answer. The socket is its only connection, both calls are recorded, and it knows the
/// earlier messages.
#[tokio::test(flavor = "multi_thread")]
async fn openclaw_runs_a_command_and_answers() {
    let provider =
        model_provider::start_provider(&format!("tool=exec,arguments={}", tool_call(LOOK))).await;
    let setup = AgentSetup::new();
    let run = format!("run-openclaw-{}", std::process::id());
    let result = setup.run(&run, provider.addr, "gpt-5", "4m");
    assert_eq!((&result["ok"], &result["exit_code"]), (&json!(true), &json!(0)), "{result:#}");

    let envelope = &result["agent"];
    assert_eq!(envelope["payloads"][0]["text"], "hello from the fake provider");
    assert!(envelope["meta"]["durationMs"].is_u64() && envelope["meta"]["error"].is_null());
    insta::assert_snapshot!(fs::read_to_string(setup.task().join("found")).unwrap(), @r"
    lo
    0
    192.0.2.1 ENETUNREACH
    example.com EAI_AGAIN
    # What was said before

    ## Instructions

    Be brief.
    ");

    assert_eq!(result["usage"]["turns"], 2);
    insta::assert_snapshot!(format_records(&setup.path("audit.jsonl")), @r#"
    "run.started"
    "connection.opened"
    "request.admitted" "chat_completions"
    "request.settled" "completed" {"input":11,"output":20,"source":"estimated"}
    "request.admitted" "chat_completions"
    "request.settled" "completed" {"input":11,"output":5,"source":"provider"}
    "run.finished"
    "#);
    let requests = provider.seen.requests();
    let paths: Vec<_> = requests.iter().map(|request| request.path.as_str()).collect();
    assert_eq!(paths, ["/v1/chat/completions"; 2]);
    let body = requests[0].body.as_ref().unwrap();
    assert_eq!(request_tools(body), ALLOWED, "OpenClaw has a tool that is not allowed");
    let read = body["messages"].to_string();
    assert!(read.contains("Available deferred-schema tools: none."), "it could find other tools");
    for text in ["look `$(around)`", ".cogni/conversation.md", "no network", "Direct and exact"] {
        assert!(read.contains(text), "OpenClaw has not read {text}");
    }
    insta::assert_snapshot!(setup.models(), @r#"["gpt-5","gpt-5-mini"]"#);
    assert_eq!(
        docker_output(&["ps", "--all", "--quiet", "--filter", &format!("label=cogni.run={run}")]),
        ""
    );
    assert_eq!(fs::read_dir(setup.path("r")).unwrap().count(), 0);
}

/// A1, A2: If the model refuses, the error has the agent's text and a code, although the agent prints no answer.
#[tokio::test(flavor = "multi_thread")]
async fn openclaw_says_that_its_model_refuses() {
    let provider = model_provider::start_provider("status=400").await;
    let setup = AgentSetup::new();
    let run = format!("run-openclaw-refused-{}", std::process::id());
    let result = setup.run(&run, provider.addr, "gpt-5", "4m");
    assert_eq!(
        json!([result["ok"], result["exit_code"], result["error_code"]]),
        json!([false, 1, "agent_failed"]),
        "{result:#}"
    );
    insta::assert_snapshot!(result["error"].as_str().unwrap(), @"cli_error: LLM request failed: provider rejected the request schema or tool payload.");
}

/// A2, B1: A chat of the service gets the same from its built-in `OpenClaw` agent.
#[tokio::test(flavor = "multi_thread")]
async fn openclaw_answers_a_chat_of_the_service() {
    docker_engine::need_images(&[IMAGE]);
    let script = format!("tool=exec,arguments={}", tool_call("echo $((6 * 7)) networks"));
    let mut setup = service::ServiceSetup::new(&script).await;
    setup.set("COGNI_DRIVER", "docker");
    setup.set("COGNI_INIT", docker_engine::init_path());
    let mut service = setup.start();
    let mut body = service::chat_body("look around");
    (body["graphName"], body["model"]) = ("sandbox:openclaw".into(), "gpt-5".into());
    let answer = service.post("/api/v1/ai/chat", &body).await;
    let events = service::parse_events(answer.text());
    let kinds: Vec<_> = events.iter().map(|event| &*event.kind).collect();
    assert_eq!(
        kinds,
        ["run_started", "usage_report", "usage_report", "assistant_final", "done", "final"],
        "{} {}",
        answer.status,
        answer.text()
    );
    assert_eq!(events[5].data["ok"], json!(true), "{}", events[5].data);
    assert_eq!(events[3].data["text"], "hello from the fake provider");
    let messages =
        setup.provider.seen.last_request().unwrap().body.unwrap()["messages"].to_string();
    assert!(messages.contains("42 networks"), "its tool's output has not come back: {messages}");
    let run = answer.header("x-run-id").unwrap();
    let facts = setup.books().calls_of_run(run).await.unwrap();
    let booked: Vec<_> = facts.iter().map(|fact| (&*fact.account, &*fact.call_id)).collect();
    let reported = events[1..3].iter().map(|event| event.data["call_id"].as_str().unwrap());
    assert_eq!(booked, reported.map(|call| ("acct-1", call)).collect::<Vec<_>>());
    let left = ["ps", "--all", "--quiet", "--filter", &format!("label=cogni.run={run}")];
    assert_eq!(docker_output(&left), "");
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// A workspace, and the directory of its run.
struct AgentSetup {
    folder: TempDir,
}

impl AgentSetup {
    fn new() -> Self {
        docker_engine::need_images(&[IMAGE]);
        let dir = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(dir.task()).unwrap();
        fs::set_permissions(dir.task(), Permissions::from_mode(0o777)).unwrap();
        dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    fn task(&self) -> PathBuf {
        self.path("task")
    }

    /// Returns the result of one conversation whose last message contains shell commands.
    fn run(&self, run: &str, upstream: SocketAddr, model: &str, max_runtime: &str) -> Value {
        let request_toml = "agent = 'sandbox:openclaw'\nmessages = [{ role = 'system', content = 'Be brief.' }, \
                    { role = 'user', content = 'look `$(around)`' }]\n[llm]\nmodels = ['gpt-5-mini', 'gpt-5']\n";
        fs::write(self.path("run.toml"), request_toml).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
            .env_clear()
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", upstream.to_string())
            .env("RUN_ID", run)
            .env("AUDIT_LOG_PATH", self.path("audit.jsonl"))
            .env("COGNI_INIT", docker_engine::init_path())
            .env("COGNI_RUN_DIR", self.path("r"))
            .current_dir(self.path(""))
            .args(["run", "--spec", "run.toml", "--workspace", "task:rw", "--model", model])
            .args(["--max-runtime", max_runtime])
            .output()
            .unwrap();
        let shown = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{shown}"))
    }

    /// Returns the models in `OpenClaw`'s settings.
    fn models(&self) -> String {
        let settings = fs::read(self.task().join(".openclaw/openclaw.json")).unwrap();
        let settings: Value = serde_json::from_slice(&settings).unwrap();
        let models = settings["models"]["providers"]["cogni"]["models"].as_array().unwrap();
        json!(models.iter().map(|model| &model["id"]).collect::<Vec<_>>()).to_string()
    }
}

/// Returns the tools of a request, without those that search for other tools and find none.
fn request_tools(body: &Value) -> Vec<&str> {
    let tools = body["tools"].as_array().unwrap().iter();
    let names = tools.map(|tool| tool["function"]["name"].as_str().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with("tool_")).collect();
    names.sort_unstable();
    names
}

/// Returns the model's tool call: the arguments of `OpenClaw`'s tool `exec`, as a provider script.
fn tool_call(command: &str) -> String {
    json!({ "command": command })
        .to_string()
        .replace('%', "%25")
        .replace(',', "%2c")
        .replace(';', "%3b")
}

/// Returns the events and cost of each call, without checkpoints, whose number depends on how long the agent takes.
fn format_records(log: &Path) -> String {
    let log = fs::read_to_string(log).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let lines = lines.filter(|line| line["event"] != "log.checkpoint");
    let lines = lines.map(|line| {
        format!("{} {} {} {}", line["event"], line["route"], line["outcome"], line["usage"])
    });
    lines.collect::<Vec<_>>().join("\n").replace(" null", "")
}

/// Searches for other networks, the provider's key, ways out, and earlier messages.
const LOOK: &str = r#"{ ls /sys/class/net; env | grep -c sk-real; node -e '(async () => {
    for (const to of ["192.0.2.1", "example.com"]) {
        await fetch("http://" + to).then(() => console.log(to), error => console.log(to, error.cause.code))
    }
})()'; cat .cogni/conversation.md; } > found 2>&1"#;

/// The tools that the entry allows.
const ALLOWED: [&str; 7] = ["apply_patch", "edit", "exec", "ls", "process", "read", "write"];

/// Built by `docker/openclaw/build`.
const IMAGE: &str = "cogni-openclaw:dev";
