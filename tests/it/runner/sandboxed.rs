//! `cogni-gateway run` with a run directory of its own, and a check that nothing is left of each run.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::engine::{self, must};
use crate::support::provider;

pub(super) struct Sandboxed {
    directory: TempDir,
    provider: Option<provider::Running>,
}

/// What a run came to.
pub(super) struct Result {
    pub(super) status: i32,
    pub(super) json: Value,
    /// Standard error.
    pub(super) shown: String,
}

impl Sandboxed {
    pub(super) fn new() -> Self {
        engine::need(&[engine::HOST]);
        Self { directory: tempfile::tempdir().unwrap(), provider: None }
    }

    pub(super) async fn with_provider() -> Self {
        Self { provider: Some(provider::start("").await), ..Self::new() }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap()
    }

    pub(super) fn run_dir(&self) -> PathBuf {
        self.path().join("r")
    }

    /// A run that is not wrong use, to its end.
    pub(super) fn run(&self, flags: &[&str], argv: &[&str]) -> Result {
        let (status, stdout, shown) = self.command(flags, argv);
        let json =
            serde_json::from_str::<Value>(&stdout).unwrap_or_else(|_| panic!("{stdout}\n{shown}"));
        self.assert_nothing_is_left(json["run_id"].as_str().unwrap());
        Result { status, json, shown }
    }

    pub(super) fn command(&self, flags: &[&str], argv: &[&str]) -> (i32, String, String) {
        let shown = self.path().join(format!("shown-{:?}", Instant::now()));
        let mut command = self.prepare(flags, argv);
        command.stderr(File::create(&shown).unwrap());
        let output = command.output().unwrap();
        let shown = String::from_utf8_lossy(&fs::read(&shown).unwrap()).into_owned();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), shown)
    }

    pub(super) fn prepare(&self, flags: &[&str], argv: &[&str]) -> Command {
        let nobody = SocketAddr::from(([127, 0, 0, 1], 9));
        let upstream = self.provider.as_ref().map_or(nobody, |provider| provider.addr);
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command
            .env_clear()
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", upstream.to_string())
            .env("COGNI_IMAGE", engine::HOST)
            .env("COGNI_INIT", engine::init())
            .env("COGNI_RUN_DIR", self.run_dir())
            .arg("run")
            .args(flags)
            .arg("--")
            .args(argv);
        command
    }

    pub(super) fn assert_nothing_is_left(&self, run: &str) {
        assert_eq!(self.left(run), "nothing");
    }

    /// What there is of a run, in words.
    pub(super) fn left(&self, run: &str) -> String {
        let filter = format!("label=cogni.run={run}");
        let states =
            must(&["ps", "--all", "--filter", &filter, "--format", "container ({{.State}})"]);
        let directories = entries(&self.run_dir()).into_iter().map(|_| "directory");
        // In a container that runs they are no news, and at its start they come a moment later.
        let is_news = !states.contains("running") && has_processes(run);
        let processes = is_news.then_some("processes");
        let left: Vec<_> = directories.chain(states.lines()).chain(processes).collect();
        if left.is_empty() { "nothing".to_owned() } else { left.join(", ") }
    }
}

impl Result {
    pub(super) fn facts(&self) -> Value {
        json!([self.json["ok"], self.json["exit_code"], self.json["error_code"]])
    }
}

/// Whether any process of this machine has been told that it is of this run.
fn has_processes(run: &str) -> bool {
    let variable = format!("RUN_ID={run}");
    let environments =
        entries(Path::new("/proc")).into_iter().map(|pid| format!("/proc/{pid}/environ"));
    environments.filter_map(|path| fs::read(path).ok()).any(|environment| {
        environment.split(|byte| *byte == 0).any(|part| part == variable.as_bytes())
    })
}

/// The ids of a run's containers, in every state.
pub(super) fn containers(run: &str) -> String {
    must(&["ps", "--all", "--quiet", "--no-trunc", "--filter", &format!("label=cogni.run={run}")])
}

pub(super) fn entries(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return vec![] };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

pub(super) fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}
