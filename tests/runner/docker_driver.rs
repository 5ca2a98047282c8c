//! R1–R5, R8: Tests of runs in sandboxes of a real Docker Engine, through `cogni-gateway run`. Files that hold for
//! every driver are also included by [`crate::embedded`].

mod branch_delivery;
mod catalog_agent;
mod contract;
mod driver;
mod engine_faults;
mod engine_restart;
mod escape;
mod gateway_container;
mod image_checks;
mod isolation;
mod killed;
mod leftovers;
pub(crate) mod long_running;
mod orphans;
mod run_end;
mod service;
mod sweep;
mod tool_jobs;
mod warm_pool;

use std::os::unix::net::UnixListener;
use std::process::Stdio;

use serde_json::{Value, json};

use driver::{TestedRunner, shell_argv};

/// R4: An image with its own bridge works as before.
#[test]
fn a_sandbox_may_run_without_cogni_init() {
    let bridge =
        shell_argv("socat -T1 STDIO UNIX-CONNECT:/llm-sock/llm.sock </dev/null; echo $?; exit 42");
    let result = TestedRunner::new().run(&["--init", "none"], &bridge);
    assert_eq!(result.facts(), json!([false, 42, "container_failed"]));
    assert_eq!(result.json["stdout"], "0\n");
}

/// R5: The deadline is armed before the first call to the engine.
#[test]
fn an_engine_that_does_not_answer_costs_no_more_than_the_deadline() {
    let runner = TestedRunner::new();
    let socket = runner.path().join("engine.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    let flags = ["--docker-socket", socket.to_str().unwrap(), "--max-runtime", "1s"];
    let result = runner.run(&flags, &["true"]);
    assert_eq!(result.facts(), json!([false, null, "timeout"]));
}

/// R5: A listener that does not read the output delays neither the sandbox nor its result.
#[test]
fn a_listener_that_does_not_read_costs_no_output() {
    let runner = TestedRunner::new();
    let script = shell_argv("head -c 1000000 /dev/zero | tr '\\0' x; echo aside >&2");
    let mut command = runner.prepare(&["--run-id", "run-unread"], &script);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let unread = child.stderr.take();
    let output = child.wait_with_output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json!([result["ok"], result["stdout_bytes"]]), json!([true, 1_000_000]));
    assert_eq!(result["stderr"], "aside\n");
    drop(unread);
}

/// R5: Invalid UTF-8 is replaced, and counted with its original length.
#[test]
fn invalid_utf8_in_output_is_replaced() {
    let result = TestedRunner::new().run(&[], &shell_argv("printf 'a\\377\\300b\\n'"));
    assert_eq!(result.json["stdout"], "a\u{fffd}\u{fffd}b\n");
    assert_eq!(result.json["stdout_bytes"], 5);
}

/// R3: Images are never pulled.
#[test]
fn an_image_has_to_be_there() {
    let absent = ["--image", "cogni-gateway-test:absent"];
    let result = TestedRunner::new().run(&absent, &["true"]);
    assert_eq!(result.facts(), json!([false, null, "image_not_found"]));
    insta::assert_snapshot!(result.json["error"].as_str().unwrap(), @"image `cogni-gateway-test:absent` is not on this machine; build or load it first, nothing is pulled");
}

/// R4: The libc resolves the name `localhost` to the address that every client gets; curl would know the name by
/// itself.
#[test]
fn the_name_localhost_leads_to_the_gateway() {
    let call = "printf 'GET /health HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n' | socat STDIO,ignoreeof TCP:localhost:8080; cat /etc/hosts";
    let result = TestedRunner::new().run(&[], &shell_argv(call));
    let stdout = result.json["stdout"].as_str().unwrap();
    assert!(stdout.starts_with("HTTP/1.1 200 OK\r\n"), "{}", result.json);
    assert!(stdout.ends_with("127.0.0.1 localhost sandbox\n"), "{stdout}");
}
