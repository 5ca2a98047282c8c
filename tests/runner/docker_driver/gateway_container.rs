//! R4, R5: Tests of the gateway in a container beside the sandbox.

use std::fs;

use cogni_gateway::sandbox::{gateway_container_name, sandbox_name};
use serde_json::{Value, json};

use super::driver::{TestedRunner, list_containers, shell_argv};
use crate::support::docker_engine::{self, PrivateEngine, docker_output};
use crate::support::process::ChildProcess;

const CALL: &str = "curl --silent -H 'content-type: application/json' \
    -d '{\"model\":\"fake/chunks=5\",\"messages\":[]}' $OPENAI_BASE_URL/chat/completions";

/// R4, R5, G2: The container serves the agent, the result has the outcome of its calls, and everything is removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_serves_the_gateway() {
    let runner = TestedRunner::with_provider().await;
    let audit = runner.path().join("audit.jsonl");
    let flags = [&ON_THIS_MACHINE[..], &["--audit-log-path", audit.to_str().unwrap()]].concat();
    let result = runner.run(&flags, &shell_argv(&format!("{CALL}; {CALL}")));
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    assert!(result.json["stdout"].as_str().unwrap().contains("hello from the fake provider"));
    let usage = &result.json["usage"];
    assert_eq!([&usage["turns"], &usage["admitted"], &usage["input"]], [2, 2, 22], "{usage}");
    let log = fs::read_to_string(audit).unwrap();
    let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "log.checkpoint");
}

/// R5, G9: The budget ends the sandbox, although another container counts it.
#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_ends_the_sandbox_of_a_gateway_in_a_container() {
    let runner = TestedRunner::with_provider().await;
    let flags = [&ON_THIS_MACHINE[..], &["--max-turns", "2"]].concat();
    let again = format!("trap 'exit 0' TERM; while true; do {CALL}; sleep 0.1; done");
    let result = runner.run(&flags, &shell_argv(&again));
    assert_eq!(result.json["error_code"], "budget_exhausted", "{}", result.json);
    assert_eq!(result.json["usage"]["turns"], 2);
}

/// R4: The container has a network that leads only to the upstream, which only it knows.
#[test]
fn the_gateways_container_is_on_the_network_that_is_asked_for() {
    let engine = PrivateEngine::connect();
    let network = engine.internal_network();
    let upstream = ["--network", &network, "--network-alias", "litellm"];
    engine.run(docker_engine::GATEWAY, &upstream, &["provider", "--listen", "0.0.0.0:4000"]);
    let flags =
        ["--proxy", "container", "--proxy-network", &network, "--litellm-host", "litellm:4000"];
    let result = TestedRunner::new().run(&flags, &shell_argv(CALL));
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    assert_eq!(result.json["usage"]["turns"], 1, "{}", result.json);
}

/// R3, R5: An operator who inspects the container sees no secret; after a crash, the sweep removes it.
#[test]
fn the_key_is_not_shown_and_the_container_is_swept() {
    let runner = TestedRunner::new();
    let run = format!("run-proxy-{}", std::process::id());
    let flags = [&ON_THIS_MACHINE[..], &["--run-id", &run]].concat();
    let mut process =
        ChildProcess::start(&mut runner.prepare(&flags, &shell_argv("echo up; sleep 600")), "");
    process.until(|output| output.contains("up\n"));
    let ids = list_containers(&run);
    let both: Vec<_> = ids.split_whitespace().collect();
    assert_eq!(both.len(), 2, "{ids}");
    let shown = docker_output(&[&["inspect"], &both[..]].concat());
    assert!(shown.contains("LITELLM_MASTER_KEY_FILE=") && !shown.contains("sk-real"), "{shown}");
    process.signal("KILL");
    process.wait();
    let printed = super::sweep::run_sweep(&runner, &["--apply"]).1;
    for name in [sandbox_name(&run), gateway_container_name(&run)] {
        assert!(printed.contains(&format!("container {name}: removed\n")), "{printed}");
    }
    runner.assert_nothing_is_left(&run);
}

/// R1: If the gateway does not start, the result says why, and the agent does not run. The sandbox starts beside the
/// gateway. On a busy machine its first process may give up waiting for the socket, and end with an exit code of its
/// own.
#[test]
fn a_gateway_that_does_not_come_up_says_why() {
    let runner = TestedRunner::new();
    let with = |flags: &[&str], code: &str| {
        let result = runner.run(&[&ON_THIS_MACHINE, flags].concat(), &["echo", "here"]);
        let printed = result.json["stdout"].as_str().unwrap_or_default();
        let facts = json!([result.json["ok"], printed, result.json["error_code"]]);
        assert_eq!(facts, json!([false, "", code]), "{}", result.json);
        result.json["error"].as_str().unwrap().to_owned()
    };
    insta::assert_snapshot!(with(&["--proxy-image", "cogni-gateway-test:absent"], "image_not_found"), @"image `cogni-gateway-test:absent` is not on this machine; build or load it first, nothing is pulled");
    let message = with(&["--proxy-image", docker_engine::HOST], "internal");
    assert!(message.starts_with("Docker Engine cannot start the gateway's container"), "{message}");
    let message = with(&["--metrics-addr", "192.0.2.1:9464"], "internal");
    assert!(message.starts_with("the gateway's container has ended: exit code"), "{message}");
    assert!(
        message.contains("`METRICS_ADDR` is `192.0.2.1:9464`, which cannot be bound"),
        "{message}"
    );
}

/// The upstream is on this machine's loopback, which a container can reach only through the host's network.
const ON_THIS_MACHINE: [&str; 4] = ["--proxy", "container", "--proxy-network", "host"];
