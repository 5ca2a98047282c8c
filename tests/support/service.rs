//! `cogni-gateway serve` as users have it: the program, a grant, and a client on its unix socket.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::service::billing::{self, BillingStore};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::TestClient;
use super::model_provider;
use super::process::{ChildProcess, wait_until};

/// The files and servers that outlive a process of the service.
pub(crate) struct ServiceSetup {
    directory: TempDir,
    pub(crate) provider: model_provider::RunningProvider,
    /// The caller, unless a test names another one.
    pub(crate) owner: MintedGrant,
    variables: Vec<(String, String)>,
}

/// A process of the service, with requests from its owner.
pub(crate) struct ServiceProcess {
    pub(crate) process: ChildProcess,
    owner: MintedGrant,
}

/// A caller with a grant.
#[derive(Clone)]
pub(crate) struct MintedGrant {
    pub(crate) id: String,
    pub(crate) token: String,
    client: TestClient,
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SseEvent {
    pub(crate) seq: u64,
    pub(crate) kind: String,
    pub(crate) data: Value,
}

impl ServiceSetup {
    /// Makes a service whose provider follows `script`, and whose owner may do everything.
    pub(crate) async fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let provider = model_provider::start_provider(script).await;
        let owner = mint_grant(&directory.path().canonicalize().unwrap(), OWNER);
        let setup = Self { directory, provider, owner, variables: vec![] };
        setup.write_config("");
        setup
    }

    /// Sets an environment variable of the service.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.variables.push((name.to_owned(), value.to_owned()));
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap()
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.path().join("state")
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path().join("r")
    }

    /// Sets the maximum number of concurrent runs of the next service.
    pub(crate) fn set_max_runs(&self, most: usize) {
        let file = self.path().join("serve.toml");
        let most = format!("max_runs = {most}");
        let config = fs::read_to_string(&file).unwrap().replace("max_runs = 256", &most);
        fs::write(&file, config).unwrap();
    }

    pub(crate) fn audit_log(&self, run: &str) -> PathBuf {
        self.state_dir().join("audit").join(format!("{run}.jsonl"))
    }

    /// Opens the service's billing store, also while the service runs.
    pub(crate) fn books(&self) -> BillingStore {
        let database =
            SqliteDatabase::open_database(&self.state_dir().join("state.db"), &[billing::SCHEMA]);
        BillingStore::new(database.unwrap())
    }

    /// Writes the configuration, with additional lines for `[serve]` and tables after them.
    pub(crate) fn write_config(&self, more: &str) {
        let text = format!(
            "access_log = \"off\"\n[serve]\nlisten = \"unix:{0}/api.sock\"\nstate_dir = \"{0}/state\"\nrun_dir = \"{0}/r\"\n\
             driver = \"embedded\"\ngrace = \"1s\"\nmax_runs = 256\n{more}\n",
            self.path().display(),
        );
        fs::write(self.path().join("serve.toml"), text).unwrap();
    }

    /// Makes a grant as an ordinary user has it: for agents in sandboxes, and one account.
    pub(crate) fn grant(&self, more: &[&str]) -> MintedGrant {
        let ordinary = ["--allow-sandbox", "--agent", "sandbox:*", "--account", "acct-1"];
        self.mint(&[&ordinary[..], more].concat())
    }

    /// Makes a grant with exactly these flags.
    pub(crate) fn mint(&self, flags: &[&str]) -> MintedGrant {
        mint_grant(&self.path(), flags)
    }

    /// Runs a command of the command line beside the service.
    pub(crate) fn cogni(&self, arguments: &[&str]) -> String {
        run_cogni(&self.path(), arguments)
    }

    /// Returns a client without a grant.
    pub(crate) fn client(&self) -> TestClient {
        api_client(&self.path())
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(BINARY);
        command
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", self.provider.addr.to_string())
            .envs(self.variables.iter().cloned())
            .arg("serve")
            .arg("--config")
            .arg(self.path().join("serve.toml"));
        command
    }

    /// Starts a process and returns when it is ready.
    pub(crate) fn start(&self) -> ServiceProcess {
        let mut process = ChildProcess::start(&mut self.command(), "the service does not start");
        tokio::task::block_in_place(|| process.until(|output| output.contains("ready")));
        ServiceProcess { process, owner: self.owner.clone() }
    }

    /// Shuts a service down in order, and checks that nothing remains of any run.
    pub(crate) fn stop(&self, mut service: ServiceProcess) {
        let status = tokio::task::block_in_place(|| service.process.terminate());
        assert!(status.success(), "{}", service.process.output());
        self.assert_nothing_is_left();
    }

    /// Asserts that only the stored data of each run remains.
    pub(crate) fn assert_nothing_is_left(&self) {
        let left = || super::run_command::list_entries(&self.run_dir());
        tokio::task::block_in_place(|| {
            wait_until(|| left().is_empty(), || format!("left in the run directory: {:?}", left()));
            let run_dir = self.run_dir();
            wait_until(
                || list_processes(&run_dir).is_empty(),
                || format!("{:?}", list_processes(&run_dir)),
            );
        });
    }
}

impl Deref for ServiceProcess {
    type Target = MintedGrant;

    fn deref(&self) -> &MintedGrant {
        &self.owner
    }
}

impl Deref for MintedGrant {
    type Target = TestClient;

    fn deref(&self) -> &TestClient {
        &self.client
    }
}

impl MintedGrant {
    /// Starts a run of an agent; returns its id.
    pub(crate) async fn run(&self, body: &Value) -> String {
        let answer = self.post("/api/v1/runs", body).await;
        assert!(answer.status.is_success(), "{} {}", answer.status, answer.text());
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    /// Returns all events of a run, until its end.
    pub(crate) async fn events(&self, run: &str) -> Vec<SseEvent> {
        let answer = self.get(&format!("/api/v1/runs/{run}/events")).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        parse_events(answer.text())
    }

    /// Waits for the end of a run and returns the run.
    pub(crate) async fn ended(&self, run: &str) -> Value {
        self.events(run).await;
        self.get(&format!("/api/v1/runs/{run}")).await.json()
    }
}

/// Parses a stream of events.
pub(crate) fn parse_events(text: &str) -> Vec<SseEvent> {
    let field = |block: &str, name: &str| {
        block.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().to_owned()))
    };
    let data = text.split("\n\n").filter_map(|block| {
        Some(SseEvent {
            seq: field(block, "id:")?.parse().unwrap(),
            kind: field(block, "event:")?,
            data: serde_json::from_str(&field(block, "data:")?).unwrap(),
        })
    });
    data.collect()
}

/// A conversation with one message, for `cogni-agent`.
pub(crate) fn conversation_body(text: &str) -> Value {
    json!({"agent": "sandbox:agent", "model": "fake", "messages": [{"role": "user", "content": text}]})
}

/// Returns the same conversation as a chat.
pub(crate) fn chat_body(text: &str) -> Value {
    json!({"graphName": "sandbox:agent", "model": "fake", "messages": [{"role": "user", "content": text}]})
}

/// A provider's script: the model calls the tool with a shell command, and then repeats the result.
pub(crate) fn tool_call_script(command: &str) -> String {
    let arguments = json!({"argv": ["sh", "-c", command]}).to_string();
    let escaped = arguments.replace('%', "%25").replace(',', "%2c").replace(';', "%3b");
    format!("tool=exec,echo=yes,arguments={escaped}")
}

fn mint_grant(dir: &Path, flags: &[&str]) -> MintedGrant {
    let output = run_cogni(dir, &[&["grant", "mint", "--json", "--name", "tests"], flags].concat());
    let minted: Value = serde_json::from_str(&output).unwrap();
    let text = |key: &str| minted[key].as_str().unwrap().to_owned();
    let (id, token) = (text("id"), text("token"));
    MintedGrant { client: api_client(dir).with_token(&token), id, token }
}

fn run_cogni(dir: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(BINARY);
    command.args(arguments).env_clear().env("COGNI_STATE_DIR", dir.join("state"));
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {printed}");
    String::from_utf8(output.stdout).unwrap()
}

fn api_client(dir: &Path) -> TestClient {
    TestClient::new(&dir.join("api.sock"))
}

/// Returns the processes that were started for a run below this directory.
fn list_processes(run_dir: &Path) -> Vec<String> {
    let path = run_dir.display().to_string();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids =
        entries.filter_map(|entry| entry.file_name().into_string().ok()?.parse::<u32>().ok());
    let lines = pids.filter_map(|pid| {
        let cgroup = fs::read_to_string(format!("/proc/{pid}/mounts")).ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (cgroup.contains(&path) && !name.starts_with("cogni-gateway"))
            .then(|| format!("{pid} {name}"))
    });
    lines.collect()
}

const BINARY: &str = env!("CARGO_BIN_EXE_cogni-gateway");

const OWNER: &[&str] = &[
    "--access",
    "read,runs,billing,admin",
    "--allow-sandbox",
    "--agent",
    "*",
    "--account",
    "acct-1",
    "--account",
    "*",
    "--repo",
    "*",
    "--repo",
    "http://127.0.0.1:*",
    "--repo",
    "https://127.0.0.1:*",
];
