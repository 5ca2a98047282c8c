//! G2: Tests of the image as a replacement for nginx, with real Docker: same volume, same options, same agent, same log
//! reader.
//!
//! The same assertions also run against nginx, so they describe what nginx does.

mod compose;
mod deployment;
mod init;

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::{Value, json};

use compose::ComposeProject;
use deployment::{
    ACCESS_LOG, ACCOUNT, AUDIT_LOG, KEY, METADATA, ProxyContainer, ProxyDeployment, RUN,
};

use crate::support::docker_engine::{self, PrivateEngine};
use crate::support::process::wait_until;

#[test]
fn nginx_passes_the_drop_in_story() {
    tell_the_story(ProxyContainer::Nginx);
}

/// G2: An unmodified agent and an unmodified log reader keep working.
#[test]
fn the_gateway_passes_the_drop_in_story() {
    tell_the_story(ProxyContainer::Gateway);
}

fn tell_the_story(proxy: ProxyContainer) {
    let deployment = ProxyDeployment::start(proxy);
    it_says_that_it_is_ready(&deployment);
    let calls = [it_completes(&deployment), it_streams(&deployment)];
    it_overwrites_who_pays(&deployment);
    it_keeps_litellm_to_itself(&deployment);
    it_drains_an_open_stream(&deployment);
    it_has_logged(&deployment, &calls);
}

fn it_says_that_it_is_ready(deployment: &ProxyDeployment) {
    let reply = deployment.curl(&["http://localhost:8080/health"]);
    assert_eq!((reply.status, reply.json()), (200, json!({ "status": "ok", "runId": RUN })));
}

/// Returns LiteLLM's call id, as the agent received it.
fn it_completes(deployment: &ProxyDeployment) -> String {
    let reply = deployment.complete("fake/chunks=5", false, &[]);
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "hello from the fake provider");
    reply.header("x-litellm-call-id").unwrap().to_owned()
}

/// Returns LiteLLM's call id, as the agent received it.
fn it_streams(deployment: &ProxyDeployment) -> String {
    let reply = deployment.complete("fake/chunks=5", true, &[]);
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(reply.header("content-type").unwrap().starts_with("text/event-stream"));
    assert_eq!(reply.streamed(), "hello from the fake provider", "{}", reply.text);
    assert!(reply.text.ends_with("data: [DONE]\n\n"), "{}", reply.text);
    reply.header("x-litellm-call-id").unwrap().to_owned()
}

fn it_overwrites_who_pays(deployment: &ProxyDeployment) {
    let reply = deployment.complete(
        "fake/chunks=1",
        false,
        &[
            "authorization: Bearer attacker",
            "x-litellm-end-user-id: attacker",
            "x-litellm-spend-logs-metadata: {\"run_id\":\"attacker\"}",
        ],
    );
    assert_eq!(reply.status, 200, "{}", reply.text);
    let seen = deployment.last_seen();
    assert_eq!(seen.all("authorization"), [format!("Bearer {KEY}")]);
    assert_eq!(seen.all("x-litellm-end-user-id"), [ACCOUNT]);
    let metadata: Vec<Value> = seen
        .all("x-litellm-spend-logs-metadata")
        .iter()
        .map(|text| serde_json::from_str(text).unwrap())
        .collect();
    assert_eq!(metadata.len(), 1);
    let operator_metadata: Value = serde_json::from_str(METADATA).unwrap();
    for (name, value) in operator_metadata.as_object().unwrap() {
        assert_eq!(metadata[0][name], *value, "{name}");
    }
}

fn it_keeps_litellm_to_itself(deployment: &ProxyDeployment) {
    let before = deployment.seen_count();
    for path in ["/key/list", "/spend/logs", "/", "/llm-sock/llm.sock"] {
        let reply = deployment.curl(&[&format!("http://localhost:8080{path}")]);
        assert_eq!((reply.status, reply.json()), (404, json!({ "error": "not_found" })), "{path}");
    }
    assert_eq!(deployment.seen_count(), before);
}

/// The stream stops after its first chunks until the proxy has received the signal.
fn it_drains_an_open_stream(deployment: &ProxyDeployment) {
    let mut stream = deployment.stream("fake/chunks=4;gate=2");
    stream.read_until("\"content\":");
    stream.read_until("\"content\":");
    deployment.stop();
    deployment.until_it_refuses();
    deployment.open_the_gate();
    let (rest, code) = stream.finish();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(code, Some(0));
    assert_eq!(deployment.proxy.wait(), 0, "{}", deployment.proxy.logs());
}

/// Reads the log as the old manager did: copied out of the stopped container.
fn it_has_logged(deployment: &ProxyDeployment, calls: &[String]) {
    let log = deployment.proxy.read(ACCESS_LOG);
    assert!(!log.contains(KEY));
    let lines: Vec<_> = log.lines().map(read_pairs).collect();
    for line in &lines {
        for key in ["time", "status", "bytes", "model", "litellm_response_cost", "upstream_time"] {
            assert!(line.contains_key(key), "no {key} in {line:?}");
        }
        assert_eq!((line["runId"], line["attempt"]), (RUN, "0"));
    }
    for call in calls {
        let line = lines.iter().find(|line| line["litellm_call_id"] == call).unwrap();
        assert_eq!(line["status"], "200");
        assert!(line["bytes"].parse::<u64>().unwrap() > 0);
        assert!(line["upstream_time"].parse::<f64>().unwrap() >= 0.0);
    }
    let refused = lines.iter().filter(|line| line["status"] == "404").count();
    assert_eq!(refused, 4);
}

/// Splits a line of the access log as simple readers do: into words, and each word at its first `=`.
fn read_pairs(line: &str) -> BTreeMap<&str, &str> {
    line.split(' ').map(|word| word.split_once('=').unwrap()).collect()
}

/// G4: Headers that nginx passed and LiteLLM obeys do not reach the upstream.
#[test]
fn no_header_that_the_agent_invents_reaches_the_upstream() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let reply = deployment.complete(
        "fake/chunks=1",
        false,
        &[
            "x-litellm-customer-id: attacker",
            "x-litellm-api-key: attacker",
            "x-litellm-tags: attacker",
            "x-litellm-session-id: attacker",
            "x-litellm-call-id: attacker",
            "x-api-key: attacker",
            "api-key: attacker",
            "cookie: session=attacker",
            "user-agent: attacker",
            "x-forwarded-for: attacker",
            "forwarded: for=attacker",
            "host: attacker",
        ],
    );
    assert_eq!(reply.status, 200, "{}", reply.text);
    let seen = deployment.last_seen();
    let spoofed: Vec<_> =
        seen.headers.iter().filter(|(_, value)| value.contains("attacker")).collect();
    assert!(spoofed.is_empty(), "{spoofed:?}");
}

/// G3: nginx forwarded all of `/v1/`, including LiteLLM's administration; the gateway forwards only the listed paths.
#[test]
fn no_path_beside_the_listed_ones_reaches_the_upstream() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    for target in [
        "/v1/mcp/server",
        "/v1/files",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/v1/./chat/completions",
        "/v1/../key/list",
        "/v1/%2e%2e/key/list",
        "/v1/chat/completions;x",
        "/v1/chat%2fcompletions",
        "//v1/chat/completions",
    ] {
        let url = format!("http://localhost:8080{target}");
        let post = ["--path-as-is", &url, "--data", "{}"];
        let reply = deployment.curl(&[&post, &deployment::JSON[..]].concat());
        assert!(matches!(reply.status, 400 | 403 | 404), "{target}: {}", reply.status);
    }
    let wrong_method = deployment.curl(&["-X", "DELETE", "http://localhost:8080/v1/models"]);
    assert!(matches!(wrong_method.status, 404 | 405), "{}", wrong_method.status);
    assert_eq!(deployment.seen_count(), 0);
}

/// G2: The proxy runs without root, capabilities and shell, on a read-only root. G1: Only the sandbox's uid can use the
/// socket.
#[test]
fn the_proxy_runs_with_nothing_it_does_not_need() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let pid = deployment.proxy.inspect("{{.State.Pid}}");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    assert_eq!(field("Uid:"), "1001\t1001\t1001\t1001");
    assert_eq!(field("Gid:"), "1001\t1001\t1001\t1001");
    assert_eq!(field("Groups:"), "1001");
    assert_eq!(field("CapEff:"), "0000000000000000");
    assert_eq!(field("NoNewPrivs:"), "1");
    assert_eq!(deployment.proxy.inspect("{{.HostConfig.ReadonlyRootfs}}"), "true");

    let socket = deployment.agent.exec(&["stat", "-c", "%u:%g %a", deployment::SOCKET]);
    assert_eq!(String::from_utf8(socket.stdout).unwrap().trim(), "1001:1001 600");
    let removal = deployment.agent.exec(&["rm", deployment::SOCKET]);
    assert!(!removal.status.success(), "the agent could replace its own socket");
}

/// R4, R8: `run --image` works with the program's single file, from any directory.
#[test]
fn an_image_gets_the_first_process_that_the_program_carries() {
    let _engine = PrivateEngine::connect();
    let dir = tempfile::tempdir().unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .current_dir(dir.path())
        .env_remove("COGNI_INIT")
        .envs([("LITELLM_MASTER_KEY", "sk-real"), ("BILLING_ACCOUNT_ID", "acct-1")])
        .envs([("LITELLM_HOST", "127.0.0.1:9"), ("LOG", "off")])
        .args([
            "run",
            "--image",
            docker_engine::BUSYBOX,
            "--state-dir",
            "state",
            "--run-dir",
            "runs",
        ])
        .args(["--", "cat", "/proc/1/comm"])
        .output()
        .unwrap();
    let result: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(
        (&result["ok"], &result["stdout"]),
        (&json!(true), &json!("cogni-init\n")),
        "{result}"
    );
}

/// G2: The image holds one static program, CA certificates for TLS upstreams, and two directories that the sandbox's
/// uid owns. `docker/build` checks the size of the shipped image.
#[test]
fn the_image_holds_one_program() {
    let engine = PrivateEngine::connect();
    insta::assert_snapshot!(engine.files(docker_engine::GATEWAY).join("\n"), @"
    cogni-gateway
    etc/ssl/certs/ca-certificates.crt
    llm-sock/README
    var/log/cogni/README
    ");
}

/// G2: Docker shows the gateway's health after a plain `docker run`, because the image has the check.
#[test]
fn docker_shows_the_gateways_health() {
    let engine = PrivateEngine::connect();
    let options = [
        ["--env", "LITELLM_HOST=127.0.0.1:9"],
        ["--env", "LITELLM_MASTER_KEY=sk-real"],
        ["--env", "RUN_ID=run-1"],
        ["--env", "BILLING_ACCOUNT_ID=acct-1"],
        // The image's interval is a minute, after which the first check comes. The command is the image's.
        ["--health-interval", "1s"],
    ];
    let gateway = engine.run(docker_engine::GATEWAY, options.as_flattened(), &[]);
    let health = || gateway.inspect("{{.State.Health.Status}}");
    wait_until(|| health() == "healthy", || format!("{}: {}", health(), gateway.logs()));
}

/// G2: A new volume takes its owner from the last container that mounted it empty, so the image's directory is not
/// empty.
#[test]
fn it_does_not_matter_which_container_mounts_the_volume_first() {
    let deployment = ProxyDeployment::start_agent_first();
    assert_eq!(deployment.complete("fake/chunks=1", false, &[]).status, 200);
}

/// G1: A stale socket is replaced. G11: The audit log of a killed proxy is complete.
#[test]
fn a_killed_proxy_comes_back_on_its_stale_socket() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let mut stream = deployment.stream("fake/chunks=4;gate=2");
    stream.read_until("\"content\":");
    deployment.proxy.kill("KILL");
    assert_eq!(deployment.proxy.wait(), 137);
    let (cut, _) = stream.finish();
    assert!(!cut.contains("[DONE]"), "{cut}");

    deployment.proxy.start();
    deployment.until_it_answers();
    assert_eq!(deployment.complete("fake/chunks=1", false, &[]).status, 200);
    deployment.stop();
    assert_eq!(deployment.proxy.wait(), 0, "{}", deployment.proxy.logs());
    let (code, output) = deployment.in_the_image(&["audit", "verify", AUDIT_LOG]);
    assert_eq!(code, 0, "{output}");
}

/// Runs the shipped compose file unchanged, except for LiteLLM's image, which cannot be pulled here.
#[test]
fn the_compose_file_brings_up_a_gateway_that_answers_an_agent() {
    let compose = ComposeProject::new();
    let (code, output) = compose.up();
    assert_eq!(code, 0, "{output}");
    assert!(output.contains(r#""status":"ok""#), "{output}");
    assert!(output.contains("data: [DONE]"), "{output}");
}
