//! R1, R4, R6, R8: Tests of the contract of a run, for every driver.

use std::fs::{self, File};
use std::process::Stdio;

use serde_json::{Value, json};

use super::driver::{TestedRunner, shell_argv};
use crate::support::process::wait_until;

/// R1: The exit code is the program's own, and only 0 is a success.
#[test]
fn exit_codes_come_through() {
    let runner = TestedRunner::new();
    for code in [1, 2, 42, 126, 127, 137, 143] {
        let result = runner.run(&[], &shell_argv(&format!("exit {code}")));
        assert_eq!(result.status, 1);
        assert_eq!(result.facts(), json!([false, code, "container_failed"]));
    }
    let result = runner.run(&[], &shell_argv("exit 0"));
    assert_eq!((result.status, result.facts()), (0, json!([true, 0, null])));
}

/// R1: The exit codes of programs that cannot start or are killed are those of a shell.
#[test]
fn a_program_that_cannot_be_started_or_is_killed_has_the_exit_code_of_a_shell() {
    let runner = TestedRunner::new();
    for (argv, code) in [
        (vec!["/nowhere"], 127),
        (vec!["/etc/passwd"], 126),
        (shell_argv("kill -KILL $$").into(), 137),
        (shell_argv("kill -TERM $$").into(), 143),
    ] {
        let result = runner.run(&[], &argv);
        assert_eq!(result.facts(), json!([false, code, "container_failed"]), "{argv:?}");
    }
}

/// R1: Arguments are neither joined nor split.
#[test]
fn the_arguments_arrive_as_they_were_given() {
    let argv = ["printf", "<%s>", "a b", "$HOME", "", "'; id", "ü\n"];
    let result = TestedRunner::new().run(&[], &argv);
    assert_eq!(result.json["stdout"], "<a b><$HOME><><'; id><ü\n>");
}

/// R8: Standard output has only the result; the program's output appears live on standard error.
#[test]
fn the_two_streams_are_separate_and_printed_live() {
    let result = TestedRunner::new().run(&[], &shell_argv("echo to out; echo to err >&2"));
    assert_eq!(result.json["stdout"], "to out\n");
    assert_eq!(result.json["stderr"], "to err\n");
    let lines: Vec<_> = result.shown.lines().filter(|line| line.starts_with("to ")).collect();
    assert_eq!(lines.len(), 2, "{}", result.shown);
}

/// R4: The environment tells every client the gateway's address, and has no key.
#[test]
fn the_program_finds_what_every_client_needs_in_its_environment() {
    let run = format!("run-env-{}", std::process::id());
    let result = TestedRunner::new().run(&["--env", "COGNI_MODEL=m", "--run-id", &run], &["env"]);
    let stdout = result.json["stdout"].as_str().unwrap().replace(&run, "run-env");
    let mut variables: Vec<_> = stdout
        .lines()
        .filter(|line| !line.starts_with("PATH=") && !line.starts_with("HOSTNAME="))
        .collect();
    variables.sort_unstable();
    insta::assert_snapshot!(variables.join("\n"), @r"
    ANTHROPIC_API_KEY=placeholder
    ANTHROPIC_BASE_URL=http://localhost:8080
    COGNI_MODEL=m
    HOME=/workspace
    OPENAI_API_BASE=http://localhost:8080/v1
    OPENAI_API_KEY=placeholder
    OPENAI_BASE_URL=http://localhost:8080/v1
    RUN_ID=run-env
    ");
}

/// R5: The cost of a flood of output is bounded, in the result and in memory.
#[test]
fn a_flood_is_counted_and_not_kept() {
    let runner = TestedRunner::new();
    let flood =
        shell_argv("echo first; dd if=/dev/zero bs=1M count=100 2>/dev/null; echo; echo last");
    let stdout = runner.path().join("result");
    let mut command = runner.prepare(&["--max-output", "4k"], &flood);
    command.stdout(File::create(&stdout).unwrap()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut peak_memory = 0;
    let has_ended = || {
        peak_memory = peak_memory.max(peak_memory_of(child.id()));
        child.try_wait().unwrap().is_some()
    };
    wait_until(has_ended, || "the flood does not end".to_owned());
    let result: Value = serde_json::from_slice(&fs::read(&stdout).unwrap()).unwrap();
    assert_eq!(result["error_code"], "output_truncated");
    assert_eq!((&result["ok"], &result["truncated"]), (&json!(false), &json!(true)));
    assert_eq!(result["stdout_bytes"], (100 << 20) + 12);
    let stdout = result["stdout"].as_str().unwrap();
    assert!(stdout.starts_with("first\n") && stdout.ends_with("\nlast\n") && stdout.len() < 5000);
    assert!((1..64 << 20).contains(&peak_memory), "{peak_memory} bytes");
}

/// Returns the peak memory in bytes; 0 for a process that has ended.
fn peak_memory_of(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024)
}

/// R1, R5, G9: Calls reach the upstream from inside the sandbox, until the budget is spent.
#[tokio::test(flavor = "multi_thread")]
async fn calls_go_through_the_gateway_until_the_budget_is_spent() {
    let runner = TestedRunner::with_provider().await;
    let call = "curl --silent -H 'content-type: application/json' \
                -d '{\"model\":\"fake/chunks=5\",\"messages\":[]}' $OPENAI_BASE_URL/chat/completions";
    let result = runner.run(&["--max-turns", "2"], &shell_argv(&format!("{call}; {call}")));
    assert_eq!(result.facts(), json!([true, 0, null]));
    assert_eq!(result.json["usage"]["turns"], 2, "{}", result.json);
    assert!(result.json["stdout"].as_str().unwrap().contains("hello from the fake provider"));

    let again = format!("trap 'exit 0' TERM; while true; do {call}; sleep 0.1; done");
    let result = runner.run(&["--max-turns", "2"], &shell_argv(&again));
    assert_eq!(result.json["error_code"], "budget_exhausted", "{}", result.json);
    assert_eq!(result.json["usage"]["turns"], 2);
    assert_eq!(result.status, 1);
}

/// R5, G9: A call that is too large is refused, and the run continues. The refusal becomes the result only if the
/// program fails because of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_too_large_does_not_end_the_run() {
    let runner = TestedRunner::with_provider().await;
    let script = |last: &str| {
        let call = r#"
            call() { curl --silent --fail -o /dev/null -H 'content-type: application/json' --data-binary @- $OPENAI_BASE_URL/chat/completions; }
            {
                printf '{"model":"fake/chunks=1","max_tokens":9,"messages":[],"user":"'
                head -c 100000 /dev/zero | tr '\0' x
                printf '"}'
            } | call && exit 3
        "#;
        format!("{call}\n{last}")
    };
    let flags = ["--max-total-tokens", "2000"];
    let small = r#"echo '{"model":"fake/chunks=1","max_tokens":9,"messages":[]}' | call"#;
    let goes_on = runner.run(&flags, &shell_argv(&script(small)));
    assert_eq!(goes_on.facts(), json!([true, 0, null]), "{}", goes_on.json);
    assert_eq!(goes_on.json["usage"]["refused"], 1);
    let gives_up = runner.run(&flags, &shell_argv(&script("exit 1")));
    assert_eq!(gives_up.facts(), json!([false, 1, "budget_exhausted"]), "{}", gives_up.json);
}

/// R6: The workspace is mounted read-only or writable, as requested.
#[test]
fn a_workspace_is_read_or_written_as_it_was_asked_for() {
    use std::os::unix::fs::PermissionsExt;

    let runner = TestedRunner::new();
    let task = runner.path().join("task");
    fs::create_dir(&task).unwrap();
    fs::set_permissions(&task, fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(task.join("question"), "why").unwrap();
    let root = runner.path().display().to_string();
    let with = |mode: &str, script: &str| {
        let workspace = format!("{}{mode}", task.display());
        runner.run(&["--root", &root, "--workspace", &workspace], &shell_argv(script)).facts()
    };
    let failed = json!([false, 1, "container_failed"]);
    assert_eq!(with("", "grep -q why question && ! touch answer"), json!([true, 0, null]));
    assert_eq!(with(":ro", "touch answer"), failed);
    assert_eq!(with(":rw", "cat question > answer"), json!([true, 0, null]));
    assert_eq!(fs::read_to_string(task.join("answer")).unwrap(), "why");
    assert_eq!(with(":none", "cat question"), failed);
}

/// R8: A mistake that can be detected before anything is made is wrong use, without a result.
#[test]
fn wrong_use_is_distinguished_from_a_failed_run() {
    let runner = TestedRunner::new();
    for (flags, argv) in [
        (&["--workspace", "/etc"][..], &["true"][..]),
        (&["--pids", "0"], &["true"]),
        (&["--max-memory", "lots"], &["true"]),
        (&["--init", "/nowhere"], &["true"]),
        (&["--no-such-flag"], &["true"]),
        (&[], &[]),
    ] {
        let (status, stdout, _) = runner.command(flags, argv);
        assert_eq!((status, stdout.as_str()), (2, ""), "{flags:?}");
    }
}

/// R1: The result has these fields, for programs that read it.
#[test]
fn a_result_has_these_fields() {
    let run = format!("run-fields-{}", std::process::id());
    let result = TestedRunner::new().run(&["--run-id", &run], &shell_argv("echo hi"));
    let mut json = result.json;
    for (name, timing) in json["timings"].as_object_mut().unwrap() {
        assert!(timing.as_u64().unwrap() > 0, "{name}");
        *timing = Value::from(0);
    }
    insta::assert_snapshot!(
        serde_json::to_string(&json).unwrap().replace(&run, "run-fields"),
        @r#"{"exit_code":0,"ok":true,"run_id":"run-fields","stderr":"","stderr_bytes":0,"stdout":"hi\n","stdout_bytes":3,"timings":{"start_ms":0,"total_ms":0},"truncated":false,"usage":{"admitted":0,"input":0,"output":0,"refused":0,"turns":0}}"#
    );
}
