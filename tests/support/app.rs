//! A gateway as the program builds it, with a fake provider and its own directory.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::AgentRun;
use cogni_gateway::gateway::upstream::UpstreamKind;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use cogni_gateway::telemetry::audit::verify;
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::client::TestClient;
use super::model_provider;

/// A served run. Dropping it stops everything; [`TestApp::stop`] also checks the audit log and the socket.
pub(crate) struct TestApp {
    pub(crate) upstream: model_provider::RunningProvider,
    pub(crate) socket: PathBuf,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) run: Arc<AgentRun>,
    stop: CancellationToken,
    served: JoinHandle<anyhow::Result<()>>,
    audit: Option<PathBuf>,
    directory: TempDir,
}

impl TestApp {
    pub(crate) async fn start() -> Self {
        Self::with(|_| ()).await
    }

    /// Starts with a changed configuration.
    pub(crate) async fn with(configure: impl FnOnce(&mut GatewayConfig)) -> Self {
        Self::in_front_of(model_provider::start_default().await, configure)
    }

    /// Starts in front of a provider that refuses what this provider would refuse.
    pub(crate) async fn strict(
        kind: UpstreamKind,
        configure: impl FnOnce(&mut GatewayConfig),
    ) -> Self {
        let upstream = model_provider::start_strict().await;
        Self::in_front_of(upstream, |config| {
            config.upstream.kind = kind;
            configure(config);
        })
    }

    fn in_front_of(
        upstream: model_provider::RunningProvider,
        configure: impl FnOnce(&mut GatewayConfig),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = run_config(directory.path(), upstream.addr);
        configure(&mut config);
        let audit = config.audit.path.clone();
        let app = GatewayProcess::build_process(config).unwrap();
        let (socket, metrics) = (app.socket_path().unwrap().to_path_buf(), app.metrics_address());
        let run = app.run_manager().list_runs().remove(0);
        let stop = CancellationToken::new();
        let served = tokio::spawn(app.serve_until_cancelled(stop.clone()));
        Self { upstream, socket, metrics, run, stop, served, audit, directory }
    }

    pub(crate) fn client(&self) -> TestClient {
        TestClient::new(&self.socket)
    }

    pub(crate) fn audit_log(&self) -> PathBuf {
        self.audit.clone().unwrap()
    }

    pub(crate) fn access_log(&self) -> PathBuf {
        self.directory.path().join("access.log")
    }

    /// Returns the audit records written so far, without buffered ones.
    pub(crate) fn records(&self) -> Vec<Value> {
        read_records(&self.audit_log())
    }

    /// Waits until an event was recorded `times` times, and returns those records.
    pub(crate) async fn recorded(&self, event: &str, times: usize) -> Vec<Value> {
        loop {
            let found: Vec<_> =
                self.records().into_iter().filter(|record| record["event"] == event).collect();
            if found.len() >= times {
                return found;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// Begins a shutdown without waiting for it.
    pub(crate) fn begin_stop(&self) {
        self.stop.cancel();
    }

    /// Shuts down in order, checks that the audit log proves itself and that the socket is gone, and returns all
    /// records.
    pub(crate) async fn stop(self) -> Vec<Value> {
        self.stop.cancel();
        let log = self.audit_log();
        self.served.await.unwrap().unwrap();
        assert!(!self.socket.exists(), "the socket is left behind");
        let report = verify::verify_file(&log, None).unwrap();
        assert!(report.finished, "the audit log does not end in order");
        assert_eq!(report.open, 0, "a call was admitted and never settled");
        read_records(&log)
    }
}

/// The configuration of run `run-1` of account `acct-1` with this upstream and all its files in one directory.
pub(crate) fn run_config(directory: &Path, upstream: SocketAddr) -> GatewayConfig {
    let mut config = GatewayConfig::default();
    "run-1".clone_into(&mut config.identity.run);
    "acct-1".clone_into(&mut config.identity.account);
    config.listen.socket_path = directory.join("llm.sock");
    config.upstream.url = upstream.to_string().parse().unwrap();
    config.upstream.api_key = SecretString::new("sk-real");
    config.audit.path = Some(directory.join("audit.jsonl"));
    config.access_log = AccessLogDestination::File(directory.join("access.log"));
    if let Ok(mode) = std::env::var(LANE) {
        config.server.lane = serde_json::from_value(mode.into()).unwrap();
    }
    config
}

fn read_records(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The environment variable that turns the lane on or off for the whole suite.
const LANE: &str = "COGNI_TEST_LANE";
