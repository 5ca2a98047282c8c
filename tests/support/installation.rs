//! An installation of sandboxes in this process, or in a process that the test kills, with checks for its leftovers.

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cogni_gateway::runner::sweep::{LeftoverSweeper, SweepOutcome};
use cogni_gateway::runner::{GatewayServer, PreparedRun, RunPlan};
use cogni_gateway::sandbox::embedded::EmbeddedDriverConfig;
use cogni_gateway::sandbox::spec::{RootSource, SandboxLimits, SandboxTask, WorkspaceMount};
use cogni_gateway::sandbox::{SandboxDriver, SandboxSpec, UserRange};
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::app;
use super::docker_engine::{self, docker_output};
use super::process::{TEST_TIMEOUT, wait_until};
use super::run_command::list_entries;

/// An installation with its own directory.
pub(crate) struct TestInstallation {
    directory: TempDir,
    /// The directory of another process's installation.
    path: Option<PathBuf>,
    driver: SandboxDriver,
    root: RootSource,
}

pub(crate) fn both_installations() -> [TestInstallation; 2] {
    [TestInstallation::docker(), TestInstallation::embedded()]
}

impl TestInstallation {
    pub(crate) fn docker() -> Self {
        Self::docker_at(Path::new(docker_engine::SOCKET))
    }

    /// Makes an installation whose driver reaches the engine by another socket.
    pub(crate) fn docker_at(socket: &Path) -> Self {
        docker_engine::need_images(&[docker_engine::HOST]);
        let driver = SandboxDriver::Docker { socket: socket.to_owned() };
        Self::new(driver, RootSource::Image(docker_engine::HOST.to_owned()))
    }

    pub(crate) fn embedded() -> Self {
        let program = env!("CARGO_BIN_EXE_cogni-gateway").into();
        Self::new(
            SandboxDriver::Embedded(EmbeddedDriverConfig {
                program,
                ..EmbeddedDriverConfig::default()
            }),
            RootSource::Host,
        )
    }

    fn new(driver: SandboxDriver, root: RootSource) -> Self {
        Self { directory: tempfile::tempdir().unwrap(), path: None, driver, root }
    }

    pub(crate) fn path(&self) -> PathBuf {
        let own = || self.directory.path().canonicalize().unwrap();
        self.path.clone().unwrap_or_else(own)
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path().join("r")
    }

    pub(crate) fn spec(&self, argv: &[&str]) -> SandboxSpec {
        SandboxSpec {
            run: String::new(),
            root: self.root.clone(),
            argv: argv.iter().map(ToString::to_string).collect(),
            uid: 1001,
            env: [].into(),
            limits: SandboxLimits::default(),
            grace: Duration::from_secs(1),
            workspace: WorkspaceMount::None,
            mounts: vec![],
            volumes: vec![],
            socket_dir: PathBuf::new(),
            init: Some(docker_engine::init_path().into()),
            has_tunnels: false,
            task: SandboxTask::Agent,
        }
    }

    pub(crate) fn run_plan(&self, run: &str, argv: &[&str]) -> RunPlan {
        let no_listener = SocketAddr::from(([127, 0, 0, 1], 9));
        let mut config = app::run_config(&self.path(), no_listener);
        run.clone_into(&mut config.identity.run);
        config.audit.path = None;
        RunPlan {
            docker_socket: docker_engine::SOCKET.into(),
            agent: None,
            branch: None,
            gateway: GatewayServer::OwnProcess,
            config,
            spec: self.spec(argv),
            roots: vec![self.path()],
            run_dir: self.run_dir(),
            uids: UserRange::DEFAULT_RANGE,
            driver: self.driver.clone(),
        }
    }

    /// Returns the first processes of the waiting slots, as this machine sees them: processes that see this run
    /// directory.
    pub(crate) fn waiting_slots(&self) -> Vec<String> {
        let is_slot = |pid: &String| {
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
            read("cmdline").is_ok_and(|line| line.starts_with("/cogni-init\0--slot\0"))
                && read("mountinfo").is_ok_and(|mounts| mounts.contains(self.mark()))
        };
        list_entries(Path::new("/proc")).into_iter().filter(is_slot).collect()
    }

    fn mark(&self) -> &str {
        let path = self.path.as_deref().unwrap_or(self.directory.path());
        path.file_name().unwrap().to_str().unwrap()
    }

    /// Describes everything that exists of this installation.
    pub(crate) fn left(&self) -> String {
        let filter = format!("label=cogni.dir={}", self.run_dir().display());
        let containers =
            docker_output(&["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"]);
        format!("{containers}{}", list_entries(&self.run_dir()).join(" "))
    }

    fn is_docker(&self) -> bool {
        matches!(self.driver, SandboxDriver::Docker { .. })
    }

    /// Starts `test` once more as a process that will be killed. That process gets this installation from
    /// [`inherited_installation`].
    pub(crate) fn start_keeper(&self, test: &str) -> KeeperProcess {
        let driver = if self.is_docker() { "docker" } else { "embedded" };
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test]).env(DRIVER, driver).env(PATH, self.path());
        KeeperProcess(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Sweeps objects without a living owner, and asserts that nothing remains.
    pub(crate) async fn sweep(&self) {
        let swept = self.sweeper().sweep().await.unwrap();
        assert!(
            swept.found.iter().all(|found| found.outcome == SweepOutcome::Removed),
            "{swept:?}"
        );
        assert_eq!(self.left(), "");
    }

    fn sweeper(&self) -> LeftoverSweeper {
        LeftoverSweeper {
            docker_socket: docker_engine::SOCKET.into(),
            run_dir: self.run_dir(),
            apply: true,
            all: false,
        }
    }
}

/// Returns the installation that this process was started for, if the test started it to be killed.
pub(crate) fn inherited_installation() -> Option<TestInstallation> {
    let path = Some(PathBuf::from(env::var_os(PATH)?));
    let is_docker = env::var(DRIVER).is_ok_and(|driver| driver == "docker");
    let installation =
        if is_docker { TestInstallation::docker() } else { TestInstallation::embedded() };
    Some(TestInstallation { path, ..installation })
}

const DRIVER: &str = "COGNI_TEST_KEEPS_BY";
const PATH: &str = "COGNI_TEST_KEEPS_IN";

/// A process with sandboxes that is killed when dropped.
pub(crate) struct KeeperProcess(Child);

impl KeeperProcess {
    /// Kills the process without a signal handler; its sandboxes end by themselves, and a sweep removes the rest.
    pub(crate) async fn kill(mut self, installation: &TestInstallation) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        wait_until(|| installation.waiting_slots().is_empty(), || "one is still there".to_owned());
        installation.sweep().await;
    }
}

impl Drop for KeeperProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A background task of an installation, which runs until it is stopped.
pub(crate) struct BackgroundPool<'place> {
    pub(crate) place: &'place TestInstallation,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl<'place> BackgroundPool<'place> {
    pub(crate) fn new<F: Future<Output = ()> + Send + 'static>(
        installation: &'place TestInstallation,
        keep: impl FnOnce(CancellationToken) -> F,
    ) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(keep(stop.clone()));
        Self { place: installation, stop, task }
    }

    /// Stops the task and asserts that nothing remains, except objects that a busy engine has made too late. This
    /// process's own sweep removes those, and nothing else of a living process.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
        let begun = Instant::now();
        while !self.place.left().is_empty() && begun.elapsed() < TEST_TIMEOUT {
            self.place.sweeper().sweep().await.unwrap();
        }
        assert_eq!(self.place.left(), "");
    }
}

/// Returns the result as the host reads it, without its timings.
pub(crate) fn run(prepared: PreparedRun) -> Pin<Box<dyn Future<Output = Value>>> {
    Box::pin(async {
        let result = Box::pin(prepared.run(CancellationToken::new(), tokio::io::sink())).await;
        let mut result = serde_json::to_value(&result).unwrap();
        result.as_object_mut().unwrap().remove("timings").unwrap();
        result
    })
}
