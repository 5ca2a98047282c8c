//! A1: Tests of an `OpenClaw` agent's files and arguments, with a custom catalog entry in sandboxes of the embedded
//! driver.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::run_command::AgentRuns;

/// Returns flags for a catalog with one agent that is configured as `OpenClaw` is, and prints its arguments.
fn openclaw_flags(runs: &AgentRuns, more: &str) -> [String; 4] {
    let agents = runs.path("agents");
    fs::create_dir_all(&agents).unwrap();
    let script = "printf '%s\\n' \"$@\" >&2; echo '{\"payloads\":[],\"meta\":{}}'";
    let text = format!(
        "name = 'claw'\ndescription = 'as OpenClaw'\nversion = 'a'\nsetup = 'openclaw'\n\
         argv = ['sh', '-c', '''{script}''', '${{RUN_ID}}', '${{SESSION_ID}}', 'a $(id) ${{MODEL}}; ${{AGENT}}', '$${{HOME}}', '${{TIMEOUT}}', '${{PROMPT_FILE}}']\n{more}"
    );
    fs::write(agents.join("claw.toml"), text).unwrap();
    let agents = agents.to_str().unwrap().to_owned();
    ["--agents-dir".into(), agents, "--agent".into(), "claw".into()]
}

fn task_file(runs: &AgentRuns) -> PathBuf {
    let task = runs.path("task");
    fs::create_dir_all(&task).unwrap();
    fs::set_permissions(&task, Permissions::from_mode(0o777)).unwrap();
    task
}

/// A1: The settings have one provider and its models, and no feature that needs a personal machine. The agent gets the
/// last message as an argument and the rest in a file.
#[tokio::test]
async fn openclaw_finds_its_settings_and_its_conversation() {
    let runs = AgentRuns::new().await;
    let agent = openclaw_flags(
        &runs,
        "[openclaw]\nagent = 'reviewer'\ndeny = ['exec']\n[models]\nallow = ['m-1', 'm-2']\ndefault = 'm-2'\n\
         [files]\n'AGENTS.md' = 'ours'\n'notes/SOUL.md' = { file = 'soul.txt' }\n",
    );
    fs::write(runs.path("agents/soul.txt"), "from beside").unwrap();
    let task = task_file(&runs);
    fs::write(task.join("AGENTS.md"), "theirs").unwrap();
    let request_toml = "run = 'team/run-1'\n[[messages]]\nrole = 'system'\ncontent = 'Be brief.'\n\
                [[messages]]\nrole = 'user'\ncontent = 'What is 2 + 2?'\n\
                [[messages]]\nrole = 'assistant'\ncontent = '4'\n\
                [[messages]]\nrole = 'user'\ncontent = \"And `$(id)`\\n'twice'?\"\n";
    fs::write(runs.path("run.toml"), request_toml).unwrap();
    let flags = ["--spec", "run.toml", "--workspace", "task:rw", "--max-runtime", "4m"];
    let agent = agent.each_ref().map(String::as_str);
    let result = runs.run(&[&agent[..], &flags].concat()).await;
    assert_eq!(result["ok"], json!(true), "{result}");
    insta::assert_snapshot!(result["stderr"].as_str().unwrap().replace("team/run-1\n", ""), @r"
    cogni-894f459f64358817
    a $(id) m-2; reviewer
    ${HOME}
    180
    /workspace/.cogni/prompt.txt
    ");
    let read = |name: &str| fs::read_to_string(task.join(name)).unwrap();
    insta::assert_snapshot!(read(".cogni/prompt.txt"), @r"
    (What was said before this is in `.cogni/conversation.md`, with your instructions. Read that file first, then do what follows.)

    And `$(id)`
    'twice'?
    ");
    insta::assert_snapshot!(read(".cogni/conversation.md"), @r"
    # What was said before

    ## Instructions

    Be brief.

    ## The user

    What is 2 + 2?

    ## You

    4
    ");
    insta::assert_snapshot!("openclaw.json", read(".openclaw/openclaw.json"));
    assert_eq!((read("AGENTS.md"), read("notes/SOUL.md")), ("theirs".into(), "from beside".into()));
}

/// T7: Modes take OpenClaw's own tools away: no person can be asked about what it does by itself.
#[tokio::test]
async fn modes_deny_openclaws_own_tools() {
    let runs = AgentRuns::new().await;
    let task = task_file(&runs);
    let mut denied = vec![];
    for modes in ["", "[modes]\ncommands = 'ask'\n", "[modes]\nfiles = 'off'\n"] {
        let agent = openclaw_flags(&runs, &format!("{modes}[models]\ndefault = 'm-1'\n"));
        let agent = agent.each_ref().map(String::as_str);
        let flags = ["--message", "x", "--workspace", "task:rw"];
        runs.run(&[&agent[..], &flags].concat()).await;
        let settings = fs::read_to_string(task.join(".openclaw/openclaw.json")).unwrap();
        let settings: Value = serde_json::from_str(&settings).unwrap();
        denied.push(settings["tools"]["deny"].as_array().unwrap()[8..].to_vec());
    }
    let files = ["apply_patch", "edit", "ls", "read", "write"];
    assert_eq!(json!(denied), json!([[], ["exec", "process"], files]));
}

/// A1: The limits of an entry hold, whatever the run asks for, and the calls carry the entry's name.
#[tokio::test]
async fn the_limits_of_an_entry_hold() {
    let runs = AgentRuns::new().await;
    let text = "name = 'caller'\ndescription = 'calls'\nversion = 1\ngraph_id = 'team:caller'\nprogram = '/cogni-agent'\n\
                argv = ['/cogni-agent']\nstream = 'events'\n[budget]\nmax_turns = 2\n[models]\ndefault = 'fake/tool=exec;repeat=yes'\n\
                [policy]\nmax_body_bytes = 100000\n";
    fs::create_dir(runs.path("agents")).unwrap();
    fs::write(runs.path("agents/caller.toml"), text).unwrap();
    let agent = ["--agents-dir", "agents", "--agent", "caller", "--message", "x"];
    let result = runs.run(&[&agent[..], &["--max-turns", "50"]].concat()).await;
    assert_eq!(
        json!([result["error_code"], result["usage"]["turns"]]),
        json!(["budget_exhausted", 2])
    );
    let request = runs.provider.seen.last_request().unwrap();
    let metadata = request.headers.iter().find(|(name, _)| name == "x-litellm-spend-logs-metadata");
    let metadata: Value = serde_json::from_str(&metadata.unwrap().1).unwrap();
    assert_eq!(metadata["graph_id"], "team:caller");
}

/// A1, T2: `OpenClaw` finds the run's tools, and waits for them and for a person longer than the gateway does.
#[tokio::test]
async fn openclaw_finds_the_tools_of_its_run() {
    let runs = AgentRuns::new().await;
    let agent = openclaw_flags(
        &runs,
        "tools = ['core__get_current_time']\n[openclaw]\nallow = ['read']\n[models]\ndefault = 'm-2'\n",
    );
    let granted = "[tools]\ngranted = ['core__get_current_time']\n";
    fs::write(runs.path("gateway.toml"), granted).unwrap();
    let task = task_file(&runs);
    let agent = agent.each_ref().map(String::as_str);
    let flags = ["--config", "gateway.toml", "--message", "x", "--workspace", "task:rw"];
    let result = runs.run(&[&agent[..], &flags].concat()).await;
    assert_eq!(result["ok"], json!(true), "{result}");
    let settings = fs::read(task.join(".openclaw/openclaw.json")).unwrap();
    let settings: Value = serde_json::from_slice(&settings).unwrap();
    let tools = &settings["tools"];
    insta::assert_json_snapshot!(json!([settings["mcp"], tools["allow"], tools["toolSearch"]]), @r#"
    [
      {
        "servers": {
          "run": {
            "requestTimeoutMs": 660000,
            "transport": "streamable-http",
            "url": "http://localhost:8080/mcp"
          }
        }
      },
      [
        "read",
        "bundle-mcp"
      ],
      false
    ]
    "#);
}

/// A1, R6: A request that makes no sense, or would not fit, is refused before anything is made.
#[tokio::test]
async fn a_request_that_does_not_fit_an_agent_is_refused() {
    let runs = AgentRuns::new().await;
    let task = task_file(&runs);
    let agent = openclaw_flags(&runs, "[models]\nallow = ['m-1', 'm-2']\n");
    let agent = agent.each_ref().map(String::as_str);
    let ask = ["--message", "x", "--model", "m-1"];
    let ask_in = ["--message", "x", "--model", "m-1", "--workspace", "task:rw"];
    let mut messages = String::new();
    for flags in [
        &["--message", "x"][..],
        &["--message", "x", "--model", "gpt-5"],
        &["--model", "m-1"],
        &["--model", "m-1", "--workspace", "task"],
        &["--message", "x", "--model", "m-1", "--workspace", "task"],
    ] {
        messages += &runs.wrong_use(&[&agent[..], flags].concat()).await;
    }
    fs::create_dir(runs.path("outside")).unwrap();
    symlink(runs.path("outside"), task.join(".openclaw")).unwrap();
    messages += &runs.wrong_use(&[&agent[..], &ask_in].concat()).await;
    fs::write(runs.path("said.toml"), "[[messages]]\nrole = 'assistant'\ncontent = 'x'\n").unwrap();
    messages +=
        &runs.wrong_use(&[&agent[..], &["--spec", "said.toml", "--model", "m-1"]].concat()).await;
    let long = format!("message = '{}'\n", "x".repeat(5 << 20));
    fs::write(runs.path("long.toml"), long).unwrap();
    messages +=
        &runs.wrong_use(&[&agent[..], &["--spec", "long.toml", "--model", "m-1"]].concat()).await;
    let text =
        "name = 'word'\ndescription = 'd'\nversion = 1\nargv = ['echo', 'you said: ${MESSAGE}']\n";
    fs::write(runs.path("agents/word.toml"), text).unwrap();
    let word = ["--agents-dir", "agents", "--agent", "word", "--model", "m-1"];
    messages += &runs.wrong_use(&[&word[..], &["--spec", "long.toml"]].concat()).await;
    fs::write(runs.path("agents/claw.toml"), "name = 'claw'").unwrap();
    messages += &runs.wrong_use(&[&agent[..], &ask].concat()).await;
    assert_eq!(fs::read_dir(runs.path("outside")).unwrap().count(), 0);
    insta::assert_snapshot!(messages, @r"
    error: no model is named, and the agent has none of its own: name one with `--model` or `COGNI_MODEL`
    error: `claw` may not use the model `gpt-5`; take `m-1`, `m-2`
    error: there is nothing to answer; give `--message`, or a workspace with `.cogni/prompt.txt` in it
    error: the workspace is read-only, and `claw` keeps its state there; say `--workspace /here/task:rw`
    error: the workspace is read-only, and the message is to stand in `.cogni/prompt.txt`; say `--workspace /here/task:rw`, or write that file and leave `--message` out
    error: `.openclaw` leads through a symlink; what is in a workspace must not lead out of it
    error: none of the messages is a user's; there is nothing to answer
    error: the message has 5242880 bytes, and OpenClaw takes 4194304; give less, or put the message into a file of the workspace
    error: the message has 5242890 bytes, and the agent takes it as an argument, which may have 131071; give less
    error: /here/agents/claw.toml:1: missing field `description`
    ");
}
