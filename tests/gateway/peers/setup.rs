//! The gateway's program with its socket and files, and the third-party programs around it.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{command_output, parse_lines};
use crate::support::process::{ChildProcess, free_port};

pub(super) const REMEDY: &str = "`tests/run peers` installs what is missing and runs this test";

const GATEWAY: &str = env!("CARGO_BIN_EXE_cogni-gateway");
pub(crate) const KEY: &str = "sk-litellm-master";

/// A proxy with its socket, access log and audit log in one directory.
pub(crate) struct ProxySetup {
    folder: TempDir,
    proxy: RefCell<ChildProcess>,
}

impl ProxySetup {
    pub(crate) fn start(upstream: &str, more: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let mut proxy = ChildProcess::start(
            Command::new(GATEWAY)
                .arg("proxy")
                .env("SOCKET_PATH", file("llm.sock"))
                .env("ACCESS_LOG_PATH", file("access.log"))
                .env("AUDIT_LOG_PATH", file("audit.jsonl"))
                .env("LITELLM_HOST", upstream)
                .env("LITELLM_MASTER_KEY", KEY)
                .env("BILLING_ACCOUNT_ID", "acct-42")
                .env("LITELLM_METADATA_JSON", r#"{"graph_id":"sandbox:agent"}"#)
                .env("RUN_ID", "run-7")
                .env("ATTEMPT", "0")
                .envs(more.iter().copied()),
            "",
        );
        let health = curl_arguments(&file("llm.sock"), &["--fail", "http://localhost/health"]);
        proxy.until(|_| curl_succeeds(&health));
        Self { folder, proxy: RefCell::new(proxy) }
    }

    /// Calls functions of a script in `tests/peers`; returns the SDK's result of each call.
    pub(super) fn sdk<const N: usize>(
        &self,
        script: &str,
        model: &str,
        calls: [&str; N],
    ) -> [Value; N] {
        let python = venv_path("sdk").join("bin/python");
        let said = command_output(
            Command::new(python).arg(peers_file(script)).arg(self.socket()).arg(model).args(calls),
        );
        parse_lines(&said).try_into().unwrap()
    }

    /// Makes a chat completion; returns LiteLLM's call id from the answer's head.
    pub(crate) fn chat(&self, model: &str, stream: bool) -> String {
        let messages = json!([{ "role": "user", "content": "hello" }]);
        let body = json!({ "model": model, "stream": stream, "messages": messages }).to_string();
        let url = "http://localhost/v1/chat/completions";
        let arguments = curl_arguments(
            &self.socket(),
            &["--include", url, "--header", "content-type: application/json", "--data", &body],
        );
        let answer = command_output(Command::new("curl").args(&arguments));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(answer.ends_with("data: [DONE]\n\n"), stream, "{answer}");
        let id = answer.lines().find_map(|line| line.strip_prefix("x-litellm-call-id: "));
        id.unwrap_or_else(|| panic!("no call id in {answer}")).to_owned()
    }

    /// Ends the proxy, verifies its audit log, and returns the records.
    pub(crate) fn ends_with_a_whole_record(&self) -> Vec<Value> {
        let status = self.proxy.borrow_mut().terminate();
        assert!(status.success(), "{status}: {}", self.proxy.borrow().output());
        let audit = self.audit_log();
        command_output(Command::new(GATEWAY).args(["audit", "verify"]).arg(&audit));
        parse_lines(&fs::read_to_string(audit).unwrap())
    }

    pub(crate) fn audit_log(&self) -> PathBuf {
        self.folder.path().join("audit.jsonl")
    }

    pub(super) fn access_log(&self) -> PathBuf {
        self.folder.path().join("access.log")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("llm.sock")
    }
}

/// A program with an address for connections.
pub(crate) struct PeerProgram {
    pub(crate) address: String,
    _process: ChildProcess,
}

/// Starts the fake provider, which answers by `script`.
pub(crate) fn start_provider(script: &str) -> PeerProgram {
    provider_with(&["--script", script])
}

pub(crate) fn provider_with(arguments: &[&str]) -> PeerProgram {
    let mut process =
        ChildProcess::start(Command::new(GATEWAY).arg("provider").args(arguments), "");
    process.until(|said| said.ends_with('\n'));
    let said = process.output();
    let (_, address) = said.trim().split_once("http://").unwrap();
    PeerProgram { address: address.to_owned(), _process: process }
}

/// LiteLLM with the fake provider behind its models. Both record what they receive.
pub(super) struct LitellmProxy {
    pub(super) address: String,
    process: ChildProcess,
    _provider: PeerProgram,
    folder: TempDir,
}

impl LitellmProxy {
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("provider.jsonl").display().to_string();
        let provider = provider_with(&["--record", &record]);
        let port = free_port().to_string();
        let address = format!("127.0.0.1:{port}");
        let mut process = ChildProcess::start(
            Command::new(venv_path("litellm").join("bin/litellm"))
                .arg("--config")
                .arg(peers_file("litellm.yaml"))
                .args(["--host", "127.0.0.1", "--port", &port])
                .env("LITELLM_MASTER_KEY", KEY)
                .env("PROVIDER", format!("http://{}", provider.address))
                .env("PROVIDER_V1", format!("http://{}/v1", provider.address))
                .env("CALL_RECORDS", folder.path().join("call_records.jsonl"))
                .env("PYTHONDONTWRITEBYTECODE", "1")
                // Otherwise LiteLLM would fetch its price list from the internet.
                .env("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
            REMEDY,
        );
        let alive = format!("http://{address}/health/liveliness");
        process.until(|_| curl_succeeds(&curl_fail(&alive)));
        Self { address, process, _provider: provider, folder }
    }

    /// Returns what the callback in `tests/peers/call_recorder.py` has recorded so far, one line of JSON per event.
    pub(super) fn callback_lines(&self) -> String {
        fs::read_to_string(self.folder.path().join("call_records.jsonl")).unwrap()
    }

    /// Returns the requests that reached the provider, one line of JSON each.
    pub(super) fn forwarded(&self) -> String {
        fs::read_to_string(self.folder.path().join("provider.jsonl")).unwrap()
    }

    /// Returns LiteLLM's own log.
    pub(super) fn output(&self) -> String {
        self.process.output()
    }
}

/// Debian's Prometheus, which scrapes one address every second.
pub(super) struct PrometheusServer {
    address: String,
    process: ChildProcess,
    _folder: TempDir,
}

impl PrometheusServer {
    pub(super) fn start(target: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "global: {{ scrape_interval: 1s }}\n\
             scrape_configs: [{{ job_name: cogni-gateway, static_configs: [{{ targets: [\"{target}\"] }}] }}]\n"
        );
        fs::write(&config, text).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let mut process = ChildProcess::start(
            Command::new("prometheus")
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
                .arg(format!("--web.listen-address={address}")),
            REMEDY,
        );
        let ready = format!("http://{address}/-/ready");
        process.until(|_| curl_succeeds(&curl_fail(&ready)));
        Self { address, process, _folder: folder }
    }

    /// Returns the value of a query that has one result.
    pub(super) fn value(&self, query: &str) -> Option<f64> {
        let url = format!("http://{}/api/v1/query", self.address);
        let mut curl = Command::new("curl");
        let answer = command_output(curl.args([
            "--silent",
            "--get",
            &url,
            "--data-urlencode",
            &format!("query={query}"),
        ]));
        let answer: Value = serde_json::from_str(&answer).unwrap();
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    }

    pub(super) fn output(&self) -> String {
        self.process.output()
    }
}

/// Returns curl's arguments for a request through a unix socket.
pub(crate) fn curl_arguments(socket: &Path, arguments: &[&str]) -> Vec<String> {
    let socket = socket.display().to_string();
    let curl = ["--silent", "--show-error", "--max-time", "60", "--unix-socket", &socket];
    curl.iter().chain(arguments).map(|&text| text.to_owned()).collect()
}

/// Returns promtool's output for `input`.
pub(super) fn run_promtool(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new("promtool");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("promtool: {error}; {REMEDY}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat()
}

pub(super) fn get_url(url: &str) -> String {
    command_output(Command::new("curl").args(curl_fail(url)))
}

pub(crate) fn curl_fail(url: &str) -> Vec<String> {
    ["--silent", "--show-error", "--fail", "--max-time", "60", url].map(str::to_owned).to_vec()
}

pub(crate) fn curl_succeeds(curl: &[String]) -> bool {
    Command::new("curl").args(curl).output().is_ok_and(|output| output.status.success())
}

/// Returns the path of a file in `tests/peers`.
pub(crate) fn peers_file(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers").join(file)
}

/// Returns the Python environment that `tests/run` has installed.
pub(crate) fn venv_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/peers").join(name)
}
