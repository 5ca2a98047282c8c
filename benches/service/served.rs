//! The program as a serving process.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{self, ServiceClient};
use super::conversation_body;

/// A service that ends when this value is dropped.
pub(super) struct ServedRuns {
    child: Child,
    client: ServiceClient,
    _directories: (TempDir, TempDir),
}

/// An agent that ends at once, one that prints a number of texts, and one that waits to be ended.
const AGENTS: &[(&str, &str)] = &[
    ("bench:true", "argv = [\"true\"]"),
    (
        "bench:talk",
        "stream = \"events\"\nargv = [\"bash\", \"-c\", '''
n=$(tr -dc 0-9 < .cogni/messages.json)
for ((i = 0; i < n; i++)); do
  echo \"{\\\"type\\\":\\\"text_delta\\\",\\\"text\\\":\\\"$EPOCHREALTIME\\\"}\" >&2
  read -t 0.01 < <(:) || true
done''']",
    ),
    ("bench:wait", "argv = [\"sleep\", \"600\"]"),
];

impl ServedRuns {
    pub(super) fn start(run_dir: &str, max_runs: usize) -> Self {
        let state = tempfile::tempdir().unwrap();
        let run_dir = tempfile::tempdir_in(run_dir).unwrap();
        let agents = state.path().join("agents");
        fs::create_dir(&agents).unwrap();
        for (name, rest) in AGENTS {
            let text = format!(
                "name = \"{name}\"\ndescription = \"for a bench\"\nversion = 1\n{rest}\n[limits]\nmax_memory = \"64m\"\n"
            );
            fs::write(agents.join(format!("{}.toml", name.replace(':', "-"))), text).unwrap();
        }
        let config = state.path().join("serve.toml");
        let place = |path: &Path| path.display().to_string();
        let text = format!(
            "[serve]\nlisten = \"127.0.0.1:0\"\ninsecure_no_auth = true\nmax_runs = {}\nstate_dir = \"{}\"\nrun_dir = \"{}\"\n\
             agents_dir = \"{}\"\ndriver = \"embedded\"\ngrace = \"1s\"\n[access_log]\n",
            max_runs + 8,
            place(state.path()),
            place(run_dir.path()),
            place(&agents),
        );
        fs::write(&config, text.replace("[access_log]\n", "")).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .env("LOG", "info")
            .env("LITELLM_MASTER_KEY", "sk-none")
            .env("LITELLM_HOST", "127.0.0.1:9")
            .env("ACCESS_LOG_PATH", "off")
            .args(["serve", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| {
                let rest = line.split_once("address=").filter(|_| line.contains("ready"))?.1;
                rest.split_whitespace().next()?.parse().ok()
            })
            .expect("the service says where it listens");
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, client: ServiceClient::new(address), _directories: (state, run_dir) }
    }

    pub(super) async fn wait(&self) {
        let mut said = self.get("/readyz").await;
        for _ in 0..1000 {
            if said.0 == 200 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            said = self.get("/readyz").await;
        }
        assert_eq!(said.0, 200, "it is not ready: {}", said.1);
    }

    pub(super) async fn run(&self, agent: &str) -> String {
        self.run_with(agent, "0").await
    }

    pub(super) async fn run_with(&self, agent: &str, text: &str) -> String {
        let body = conversation_body(agent, text);
        let (status, run) = self.client.send("POST", "/api/v1/runs", Some(&body)).await;
        assert!((200..300).contains(&status), "{status} {run}");
        run["id"].as_str().expect("a run has an id").to_owned()
    }

    pub(super) async fn get(&self, path: &str) -> (u16, Value) {
        self.client.send("GET", path, None).await
    }

    /// Reads a run's events until the last.
    pub(super) async fn watch(&self, run: &str, told: impl FnMut(&Value)) {
        self.client.events(&format!("/api/v1/runs/{run}/events"), told).await;
    }

    pub(super) async fn ended(&self, run: &str) {
        self.watch(run, |_| ()).await;
    }

    /// Returns when the run's sandbox is being made.
    pub(super) async fn begun(&self, run: &str) {
        while self.get(&format!("/api/v1/runs/{run}")).await.1["state"] == "queued" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(super) async fn cancel(&self, runs: &[String]) {
        for run in runs {
            self.client.send("POST", &format!("/api/v1/runs/{run}/cancel"), None).await;
        }
        for run in runs {
            self.ended(run).await;
        }
    }

    /// Returns the process's private memory in bytes.
    pub(super) fn memory(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with("Private_Dirty:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Returns the processor time of all its threads.
    pub(super) fn processor_time(&self) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = text.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks = |at: usize| fields[at].parse::<u64>().unwrap();
        Duration::from_millis((ticks(11) + ticks(12)) * 10)
    }
}

impl Drop for ServedRuns {
    fn drop(&mut self) {
        let _ = client::terminate_child(&self.child);
        let _ = self.child.wait();
    }
}
