//! One run as it is deployed: a stand-in for LiteLLM on an internal network, a proxy in that network, and an agent
//! without a network.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::docker_engine::{self, PrivateEngine, RunningCommand, TestContainer};
use crate::support::process::wait_until;

pub(super) const SOCKET: &str = "/llm-sock/llm.sock";
pub(super) const ACCESS_LOG: &str = "/var/log/cogni/access.log";
pub(super) const AUDIT_LOG: &str = "/var/log/cogni/audit.jsonl";
pub(super) const KEY: &str = "sk-litellm-master";
pub(super) const ACCOUNT: &str = "acct-42";
pub(super) const RUN: &str = "run-7";
pub(super) const METADATA: &str = r#"{"run_id":"run-7","attempt":0,"graph_id":"sandbox:agent"}"#;

/// The proxy between the agent and LiteLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProxyContainer {
    Nginx,
    Gateway,
}

/// A deployment; dropping it removes its containers, network and volumes.
pub(super) struct ProxyDeployment {
    pub(super) proxy: TestContainer,
    pub(super) agent: TestContainer,
    provider: TestContainer,
    kind: ProxyContainer,
    socket: String,
    logs: String,
    engine: PrivateEngine,
    _config: TempDir,
}

/// A function that starts a container.
type DeploymentStart<'a> = &'a dyn Fn() -> TestContainer;

/// The parts of an answer, as curl prints them.
pub(super) struct ProxyReply {
    pub(super) status: u16,
    pub(super) text: String,
    head: String,
}

/// A request as the provider received it.
pub(super) struct SeenRequest {
    pub(super) headers: Vec<(String, String)>,
}

impl ProxyDeployment {
    /// Starts the proxy first, as the old manager did.
    pub(super) fn start(kind: ProxyContainer) -> Self {
        Self::assemble(kind, |proxy, agent| {
            let proxy = proxy();
            (proxy, agent())
        })
    }

    /// Starts the agent's container first, so that the empty volume is mounted on its `/llm-sock`, which root owns.
    pub(super) fn start_agent_first() -> Self {
        Self::assemble(ProxyContainer::Gateway, |proxy, agent| {
            let agent = agent();
            (proxy(), agent)
        })
    }

    fn assemble(
        kind: ProxyContainer,
        order: impl FnOnce(DeploymentStart<'_>, DeploymentStart<'_>) -> (TestContainer, TestContainer),
    ) -> Self {
        let engine = PrivateEngine::connect();
        let (network, socket, logs) = (engine.internal_network(), engine.volume(), engine.volume());
        let provider = engine.run(
            docker_engine::GATEWAY,
            &["--network", &network, "--network-alias", "litellm"],
            &["provider", "--listen", "0.0.0.0:4000"],
        );
        let config = tempfile::tempdir().unwrap();
        let (proxy, agent) =
            order(&|| start_proxy(&engine, kind, &config, &network, [&socket, &logs]), &|| {
                start_agent(&engine, &socket)
            });
        let deployment =
            Self { proxy, agent, provider, kind, socket, logs, engine, _config: config };
        deployment.until_it_answers();
        deployment
    }

    /// Starts a sandbox of any image beside the agent's, with `cogni-init` mounted and nothing else changed.
    pub(super) fn sandbox(&self, image: &str, argv: &[&str]) -> TestContainer {
        let init = format!("{}:/cogni-init:ro", docker_engine::init_path());
        let options = ["--volume", &init, "--entrypoint", "/cogni-init"];
        start_sandbox(&self.engine, image, &self.socket, &options, argv)
    }

    /// Makes one request from inside the sandbox.
    pub(super) fn curl(&self, arguments: &[&str]) -> ProxyReply {
        let output = self.agent.exec(&[&CURL[..], &["--include"], arguments].concat());
        assert!(
            output.status.success(),
            "curl {arguments:?}: {}; the proxy said: {}",
            String::from_utf8_lossy(&output.stderr),
            self.proxy.logs()
        );
        ProxyReply::parse(&String::from_utf8(output.stdout).unwrap())
    }

    /// Makes a chat completion with the agent's own headers added.
    pub(super) fn complete(&self, model: &str, stream: bool, headers: &[&str]) -> ProxyReply {
        let body = chat_body(model, stream);
        let mut arguments = [&[CHAT, "--data", &body], &JSON[..]].concat();
        for header in headers {
            arguments.extend(["--header", header]);
        }
        self.curl(&arguments)
    }

    /// Makes a streamed chat completion, which is read line by line.
    pub(super) fn stream(&self, model: &str) -> RunningCommand {
        let body = chat_body(model, true);
        let request = [&["--no-buffer", CHAT, "--data", &body], &JSON[..]].concat();
        self.agent.exec_live(&[&CURL[..], &request].concat())
    }

    /// Stops the proxy with the signal of its image; nginx's image asks for SIGQUIT.
    pub(super) fn stop(&self) {
        self.proxy.kill(match self.kind {
            ProxyContainer::Nginx => "QUIT",
            ProxyContainer::Gateway => "TERM",
        });
    }

    pub(super) fn until_it_answers(&self) {
        wait_until(
            || self.healthy(),
            || format!("the proxy does not answer; it said: {}", self.proxy.logs()),
        );
    }

    pub(super) fn until_it_refuses(&self) {
        wait_until(
            || !self.healthy(),
            || "the proxy goes on accepting after its signal".to_owned(),
        );
    }

    fn healthy(&self) -> bool {
        let health = [&CURL[..], &["--fail", "http://localhost:8080/health"]].concat();
        self.agent.exec(&health).status.success()
    }

    pub(super) fn open_the_gate(&self) {
        self.ask_provider("POST", "/_gate");
    }

    pub(super) fn seen_count(&self) -> u64 {
        self.ask_provider("GET", "/_seen")["count"].as_u64().unwrap()
    }

    pub(super) fn last_seen(&self) -> SeenRequest {
        let seen = self.ask_provider("GET", "/_seen?last=1");
        SeenRequest {
            headers: serde_json::from_value(seen["requests"][0]["headers"].clone()).unwrap(),
        }
    }

    /// Asks the provider directly, without the proxy: this machine can reach the bridge of an internal network.
    fn ask_provider(&self, method: &str, target: &str) -> Value {
        let address =
            self.provider.inspect("{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}");
        let url = format!("http://{address}:4000{target}");
        let output =
            Command::new("curl").args(&CURL[1..]).args(["-X", method, &url]).output().unwrap();
        assert!(output.status.success(), "{}", self.provider.logs());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs the image once more with the same logs; returns its exit code and output.
    pub(super) fn in_the_image(&self, command: &[&str]) -> (i32, String) {
        let volume = format!("{}:/var/log/cogni:ro", self.logs);
        let options = ["--network", "none", "--volume", &volume];
        let container = self.engine.run(docker_engine::GATEWAY, &options, command);
        (container.wait(), container.logs())
    }
}

fn start_proxy(
    engine: &PrivateEngine,
    kind: ProxyContainer,
    config: &TempDir,
    network: &str,
    volumes: [&str; 2],
) -> TestContainer {
    let [socket, logs] = volumes.map(str::to_owned);
    let (socket, logs) = (socket + ":/llm-sock", logs + ":/var/log/cogni");
    let mut options =
        vec!["--network", network, "--read-only", "--volume", &socket, "--volume", &logs];
    match kind {
        ProxyContainer::Nginx => {
            let file = config.path().join("nginx.conf");
            fs::write(&file, nginx_config()).unwrap();
            let mount = format!("{}:/etc/nginx/nginx.conf:ro", file.display());
            options.extend(["--volume", &mount, "--tmpfs", "/tmp"]);
            engine.run(
                docker_engine::HOST,
                &options,
                &["nginx", "-c", "/etc/nginx/nginx.conf", "-e", "stderr"],
            )
        }
        ProxyContainer::Gateway => {
            let variables = compose_variables().map(|(name, value)| format!("{name}={value}"));
            for variable in &variables {
                options.extend(["--env", variable]);
            }
            options.extend(["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]);
            engine.run(docker_engine::GATEWAY, &options, &[])
        }
    }
}

/// Starts the agent as today's sandboxes are started, with the socat of their image.
fn start_agent(engine: &PrivateEngine, socket: &str) -> TestContainer {
    let bridge = [
        "socat",
        "TCP-LISTEN:8080,fork,bind=127.0.0.1,reuseaddr",
        "UNIX-CONNECT:/llm-sock/llm.sock",
    ];
    start_sandbox(engine, docker_engine::HOST, socket, &[], &bridge)
}

/// Starts a container with the hardening of every agent and the socket mounted read-only.
fn start_sandbox(
    engine: &PrivateEngine,
    image: &str,
    socket: &str,
    more: &[&str],
    command: &[&str],
) -> TestContainer {
    let socket = format!("{socket}:/llm-sock:ro");
    let options = [
        ["--network", "none"],
        ["--user", "1001:1001"],
        ["--cap-drop", "ALL"],
        ["--security-opt", "no-new-privileges"],
        ["--pids-limit", "256"],
        ["--memory", "512m"],
        ["--volume", &socket],
    ];
    engine.run(image, &[&["--read-only"], options.as_flattened(), more].concat(), command)
}

fn compose_variables() -> [(&'static str, &'static str); 9] {
    [
        ("SOCKET_PATH", SOCKET),
        ("ACCESS_LOG_PATH", ACCESS_LOG),
        ("AUDIT_LOG_PATH", AUDIT_LOG),
        ("LITELLM_HOST", "litellm:4000"),
        ("LITELLM_MASTER_KEY", KEY),
        ("BILLING_ACCOUNT_ID", ACCOUNT),
        ("LITELLM_METADATA_JSON", METADATA),
        ("RUN_ID", RUN),
        ("ATTEMPT", "0"),
    ]
}

fn nginx_config() -> String {
    let template = include_str!("../../fixtures/nginx.conf").to_owned();
    compose_variables()
        .iter()
        .fold(template, |text, (name, value)| text.replace(&format!("@{name}@"), value))
}

fn chat_body(model: &str, stream: bool) -> String {
    json!({ "model": model, "stream": stream, "messages": [{ "role": "user", "content": "hello" }] }).to_string()
}

impl ProxyReply {
    fn parse(output: &str) -> Self {
        let (head, text) = output.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head: head.to_owned(), text: text.to_owned() }
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut pairs = self.head.lines().filter_map(|line| line.split_once(": "));
        pairs.find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Joins the texts of a chat stream's events.
    pub(super) fn streamed(&self) -> String {
        let events = self.text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let events =
            events.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).unwrap());
        events
            .filter_map(|event| Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned()))
            .collect()
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }
}

impl SeenRequest {
    pub(super) fn all(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(other, _)| other == name)
            .map(|(_, value)| value.as_str())
            .collect()
    }
}

/// The options of `--json`, which the curl of some machines does not have.
pub(super) const JSON: [&str; 2] = ["--header", "content-type: application/json"];
const CHAT: &str = "http://localhost:8080/v1/chat/completions";

/// The timeout ends a test that hangs; every request takes less than a second.
const CURL: [&str; 5] = ["curl", "--silent", "--show-error", "--max-time", "240"];
