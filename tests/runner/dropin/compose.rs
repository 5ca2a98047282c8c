//! Runs `docker/compose.yaml` under its own project name and takes it down again.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;
use uuid::Uuid;

use crate::support::docker_engine::{self, PrivateEngine};

/// A compose project; dropping it takes the project down.
pub(super) struct ComposeProject {
    project: String,
    folder: TempDir,
}

impl ComposeProject {
    pub(super) fn new() -> Self {
        // This checks the engine and its images, and reports what is missing.
        PrivateEngine::connect();
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("litellm_master_key");
        fs::write(&key, "sk-litellm-master").unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o444)).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        fs::write(dir.path().join("litellm.yaml"), STAND_IN).unwrap();
        Self { project: format!("cogni-test-{}", Uuid::now_v7().simple()), folder: dir }
    }

    /// Starts gateway, agent and LiteLLM, and waits until the agent ends. Returns its exit code and the output of all
    /// three.
    pub(super) fn up(&self) -> (i32, String) {
        let services = ["gateway", "litellm", "agent"];
        let output = self.compose(
            &[&["up", "--no-color", "--no-build", "--exit-code-from", "agent"], &services[..]]
                .concat(),
        );
        let printed =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.code().unwrap(), printed.concat())
    }

    fn compose(&self, arguments: &[&str]) -> Output {
        let home = Path::new(env!("CARGO_MANIFEST_DIR"));
        Command::new("docker-compose")
            .args(["--project-name", &self.project])
            .arg("--file")
            .arg(home.join("docker/compose.yaml"))
            .arg("--file")
            .arg(self.folder.path().join("litellm.yaml"))
            .args(arguments)
            .env("AGENT_IMAGE", docker_engine::HOST)
            .env("COGNI_INIT", docker_engine::init_path())
            .env("GATEWAY_IMAGE", docker_engine::GATEWAY)
            .env("LITELLM_MASTER_KEY_FILE", self.folder.path().join("litellm_master_key"))
            .output()
            .expect("docker-compose is installed; `tests/run dropin` does it")
    }
}

impl Drop for ComposeProject {
    fn drop(&mut self) {
        self.compose(&["down", "--volumes", "--timeout", "1"]);
    }
}

const STAND_IN: &str = r#"
services:
  litellm:
    image: cogni-gateway:dev
    entrypoint: ["/cogni-gateway"]
    command: ["provider", "--listen", "0.0.0.0:4000"]
"#;
