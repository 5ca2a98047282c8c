//! `cogni-gateway serve` as a process of its own, with the fake provider behind it and sandboxes of the embedded driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{Client, Response, Stream};
use super::process::Process;
use super::provider;

/// A service, on a unix socket unless it is told otherwise.
pub(crate) struct Served {
    pub(crate) process: Process,
    pub(crate) upstream: provider::Running,
    pub(crate) directory: TempDir,
}

/// One event, as a watcher reads it.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) data: Value,
}

impl Served {
    pub(crate) async fn start() -> Self {
        Self::with("").await
    }

    /// With more in its `[serve]`, and after that.
    pub(crate) async fn with(more: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listen = format!("listen = \"unix:{}/api.sock\"\n", directory.path().display());
        Self::within(directory, &(listen + more)).await
    }

    /// Listens where the settings say.
    pub(crate) async fn on(more: &str) -> Self {
        Self::within(tempfile::tempdir().unwrap(), more).await
    }

    async fn within(directory: TempDir, more: &str) -> Self {
        let upstream = provider::start("").await;
        let process = spawn(directory.path(), &upstream, more);
        let mut service = Self { process, upstream, directory };
        service.process.until(|said| said.contains("ready"));
        service
    }

    /// What another process says that is to serve the same, elsewhere.
    pub(crate) fn second(&self) -> String {
        let more = format!("listen = \"unix:{}/second.sock\"\n", self.directory.path().display());
        let mut process = spawn(self.directory.path(), &self.upstream, &more);
        assert_eq!(process.wait().code(), Some(2));
        process.said()
    }

    /// Begins anew, where an earlier process has ended.
    pub(crate) fn again(&mut self, more: &str) {
        let listen = format!("listen = \"unix:{}/api.sock\"\n", self.directory.path().display());
        self.process = spawn(self.directory.path(), &self.upstream, &(listen + more));
        self.process.until(|said| said.contains("ready"));
    }

    /// A grant for `sandbox:agent`, as the command line makes it.
    pub(crate) fn grant(&self, more: &[&str]) -> Grant {
        let plain = ["--allow-sandbox", "--agent", "sandbox:*", "--account", "acct-1"];
        self.mint(&[&plain[..], more].concat())
    }

    pub(crate) fn mint(&self, arguments: &[&str]) -> Grant {
        let said =
            self.cogni(&[&["grant", "mint", "--json", "--name", "test"], arguments].concat());
        let minted: Value = serde_json::from_str(&said).unwrap();
        let text = |key: &str| minted[key].as_str().unwrap().to_owned();
        Grant { id: text("id"), token: text("token"), client: self.client() }
    }

    /// The command line, beside the service.
    pub(crate) fn cogni(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(BINARY);
        command.args(arguments).env_clear().env("COGNI_STATE_DIR", self.state_dir());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.directory.path().join("api.sock"))
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// Shuts down in order, and checks that nothing is left of any run.
    pub(crate) fn stop(mut self) {
        assert!(self.process.terminate().success(), "{}", self.process.said());
        let left = fs::read_dir(self.directory.path().join("run")).into_iter().flatten();
        let left: Vec<_> =
            left.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
        assert!(left.is_empty(), "{left:?}: {}", self.process.said());
    }
}

/// Somebody who has a grant.
pub(crate) struct Grant {
    pub(crate) id: String,
    pub(crate) token: String,
    client: Client,
}

impl Grant {
    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send(Method::GET, path, "", &[]).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.send(Method::POST, path, &body.to_string(), &[]).await
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Response {
        self.open(method, path, body, headers).await.finish().await.unwrap()
    }

    /// Returns at the head of the answer.
    pub(crate) async fn open(
        &self,
        method: Method,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Stream {
        let authorization = format!("Bearer {}", self.token);
        let own = [("authorization", &*authorization)];
        let request = request(method, path, body, &[&own[..], headers].concat());
        self.client.start(request).await.unwrap()
    }

    /// Begins a run, and returns it.
    pub(crate) async fn run(&self, model: &str) -> String {
        let response = self.post("/api/v1/runs", &asked(model)).await;
        assert_eq!(response.status, 201, "{}", response.text());
        response.json()["id"].as_str().unwrap().to_owned()
    }

    /// A run, once it has ended.
    pub(crate) async fn ended(&self, run: &str) -> Value {
        let watched = self.get(&format!("/api/v1/runs/{run}/events")).await;
        assert_eq!(watched.status, 200, "{}", watched.text());
        self.get(&format!("/api/v1/runs/{run}")).await.json()
    }
}

/// A request, with whatever is wrong about it.
pub(crate) fn request(
    method: Method,
    path: &str,
    body: &str,
    headers: &[(&str, &str)],
) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    if !headers.iter().any(|(name, _)| *name == "content-type") && !body.is_empty() {
        request = request.header("content-type", "application/json");
    }
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(Full::from(body.to_owned())).unwrap()
}

/// A run that anybody could ask for.
pub(crate) fn asked(model: &str) -> Value {
    json!({"agent": "sandbox:agent", "model": model, "messages": [{"role": "user", "content": "hello"}]})
}

/// The same as a chat.
pub(crate) fn chat(model: &str) -> Value {
    json!({"graphName": "sandbox:agent", "model": model, "messages": [{"role": "user", "content": "hello"}]})
}

/// What stands in an answer of server-sent events.
pub(crate) fn events(text: &str) -> Vec<Event> {
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
        Some(Event {
            id: field("id: ")?.parse().unwrap(),
            name: field("event: ")?.to_owned(),
            data: serde_json::from_str(field("data: ")?).unwrap(),
        })
    };
    text.split("\n\n").filter_map(event).collect()
}

fn spawn(directory: &Path, upstream: &provider::Running, more: &str) -> Process {
    let file = directory.join("serve.toml");
    let shown = directory.display();
    let text = format!(
        "[serve]\nstate_dir = \"{shown}/state\"\nrun_dir = \"{shown}/run\"\n\
         driver = \"embedded\"\nallow_unlimited = true\n{more}"
    );
    fs::write(&file, text).unwrap();
    let mut command = Command::new(BINARY);
    command.args(["serve", "--config"]).arg(&file).env_clear();
    command.env("LITELLM_HOST", upstream.addr.to_string()).env("LITELLM_MASTER_KEY", "sk-secret");
    command.env("PATH", std::env::var_os("PATH").unwrap());
    Process::start(&mut command, "build it")
}

const BINARY: &str = env!("CARGO_BIN_EXE_cogni-gateway");
