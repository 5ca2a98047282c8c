//! A1, R6, R8: Tests of `cogni-gateway run --agent` and `--spec`, in sandboxes of the embedded driver, which needs
//! nothing installed.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::model_provider::{self, calling_tool};

/// The directory of the runs, and their provider.
pub(super) struct AgentRuns {
    folder: TempDir,
    pub(super) provider: model_provider::RunningProvider,
}

pub(super) struct RunCommandEnd {
    status: i32,
    stdout: String,
    stderr: String,
}

impl AgentRuns {
    pub(super) async fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            provider: model_provider::start_default().await,
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    pub(super) fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command
            .current_dir(self.folder.path())
            .env_clear()
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", self.provider.addr.to_string())
            .env("COGNI_INIT", concat!(env!("OUT_DIR"), "/cogni-init"))
            .env("COGNI_RUN_DIR", self.path("r"))
            .arg("run")
            .args(flags);
        command
    }

    pub(super) async fn ended(&self, mut command: Command) -> RunCommandEnd {
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let status = output.status.code().unwrap();
        RunCommandEnd { status, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Makes a run to its end, which leaves no directory.
    pub(super) async fn run(&self, flags: &[&str]) -> Value {
        let mut command = self.command(flags);
        command.env("BILLING_ACCOUNT_ID", "acct-1");
        self.result(command).await
    }

    pub(super) async fn result(&self, command: Command) -> Value {
        let RunCommandEnd { status, stdout, stderr } = self.ended(command).await;
        let result: Value =
            serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{status} {stdout}\n{stderr}"));
        assert_eq!(status == 0, result["ok"] == json!(true), "{result}");
        assert_eq!(fs::read_dir(self.path("r")).unwrap().count(), 0);
        result
    }

    async fn ask(&self, model: &str, flags: &[&str]) -> Value {
        let agent = ["--agent", "sandbox:agent", "--message", "hi ü", "--model", model];
        self.run(&[&agent, flags].concat()).await
    }

    /// Returns the command's error for wrong use.
    pub(super) async fn wrong_use(&self, flags: &[&str]) -> String {
        let mut command = self.command(flags);
        command.env("BILLING_ACCOUNT_ID", "acct-1");
        let RunCommandEnd { status, stdout, stderr } = self.ended(command).await;
        assert_eq!((status, stdout.as_str()), (2, ""), "{stderr}");
        let directory = self.folder.path().canonicalize().unwrap();
        stderr.replace(directory.to_str().unwrap(), "/here")
    }
}

fn result_facts(result: &Value) -> Value {
    json!([result["ok"], result["exit_code"], result["error_code"]])
}

fn result_text(result: &Value) -> &str {
    result["agent"]["payloads"][0]["text"].as_str().unwrap_or_default()
}

/// A1: The agent gets the conversation and returns its answer, in a workspace that is made automatically.
#[tokio::test]
async fn an_agent_answers_and_its_answer_is_in_the_result() {
    let runs = AgentRuns::new().await;
    let result = runs.ask("fake/echo=yes", &[]).await;
    assert_eq!(result_facts(&result), json!([true, 0, null]), "{result}");
    assert_eq!(result_text(&result), "hi ü");
    assert_eq!(result["agent"]["meta"]["error"], Value::Null);
    assert_eq!(result["usage"]["turns"], 1);
    let look = "pwd; [ $(id -u) -ge 2100000000 ] && echo own; ls -A; stat -c '%U %a' . .cogni .cogni/messages.json; touch new; id -u > new";
    let result = runs.ask(&calling_tool(&["sh", "-c", look]), &[]).await;
    let done: Value = serde_json::from_str(result_text(&result)).unwrap();
    insta::assert_snapshot!(done["stdout"].as_str().unwrap(), @r"
    /workspace
    own
    .cogni
    agent 700
    agent 755
    agent 644
    ");
    assert_eq!(done["exit_code"], 0, "{done}");
}

/// R6: A workspace of the host gets the conversation, and keeps the agent's files.
#[tokio::test]
async fn a_workspace_of_the_hosts_is_written_to_and_kept() {
    let runs = AgentRuns::new().await;
    let task = runs.path("task");
    fs::create_dir(&task).unwrap();
    fs::set_permissions(&task, Permissions::from_mode(0o777)).unwrap();
    let result = runs.ask(&calling_tool(&["touch", "made"]), &["--workspace", "task:rw"]).await;
    assert_eq!(result_facts(&result), json!([true, 0, null]), "{result}");
    let messages = fs::read_to_string(task.join(".cogni/messages.json")).unwrap();
    assert_eq!(messages, r#"{"messages":[{"content":"hi ü","role":"user"}]}"#);
    for (name, uid) in [(".cogni", 1001), (".cogni/messages.json", 1001), ("made", 1001), ("", 0)] {
        assert_eq!(fs::metadata(task.join(name)).unwrap().uid(), uid, "{name}");
    }
    // A conversation that already exists is answered as it is, also in a read-only workspace.
    fs::write(task.join(".cogni/messages.json"), r#"[{"role":"user","content":"second"}]"#)
        .unwrap();
    let model = ["--model", "fake/echo=yes", "--workspace", "task"];
    let result = runs.run(&[&["--agent", "sandbox:agent"], &model[..]].concat()).await;
    assert_eq!(result_text(&result), "second");
}

/// R6: A symbolic link that an agent has put into the workspace is not followed.
#[tokio::test]
async fn a_symlink_in_the_workspace_is_not_followed() {
    let runs = AgentRuns::new().await;
    let (task, outside) = (runs.path("task"), runs.path("outside"));
    fs::create_dir(&task).unwrap();
    fs::create_dir(&outside).unwrap();
    chown(&task, Some(1001), Some(1001)).unwrap();
    fs::write(outside.join("messages.json"), "mine").unwrap();
    let ask =
        ["--agent", "sandbox:agent", "--message", "x", "--model", "m", "--workspace", "task:rw"];
    symlink(&outside, task.join(".cogni")).unwrap();
    insta::assert_snapshot!(runs.wrong_use(&ask).await, @"error: `.cogni` leads through a symlink; what is in a workspace must not lead out of it");
    fs::remove_file(task.join(".cogni")).unwrap();
    fs::write(task.join(".cogni"), "").unwrap();
    insta::assert_snapshot!(runs.wrong_use(&ask).await, @"error: `.cogni` cannot be written: Not a directory (os error 20)");
    // The file itself is replaced, whatever it was.
    fs::remove_file(task.join(".cogni")).unwrap();
    fs::create_dir(task.join(".cogni")).unwrap();
    fs::set_permissions(task.join(".cogni"), Permissions::from_mode(0o755)).unwrap();
    symlink(outside.join("messages.json"), task.join(".cogni/messages.json")).unwrap();
    let result = runs.ask("fake/echo=yes", &["--workspace", "task:rw"]).await;
    assert_eq!(result_text(&result), "hi ü", "{result}");
    assert!(fs::symlink_metadata(task.join(".cogni/messages.json")).unwrap().is_file());
    assert_eq!(fs::read_to_string(outside.join("messages.json")).unwrap(), "mine");
    // The owner of a directory that existed before does not change.
    assert_eq!(fs::metadata(task.join(".cogni")).unwrap().uid(), 0);
    let left: Vec<_> = fs::read_dir(task.join(".cogni")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// A1, R1: Each kind of an agent's failure has its own code.
#[tokio::test]
async fn each_failure_of_an_agent_has_its_code() {
    let runs = AgentRuns::new().await;
    let envelope = |meta: &str| format!("echo '{{\"payloads\":[],\"meta\":{meta}}}'");
    let error = r#"{"error":{"kind":"context_overflow","message":"too long"}}"#;
    let mut messages = vec![];
    for (agent, flags) in [
        (envelope(r#"{"error":null}"#), &[][..]),
        (format!("{}; exit 3", envelope("{}")), &[]),
        (envelope(error), &[]),
        (format!("{}; exit 1", envelope(error)), &[]),
        (envelope(r#"{"error":"plain"}"#), &[]),
        ("echo hello".to_owned(), &[]),
        (String::new(), &[]),
        ("echo no JSON; echo why >&2; exit 1".to_owned(), &[]),
        ("kill -KILL $$".to_owned(), &[]),
        (format!("head -c 9000 /dev/zero; {}", envelope("{}")), &["--max-output", "4k"]),
        ("tail /dev/zero".to_owned(), &["--max-memory", "32m"]),
        ("trap 'exit 0' TERM; while true; do sleep 0.1; done".to_owned(), &["--max-runtime", "5s"]),
    ] {
        // The first process only starts the agent, which is another such script.
        let script = format!(
            "#!/bin/sh\ncase $0 in */cogni-init) while [ $1 != -- ]; do shift; done; shift; \"$@\"; exit ;; esac\n{agent}\n"
        );
        let program = runs.path("script");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let init = ["--init", program.to_str().unwrap()];
        let result = runs.ask("m", &[&init, flags].concat()).await;
        let answered = !result["agent"].is_null();
        messages.push(format!("{} {answered} {}", result_facts(&result), result["error"]));
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    [true,0,null] true null
    [false,3,"container_failed"] true "the agent has answered, and then ended with exit code 3"
    [false,0,"agent_failed"] true "context_overflow: too long"
    [false,1,"agent_failed"] true "context_overflow: too long"
    [false,0,"agent_failed"] true "plain"
    [false,0,"invalid_output"] false "the agent's standard output ends in no JSON object: expected value at line 1 column 1 of its last line, `hello`; an agent prints its answer last, as `{\"payloads\":[…],\"meta\":{…}}`"
    [false,0,"invalid_output"] false "the agent has printed nothing on standard output, where its answer should be"
    [false,1,"container_failed"] false "the agent has ended with exit code 1, without an answer; its last words: why"
    [false,137,"container_failed"] false "the agent was ended by signal 9, without an answer; its last words: Killed"
    [false,0,"output_truncated"] false "the agent has printed more than the result keeps of standard output"
    [false,137,"oom_killed"] false "the agent was killed for want of memory; give it more, or less to do"
    [false,137,"timeout"] false null
    "#);
}

/// A1, G9: An agent with a spent budget reports it, and so does the result.
#[tokio::test]
async fn an_agent_that_spends_its_budget_is_ended() {
    let runs = AgentRuns::new().await;
    let result = runs.ask("fake/tool=exec;repeat=yes", &["--max-turns", "2"]).await;
    assert_eq!(result["error_code"], "budget_exhausted", "{result}");
    assert_eq!(result["usage"]["turns"], 2);
}

/// R8: Contradictory options are refused before anything is made.
#[tokio::test]
async fn contradictory_options_are_refused() {
    let runs = AgentRuns::new().await;
    let mut messages = String::new();
    for flags in [
        &["--agent", "sandbox:unknown", "--message", "x", "--model", "m"][..],
        &["--agent", "sandbox:agent", "--message", "x"],
        &["--agent", "sandbox:agent", "--model", "m"],
        &["--agent", "sandbox:agent", "--message", "x", "--model", "m", "--workspace", "."],
        &["--agent", "sandbox:agent", "--message", "x", "--model", "m", "--init", "none"],
        &["--message", "x", "--", "true"],
        &["--spec", "nowhere.toml"],
    ] {
        messages += &runs.wrong_use(flags).await;
    }
    insta::assert_snapshot!(messages, @r"
    error: there is no agent `sandbox:unknown`; there is `sandbox:agent`, `sandbox:openclaw`
    error: no model is named, and the agent has none of its own: name one with `--model` or `COGNI_MODEL`
    error: there is nothing to answer; give `--message`, or a workspace with `.cogni/messages.json` in it
    error: the workspace is read-only, and the message is to stand in `.cogni/messages.json`; say `--workspace /here:rw`, or write that file and leave `--message` out
    error: the program of `sandbox:agent` is in the file of cogni-init; leave out `--init none`
    error: `--message` is for an agent; name one with `--agent`
    error: cannot read `nowhere.toml`: No such file or directory (os error 2)
    ");
}

/// R8: A message on standard input is read up to a limit.
#[tokio::test]
async fn a_message_on_standard_input_has_an_end() {
    let runs = AgentRuns::new().await;
    let file = runs.path("message");
    fs::write(&file, "x".repeat((16 << 20) + 1)).unwrap();
    let mut command = runs.command(&["--agent", "sandbox:agent", "--message", "-", "--model", "m"]);
    command.env("BILLING_ACCOUNT_ID", "acct-1").stdin(File::open(&file).unwrap());
    let RunCommandEnd { status, stdout, stderr } = runs.ended(command).await;
    assert_eq!((status, stdout.as_str()), (2, ""), "{stderr}");
    insta::assert_snapshot!(stderr, @"error: the message cannot be read from standard input: it has more than 16777216 bytes");
}

/// R8: A run can be described in a file, and the shipped example is valid.
#[tokio::test]
async fn a_file_says_what_to_run_and_flags_win() {
    let runs = AgentRuns::new().await;
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/config/run.toml");
    // The example names the account.
    let result = runs.result(runs.command(&["--spec", example])).await;
    assert_eq!(result_facts(&result), json!([true, 0, null]), "{result}");
    assert_eq!(result["stdout"], "the answer is 42, and the LLM is at http://localhost:8080/v1\n");
    let result = runs.run(&["--spec", example, "--env", "ANSWER=43"]).await;
    assert!(result["stdout"].as_str().unwrap().contains("is 43"));
    let result = runs.run(&["--spec", example, "--", "sh", "-c", "echo $ANSWER; exit 7"]).await;
    assert_eq!(
        (result_facts(&result), &result["stdout"]),
        (json!([false, 7, "container_failed"]), &json!("42\n"))
    );
    let agent = ["--agent", "sandbox:agent", "--message", "hi", "--model", "fake/echo=yes"];
    let result = runs.run(&[&["--spec", example], &agent[..]].concat()).await;
    assert_eq!(result_text(&result), "hi");
    fs::write(
        runs.path("run.toml"),
        "run = 'run-of-file'\nagent = 'sandbox:agent'\nmessage = 'from a file'\n\
         [llm]\naccount = 'acct-2'\nmodel = 'fake/tool=exec;repeat=yes'\nbudget = { max_turns = 1 }\n",
    )
    .unwrap();
    let result = runs.result(runs.command(&["--spec", "run.toml"])).await;
    assert_eq!(
        (&result["run_id"], &result["error_code"]),
        (&json!("run-of-file"), &json!("budget_exhausted"))
    );
    let flags = [
        "--spec",
        "run.toml",
        "--model",
        "fake/echo=yes",
        "--run-id",
        "run-of-flag",
        "--max-turns",
        "5",
    ];
    let result = runs.result(runs.command(&flags)).await;
    assert_eq!((&result["run_id"], result_text(&result)), (&json!("run-of-flag"), "from a file"));
}

/// R8: The error of a mistake in a file shows its line.
#[tokio::test]
async fn the_error_of_a_wrong_file_names_its_line() {
    let runs = AgentRuns::new().await;
    let mut messages = vec![];
    for text in [
        "argv = ['true']\nnetwork = 'host'\n",
        "argv = 'true'\n",
        "argv = ['true']\n\n[limits]\nmax_memory = '512 megabytes'\n",
        "argv = ['true']\n[llm.budget]\nmax_turns = -1\n",
        "argv = ['true']\n[[mounts]]\nsource = '/srv'\n",
        "argv = [\n",
    ] {
        fs::write(runs.path("run.toml"), text).unwrap();
        let shown = runs.wrong_use(&["--spec", "run.toml"]).await;
        messages.push(shown.lines().next().unwrap().to_owned());
    }
    insta::assert_snapshot!(messages.join("\n"), @r"
    error: run.toml:2: this is no run: TOML parse error at line 2, column 1
    error: run.toml:1: this is no run: TOML parse error at line 1, column 8
    error: run.toml:4: this is no run: TOML parse error at line 4, column 14
    error: run.toml:3: this is no run: TOML parse error at line 3, column 13
    error: run.toml:2: this is no run: TOML parse error at line 2, column 1
    error: run.toml:1: this is no run: TOML parse error at line 1, column 9
    ");
}

/// R8: The live output shows the agent's text and actions, the cost of each call, and the end.
#[tokio::test]
async fn progress_can_be_followed() {
    let runs = AgentRuns::new().await;
    let model = calling_tool(&["sh", "-c", "exit 3"]);
    let agent = ["--agent", "sandbox:agent", "--message", "x", "--model", &model];
    let flags = ["--progress", "always", "--run-id", "run-1", "--max-turns", "5"];
    let mut command = runs.command(&[&agent[..], &flags].concat());
    command.env("BILLING_ACCOUNT_ID", "acct-1");
    let RunCommandEnd { status, stderr, .. } = runs.ended(command).await;
    assert_eq!(status, 0, "{stderr}");
    // The agent's text and the cost of a call arrive independently.
    let mut lines: Vec<_> = stderr.lines().collect();
    let last = lines.pop().unwrap();
    assert!(
        last.starts_with("after ") && last.ends_with(": 2 turns, 22 tokens in, 7 out"),
        "{last}"
    );
    let end = lines.len() - 1;
    lines[1..end].sort_unstable();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    run run-1: `sandbox:agent` in this machine's programs, by the driver `embedded`, for 10m at most
    $ sh -c 'exit 3'
    exit code 3
    turn 1: 11 tokens in, 4 out; left: 4 turns
    turn 2: 11 tokens in, 3 out; left: 3 turns
    {"exit_code":3,"stderr":"","stdout":""}
    ok
    "#);
}
