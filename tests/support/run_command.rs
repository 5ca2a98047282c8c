//! `cogni-gateway run` with its own run directory, and a check that nothing remains of each run.

use std::fs::{self, File};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cogni_gateway::sandbox::InitBinary;
use cogni_gateway::sandbox::probe::machine;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::model_provider;
use crate::support::process::NO_LISTENER;

/// The runs of one driver.
pub(crate) struct SandboxedRunner<D> {
    directory: TempDir,
    provider: Option<model_provider::RunningProvider>,
    driver: PhantomData<D>,
}

/// The parts of a run that depend on the driver.
pub(crate) trait TestDriver {
    /// Panics with the command to run, if the driver cannot work here.
    fn check();

    /// Adds the driver's options to the command.
    fn choose(command: &mut Command);

    /// Returns everything that exists of a run, in any state; empty if there is nothing.
    fn traces(run: &str) -> String;
}

/// The result of a run.
pub(crate) struct Result {
    pub(crate) status: i32,
    pub(crate) json: Value,
    /// Standard error.
    pub(crate) shown: String,
}

impl<D: TestDriver> SandboxedRunner<D> {
    pub(crate) fn new() -> Self {
        D::check();
        Self { directory: tempfile::tempdir().unwrap(), provider: None, driver: PhantomData }
    }

    pub(crate) async fn with_provider() -> Self {
        Self { provider: Some(model_provider::start_default().await), ..Self::new() }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap()
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path().join("r")
    }

    /// Makes a run to its end; wrong use fails the test.
    pub(crate) fn run(&self, flags: &[&str], argv: &[&str]) -> Result {
        let (status, stdout, shown) = self.command(flags, argv);
        let json =
            serde_json::from_str::<Value>(&stdout).unwrap_or_else(|_| panic!("{stdout}\n{shown}"));
        self.assert_nothing_is_left(json["run_id"].as_str().unwrap());
        Result { status, json, shown }
    }

    pub(crate) fn command(&self, flags: &[&str], argv: &[&str]) -> (i32, String, String) {
        let shown = self.path().join(format!("shown-{:?}", Instant::now()));
        let mut command = self.prepare(flags, argv);
        command.stderr(File::create(&shown).unwrap());
        let output = command.output().unwrap();
        let shown = String::from_utf8_lossy(&fs::read(&shown).unwrap()).into_owned();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), shown)
    }

    pub(crate) fn prepare(&self, flags: &[&str], argv: &[&str]) -> Command {
        let upstream = self.provider.as_ref().map_or(NO_LISTENER, |provider| provider.addr);
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command
            .env_clear()
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", upstream.to_string())
            .env("COGNI_RUN_DIR", self.run_dir())
            .arg("run")
            .args(flags)
            .arg("--")
            .args(argv);
        D::choose(&mut command);
        command
    }

    pub(crate) fn assert_nothing_is_left(&self, run: &str) {
        assert_eq!(D::traces(run), "");
        assert_eq!(list_entries(&self.run_dir()), [""; 0]);
    }
}

impl Result {
    pub(crate) fn facts(&self) -> Value {
        json!([self.json["ok"], self.json["exit_code"], self.json["error_code"]])
    }
}

pub(crate) fn list_entries(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return vec![] };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

pub(crate) fn shell_argv(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

/// Returns the version of the kernel's Landlock; 0 without Landlock.
pub(crate) fn landlock_version() -> u32 {
    machine::probe_machine(Path::new("/"), InitBinary::None, None).landlock.unwrap_or(0)
}
