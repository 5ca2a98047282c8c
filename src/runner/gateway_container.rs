//! A gateway in a container of its own: the container's settings and files, and the reader of its audit log.
//!
//! The upstream's key is in one file of the run's directory. Only the gateway's container mounts that file.

mod audit_tail;
mod files;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::directory::RunDirectory;
use super::gateway_signals::{CallSummary, GatewaySignals};
use crate::base::time::MAX_TIME;
use crate::gateway::config::GatewayConfig;
use crate::gateway::run::RunIdentity;
use crate::llm::budget::Tokens;
use crate::sandbox::docker::DockerEngine;
use crate::sandbox::docker::gateway_container::{self, RunningGatewayContainer};
use crate::sandbox::spec::{OwnerLabels, SOCKET_DIR_TARGET};
use crate::sandbox::{SandboxError, container_mark, spec};
use audit_tail::GatewayAuditTail;

/// The settings from which a gateway's container is made.
#[derive(Clone, Debug)]
pub struct GatewayContainerConfig {
    pub docker_socket: PathBuf,
    pub image: String,
    pub network: String,
    /// The settings that were given by flag or variable, except for secrets.
    pub settings: Vec<(&'static str, String)>,
    /// The file with further settings.
    pub config_file: Option<PathBuf>,
}

/// A gateway's container that is ready to start. Everything that the container needs is written; nothing is started.
pub(super) struct PreparedGatewayContainer {
    docker_socket: PathBuf,
    spec: spec::docker::gateway_container::GatewayContainerSpec,
    labels: OwnerLabels,
    records: GatewayAuditTail,
    deadline: Option<Instant>,
    drain: Duration,
}

impl PreparedGatewayContainer {
    /// Writes the files that the container mounts, and builds the container's specification.
    pub(super) fn prepare(
        settings: GatewayContainerConfig,
        config: &GatewayConfig,
        directory: &RunDirectory,
        stamp: &OwnerLabels,
    ) -> anyhow::Result<Self> {
        if let Some(path) = &config.admin.socket_path {
            bail!(
                "`ADMIN_SOCKET_PATH` is `{}`, and a gateway in a container has no admin socket; leave the setting out",
                path.display()
            );
        }
        container_mark::write(directory.path())
            .context("the run's directory cannot be marked for the gateway's container")?;
        // Later entries of `env` replace earlier ones: flags and variables, then the paths of the mounted files, then
        // the run's identity and budget, then the socket.
        let mounted_files = files::write_files(&settings, config, directory)?;
        let mut env: std::collections::BTreeMap<_, _> =
            settings.settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        env.extend(mounted_files.env);
        // The run's own file may set the identity and the budget, and flags and variables do not contain those values.
        env.extend(environment(config).map(|(name, value)| (name.to_owned(), value)));
        env.insert("SOCKET_PATH".to_owned(), format!("{SOCKET_DIR_TARGET}/llm.sock"));
        env.insert("SOCKET_MODE".to_owned(), format!("{:04o}", config.listen.socket_mode));
        let required: Vec<_> = config.listen.require_uid.iter().map(u32::to_string).collect();
        if !required.is_empty() {
            env.insert("SOCKET_REQUIRE_UID".to_owned(), required.join(","));
        }
        let (uid, gid) = directory.gateway_user();
        let spec = spec::docker::gateway_container::GatewayContainerSpec {
            run: config.identity.run.clone(),
            image: settings.image,
            network: settings.network,
            uid,
            gid,
            env,
            socket_dir: directory.socket_dir(),
            mounts: mounted_files.mounts,
        };
        Ok(Self {
            docker_socket: settings.docker_socket,
            spec,
            labels: stamp.clone(),
            records: GatewayAuditTail::open_at_end(mounted_files.audit)?,
            deadline: config.budget.deadline.map(|limit| Instant::now() + limit.min(MAX_TIME)),
            drain: config.drain_timeout,
        })
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Serves until `stop` is cancelled, or until the container ends by itself. Then removes the container.
    pub(super) async fn serve(
        mut self,
        signals: &GatewaySignals,
        stop: CancellationToken,
    ) -> (anyhow::Result<()>, CallSummary) {
        let served = match DockerEngine::connect(&self.docker_socket).await {
            Ok(docker) => {
                let served = Box::pin(self.run_container(&docker, signals, &stop)).await;
                // The start may have been cut off between the engine's creation of the container and its answer, so
                // the removal has to look for a container that appears late.
                let was_cut = matches!(served, Ok(false));
                gateway_container::remove_gateway(&docker, &self.spec.run, &self.labels, was_cut)
                    .await;
                served.map(|_| ())
            }
            Err(error) => Err(error.into()),
        };
        // The container's last records are complete only now.
        let read = self.records.read_new();
        (served.and(read), self.records.calls())
    }

    /// Runs the container until `stop`. Returns false if `stop` was cancelled before the container had started.
    async fn run_container(
        &mut self,
        docker: &DockerEngine,
        signals: &GatewaySignals,
        stop: &CancellationToken,
    ) -> anyhow::Result<bool> {
        let start = Box::pin(gateway_container::start_gateway(docker, &self.spec, &self.labels));
        let Some(running) = stop.run_until_cancelled(start).await.transpose()? else {
            return Ok(false);
        };
        // A gateway that exits by itself is an error, even with exit code 0: the run needs its gateway until `stop`.
        tokio::select! {
            exit = running.wait_for_exit() => Err(exit_error(&running, exit?).await.into()),
            failed = self.follow_audit_log(signals) => failed,
            () = stop.cancelled() => {
                // The gateway drains by itself. The engine kills the container only if the drain does not end in time.
                running.stop(self.drain + STOP_TIMEOUT).await?;
                Ok(true)
            }
        }
    }

    /// Follows the container's audit log, and cancels the tokens of `signals` accordingly. Ends only with an error.
    async fn follow_audit_log(&mut self, signals: &GatewaySignals) -> anyhow::Result<bool> {
        let ready = async {
            while !self.records.is_started() {
                sleep(POLL_INTERVAL).await;
                self.records.read_new()?;
            }
            anyhow::Ok(())
        };
        timeout(START_TIMEOUT, ready)
            .await
            .context("the gateway's container does not begin to serve")??;
        signals.ready.cancel();
        loop {
            if self.records.is_exhausted() {
                signals.exhausted.cancel();
            }
            sleep(POLL_INTERVAL).await;
            self.records.read_new()?;
        }
    }
}

/// Returns the run's identity and budget as settings of the gateway.
fn environment(config: &GatewayConfig) -> impl Iterator<Item = (&'static str, String)> {
    let RunIdentity { run, attempt, account, trace, .. } = &config.identity;
    let budget = &config.budget;
    let count = |tokens: Option<Tokens>| tokens.map(|tokens| tokens.0.to_string());
    // The setting takes whole seconds, so a deadline below one second becomes one second.
    let seconds = budget.deadline.map(|limit| limit.as_secs().max(1));
    let variables = [
        ("RUN_ID", Some(run.clone())),
        ("ATTEMPT", Some(attempt.clone())),
        ("BILLING_ACCOUNT_ID", Some(account.clone())),
        ("LITELLM_METADATA_JSON", serde_json::to_string(&config.identity.litellm_metadata()).ok()),
        ("TRACEPARENT", trace.map(|trace| trace.to_string())),
        ("MAX_TURNS", budget.max_turns.map(|count| count.to_string())),
        ("MAX_TOTAL_TOKENS", count(budget.max_total_tokens)),
        ("MAX_INPUT_TOKENS", count(budget.max_input_tokens)),
        ("MAX_OUTPUT_TOKENS", count(budget.max_output_tokens)),
        ("MAX_COST_USD", budget.max_cost_usd.map(|most| most.to_string())),
        ("MAX_CONCURRENT", budget.max_concurrent.map(|count| count.to_string())),
        ("REQUESTS_PER_MINUTE", budget.requests_per_minute.map(|count| count.to_string())),
        ("TOKENS_PER_MINUTE", budget.tokens_per_minute.map(|count| count.to_string())),
        ("RUN_DEADLINE_SECONDS", seconds.map(|seconds| seconds.to_string())),
    ];
    variables.into_iter().filter_map(|(name, value)| Some((name, value?)))
}

async fn exit_error(running: &RunningGatewayContainer, exit_code: i64) -> SandboxError {
    let log_tail = running.log_tail().await;
    SandboxError::GatewayContainerEnded(format!("exit code {exit_code}; it said: {log_tail}"))
}

/// The maximum time from the container's start to its first audit record (our choice). A busy machine takes some
/// seconds to start a container.
const START_TIMEOUT: Duration = Duration::from_mins(1);

/// The time between two polls of the audit log (our choice). A spent budget is noticed only at the next poll.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time that the container gets to exit after its drain (our choice).
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
