//! A1: Tests of the agent's tool: programs that end, do not end, flood, or leave other processes behind.

use std::time::{Duration, Instant};

use cogni_gateway::guest::agent::exec::{self, ExecResult, KEEP_BYTES};
use serde_json::{Value, json};

use super::AgentFixture;
use crate::support::model_provider::calling_tool_with;

fn run(arguments: &Value) -> ExecResult {
    let request = exec::parse_call("exec", &arguments.to_string()).unwrap();
    exec::run_tool(&request, Instant::now() + Duration::from_mins(1))
}

fn run_shell(script: &str) -> ExecResult {
    run(&json!({ "argv": ["sh", "-c", script] }))
}

/// A busy machine may need more than a second to start the program, so the time is extended until `first` was printed.
fn timed_out(script: &str, first: &str) -> ExecResult {
    let run = |seconds: u32| run(&json!({ "argv": ["sh", "-c", script], "timeout_s": seconds }));
    let mut tries = [1, 4, 16, 50].into_iter().map(run);
    tries.find(|done| done.stdout.contains(first)).expect("it says something in a minute")
}

/// Arguments are neither joined nor split, and the input arrives unchanged.
#[test]
fn the_arguments_and_the_input_arrive_as_they_were_given() {
    let done = run(&json!({ "argv": ["printf", "<%s>", "a b", "$HOME", "", "; id"] }));
    assert_eq!((done.exit_code, done.stdout.as_str()), (Some(0), "<a b><$HOME><><; id>"));
    let long = "ü\n".repeat(200_000);
    let done = run(&json!({ "argv": ["wc", "-c"], "stdin": long }));
    assert_eq!(done.stdout.trim(), "600000");
    // A program that does not read its input ends as usual.
    let done = run(&json!({ "argv": ["true"], "stdin": long }));
    assert_eq!(done.exit_code, Some(0));
}

#[test]
fn the_end_of_a_program_is_reported() {
    insta::assert_snapshot!(run_shell("exit 42"), @r#"{"exit_code":42,"stderr":"","stdout":""}"#);
    insta::assert_snapshot!(run_shell("kill -KILL $$"), @r#"{"exit_code":null,"signal":9,"stderr":"","stdout":""}"#);
    let done = timed_out("echo begun; sleep 600", "begun");
    insta::assert_snapshot!(done, @r#"{"exit_code":null,"signal":9,"stderr":"","stdout":"begun\n","timed_out":true}"#);
    let done = run(&json!({ "argv": ["/nowhere/program"] }));
    insta::assert_snapshot!(done, @r#"{"error":"`/nowhere/program` cannot be run: No such file or directory (os error 2)"}"#);
}

#[test]
fn an_invalid_tool_call_is_reported_to_the_model() {
    let messages = [
        ("exec", "{"),
        ("exec", "{}"),
        ("exec", r#"{"argv":[]}"#),
        ("exec", r#"{"argv":["ls"],"shell":true}"#),
        ("exec", r#"{"argv":"ls -l"}"#),
        ("read_file", "{}"),
    ]
    .map(|(name, arguments)| exec::parse_call(name, arguments).unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"), @r#"
    {"error":"the arguments are invalid: EOF while parsing an object at line 1 column 1"}
    {"error":"the arguments are invalid: missing field `argv` at line 1 column 2"}
    {"error":"`argv` names no program"}
    {"error":"the arguments are invalid: unknown field `shell`, expected one of `argv`, `stdin`, `timeout_s` at line 1 column 22"}
    {"error":"the arguments are invalid: invalid type: string \"ls -l\", expected a sequence at line 1 column 15"}
    {"error":"there is no tool `read_file`; there is `exec`"}
    "#);
}

/// The tool keeps the beginning and the end of each stream of a flood.
#[test]
fn a_flood_costs_no_more_than_the_kept_output() {
    let done = run_shell("echo first; yes | head -c 50000000; echo last; echo err >&2");
    assert_eq!((done.exit_code, done.stderr.as_str()), (Some(0), "err\n"));
    assert!(done.stdout.starts_with("first\ny\n") && done.stdout.ends_with("y\nlast\n"));
    let left_out = format!("\n[{} bytes left out]\n", 50_000_011 - 2 * KEEP_BYTES);
    assert!(done.stdout.contains(&left_out), "{}", done.stdout.len());
    assert_eq!(done.stdout.len(), 2 * KEEP_BYTES + left_out.len());
}

/// A program that never stops writing is killed in time.
#[test]
fn a_flood_without_an_end_is_ended() {
    let done = timed_out("exec yes", "bytes left out");
    assert!(done.timed_out, "{done}");
}

/// A background process does not delay the agent, and is not killed.
#[test]
fn a_background_process_delays_nothing() {
    let begun = Instant::now();
    let done = run_shell("sleep 300 & echo $!");
    assert_eq!(done.exit_code, Some(0));
    assert!(begun.elapsed() < Duration::from_secs(200));
    let pid = done.stdout.trim();
    let lives = std::path::Path::new("/proc").join(pid).exists();
    assert!(std::process::Command::new("kill").args(["-KILL", pid]).status().unwrap().success());
    assert!(lives);
}

/// The agent's own time limit applies to the tool as well.
#[tokio::test]
async fn a_tool_does_not_outlive_the_agents_time() {
    let agent = AgentFixture::new().await;
    let model = calling_tool_with(&json!({ "argv": ["sleep", "600"] }));
    let ended = agent.ask(&model, &["--timeout", "1"]).await;
    assert_eq!(ended.envelope["meta"]["error"]["kind"], "timeout", "{}", ended.envelope);
    assert_eq!(ended.code, 1);
}
