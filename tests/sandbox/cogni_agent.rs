//! A1: Tests of `cogni-agent` as a process with a fake provider: its output and its end.

mod tool;
mod wire;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::model_provider::{self, calling_tool};
use crate::support::process::NO_LISTENER;

/// A workspace, and the agent's program.
struct AgentFixture {
    folder: TempDir,
    provider: model_provider::RunningProvider,
}

struct AgentEnd {
    code: i32,
    /// The parsed line of standard output.
    envelope: Value,
    /// The lines of standard error.
    events: Vec<String>,
}

impl AgentFixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        symlink(concat!(env!("OUT_DIR"), "/cogni-init"), dir.path().join("cogni-agent")).unwrap();
        fs::create_dir(dir.path().join(".cogni")).unwrap();
        let agent = Self { folder: dir, provider: model_provider::start_default().await };
        agent.write(&json!([{"role": "user", "content": "hi"}]).to_string());
        agent
    }

    fn write(&self, messages: &str) {
        fs::write(self.folder.path().join(".cogni/messages.json"), messages).unwrap();
    }

    fn command(&self, model: &str, options: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("cogni-agent"));
        command
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("COGNI_MODEL", model)
            .env("OPENAI_BASE_URL", format!("http://{}/v1", self.provider.addr))
            .args(["--messages", ".cogni/messages.json"])
            .args(options);
        command
    }

    async fn ask(&self, model: &str, options: &[&str]) -> AgentEnd {
        let mut command = self.command(model, options);
        tokio::task::spawn_blocking(move || AgentEnd::of(&mut command)).await.unwrap()
    }
}

impl AgentEnd {
    fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(stdout.lines().count(), 1, "{stdout}");
        let mut envelope: Value = serde_json::from_str(&stdout).unwrap();
        let duration = envelope["meta"].as_object_mut().unwrap().remove("durationMs");
        assert!(duration.unwrap().is_u64());
        let stderr = String::from_utf8(output.stderr).unwrap();
        let events = stderr.lines().map(str::to_owned).collect();
        Self { code: output.status.code().unwrap(), envelope, events }
    }

    fn text(&self) -> &str {
        self.envelope["payloads"][0]["text"].as_str().unwrap_or_default()
    }

    /// Returns the exit code and the text of the error.
    fn failure(&self) -> String {
        format!("{} {}", self.code, self.envelope["meta"]["error"])
    }
}

/// A1: Standard output has only the envelope; the text appears on standard error as it arrives.
#[tokio::test]
async fn an_answer_is_printed_live_and_at_the_end() {
    let agent = AgentFixture::new().await;
    let ended = agent.ask("fake/text=hello there friend", &[]).await;
    assert_eq!(ended.code, 0);
    insta::assert_snapshot!(ended.envelope, @r#"{"meta":{"agentMeta":{"finish":"stop","model":"fake/text=hello there friend","rounds":1,"usage":{"input":11,"output":3,"total":14}},"error":null},"payloads":[{"text":"hello there friend"}]}"#);
    insta::assert_snapshot!(ended.events.join("\n"), @r#"
    {"type":"text_delta","text":"hello "}
    {"type":"text_delta","text":"there "}
    {"type":"text_delta","text":"friend"}
    "#);
}

/// A1: The request to the model has the whole conversation, streaming, and the one tool.
#[tokio::test]
async fn the_conversation_is_sent_unchanged() {
    let agent = AgentFixture::new().await;
    let message = json!({"role": "user", "content": [{"type": "text", "text": "ü"}], "name": "x"});
    let requests = |seen: &model_provider::RunningProvider| {
        let mut body: Value = seen.seen.last_request().unwrap().body.unwrap();
        body["tools"] = body.pointer("/tools/0/function/name").cloned().unwrap_or_default();
        body
    };
    let body = |messages: Value, tools: Value| {
        json!({
            "model": "m", "messages": messages, "stream": true,
            "stream_options": {"include_usage": true}, "tools": tools,
        })
    };
    agent.write(&json!([message]).to_string());
    assert_eq!(agent.ask("m", &[]).await.code, 0);
    assert_eq!(requests(&agent.provider), body(json!([message]), json!("exec")));
    agent.write(&json!({"messages": [message], "system": "be brief", "tools": false}).to_string());
    assert_eq!(agent.ask("m", &[]).await.code, 0);
    let system = json!({"role": "system", "content": "be brief"});
    assert_eq!(requests(&agent.provider), body(json!([system, message]), Value::Null));
}

/// A1: The agent's only tool runs a program of the sandbox, and the model gets the result.
#[tokio::test]
async fn the_tool_is_used_until_the_model_is_done() {
    let agent = AgentFixture::new().await;
    let ended =
        agent.ask(&calling_tool(&["sh", "-c", "echo $((6*7)); echo why >&2; exit 3"]), &[]).await;
    assert_eq!(ended.code, 0, "{}", ended.envelope);
    assert_eq!(ended.text(), r#"{"exit_code":3,"stderr":"why\n","stdout":"42\n"}"#);
    let meta = &ended.envelope["meta"]["agentMeta"];
    assert_eq!((&meta["rounds"], &meta["finish"]), (&json!(2), &json!("stop")));
    let tools: Vec<_> = ended.events.iter().filter(|line| line.contains("tool_")).collect();
    let tools = tools.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let tools: Vec<_> =
        tools.map(|tool| (tool["type"].clone(), tool["exit_code"].clone())).collect();
    assert_eq!(tools, [(json!("tool_call"), Value::Null), (json!("tool_result"), json!(3))]);
    // The second request has the model's own tool call and its result.
    let request = agent.provider.seen.last_request().unwrap();
    let body: Value = request.body.unwrap();
    assert_eq!(body["messages"][1]["tool_calls"][0]["id"], body["messages"][2]["tool_call_id"]);
}

#[tokio::test]
async fn a_model_that_never_finishes_is_stopped() {
    let agent = AgentFixture::new().await;
    let ended = agent.ask("fake/tool=exec;repeat=yes", &["--rounds", "3"]).await;
    insta::assert_snapshot!(ended.failure(), @r#"1 {"kind":"too_many_rounds","message":"the model still calls for tools after 3 rounds; raise `--rounds`"}"#);
    assert_eq!(agent.provider.seen.request_count(), 3);
}

/// G10: A final refusal ends the agent; after a temporary one it waits and retries once.
#[tokio::test]
async fn a_final_refusal_ends_the_agent_and_a_temporary_one_is_retried_once() {
    let agent = AgentFixture::new().await;
    let mut messages = vec![];
    for (script, attempts) in [
        ("status=402,should_retry=no", 1),
        ("status=403", 1),
        ("status=500", 1),
        ("status=429", 1),
        ("status=429,retry_after=1,should_retry=no", 1),
        ("status=429,retry_after=60", 1),
        ("status=429,retry_after=1", 2),
        ("status=429,retry_after=0", 2),
    ] {
        agent.provider.seen.clear();
        let ended = agent.ask(&format!("fake/{script}"), &[]).await;
        assert_eq!(agent.provider.seen.request_count(), attempts, "{script}");
        messages.push(format!("{script}: {}", ended.failure()));
    }
    insta::assert_snapshot!(messages[..2].join("\n"), @r#"
    status=402,should_retry=no: 1 {"code":"402","kind":"refused","message":"the fake provider answers 402 Payment Required, as its script says","status":402}
    status=403: 1 {"code":"403","kind":"refused","message":"the fake provider answers 403 Forbidden, as its script says","status":403}
    "#);
}

/// A1: Every error is in the envelope, and the exit status is not 0.
#[tokio::test]
async fn errors_are_in_the_envelope() {
    let agent = AgentFixture::new().await;
    let mut lines = vec![];
    for messages in
        ["", "{}", "[]", r#"{"messages":[1],"system":2}"#, r#"{"messages":[1],"tools":1}"#]
    {
        agent.write(messages);
        lines.push(agent.ask("m", &[]).await.failure());
    }
    agent.write(r#"[{"role":"user","content":"hi"}]"#);
    lines.push(agent.ask("m", &["--messages", "/nowhere/messages.json"]).await.failure());
    lines.push(agent.ask("", &[]).await.failure());
    for script in ["fault=truncate@2", "fault=close@2", "fault=error@2", "fault=garbage@1"] {
        lines.push(agent.ask(&format!("fake/{script}"), &[]).await.failure());
    }
    lines.push(agent.ask("fake/fault=stall@1", &["--timeout", "1"]).await.failure());
    lines.push(agent.ask("fake/tool=exec;obey=yes;output=9;fault=truncate@9", &[]).await.failure());
    for url in ["https://localhost/v1", "http://example.org/v1", "http://localhost:x"] {
        let mut command = agent.command("m", &[]);
        lines.push(AgentEnd::of(command.env("OPENAI_BASE_URL", url)).failure());
    }
    insta::assert_snapshot!(lines.join("\n"), @r#"
    1 {"kind":"no_conversation","message":"`.cogni/messages.json`: not valid JSON: EOF while parsing a value at line 1 column 0"}
    1 {"kind":"no_conversation","message":"`.cogni/messages.json`: there is no array of messages"}
    1 {"kind":"no_conversation","message":"`.cogni/messages.json`: there is no message"}
    1 {"kind":"no_conversation","message":"`.cogni/messages.json`: `system` is not a string"}
    1 {"kind":"no_conversation","message":"`.cogni/messages.json`: `tools` is neither true nor false"}
    1 {"kind":"no_conversation","message":"`/nowhere/messages.json`: No such file or directory (os error 2)"}
    1 {"kind":"no_model","message":"`COGNI_MODEL` is not set; give the model's name"}
    1 {"kind":"broken_answer","message":"the answer ended without a finish reason"}
    1 {"kind":"broken_answer","message":"the answer broke off: unexpected end of file"}
    1 {"code":"500","kind":"refused","message":"the fake provider failed on the way, as its script says"}
    1 {"kind":"broken_answer","message":"the answer broke off: invalid utf-8 sequence of 1 bytes from index 1"}
    1 {"kind":"timeout","message":"the time is over; raise `--timeout`"}
    1 {"kind":"broken_answer","message":"the answer ended without a finish reason"}
    1 {"kind":"no_model","message":"`OPENAI_BASE_URL`: `https://localhost/v1` is no place that a sandbox can reach; give one such as `http://localhost:8080/v1`"}
    1 {"kind":"no_model","message":"`OPENAI_BASE_URL`: `http://example.org/v1` is no place that a sandbox can reach; give one such as `http://localhost:8080/v1`"}
    1 {"kind":"no_model","message":"`OPENAI_BASE_URL`: `http://localhost:x` is no place that a sandbox can reach; give one such as `http://localhost:8080/v1`"}
    "#);
    let mut command = agent.command("m", &[]);
    let no_listener = format!("http://localhost:{}", NO_LISTENER.port());
    let ended = AgentEnd::of(command.env("OPENAI_BASE_URL", no_listener));
    assert_eq!(ended.envelope["meta"]["error"]["kind"], "unreachable");
    // Text that arrived before the error is not lost.
    let ended = agent.ask("fake/fault=truncate@2", &[]).await;
    assert_eq!(ended.events.len(), 2);
}

#[tokio::test]
async fn wrong_use_is_reported_and_is_no_answer() {
    let agent = AgentFixture::new().await;
    let mut messages = vec![];
    for options in [&["--rounds", "0"][..], &["--timeout=soon"], &["--nonsense"], &["--messages"]] {
        let output = agent.command("m", options).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
        messages.push(String::from_utf8(output.stderr).unwrap());
    }
    insta::assert_snapshot!(messages.concat(), @r"
    cogni-agent: `--rounds` is `0`; give a number from 1 to 1000000; see `cogni-agent --help`
    cogni-agent: `--timeout` is `soon`; give a number from 1 to 1000000; see `cogni-agent --help`
    cogni-agent: there is no option `--nonsense`; see `cogni-agent --help`
    cogni-agent: `--messages` needs a value; see `cogni-agent --help`
    ");
    let version = agent.command("m", &["--version"]).output().unwrap();
    assert_eq!(version.stdout, format!("cogni-agent {}\n", env!("CARGO_PKG_VERSION")).as_bytes());
}
