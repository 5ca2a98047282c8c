//! Many runs in one process, each with a socket of its own. A service uses this host instead of one
//! [`GatewayProcess`](super::GatewayProcess) for each run.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::background::flush_until;
use super::{ChangeSource, RunManager, RunShutdown};
use crate::base::metrics::HttpPage;
use crate::base::metrics::discovery::ScrapeTarget;
use crate::base::task_group::TaskGroup;
use crate::base::unix::UnixListenerGuard;
use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::server::run_socket;
use crate::gateway::run::{AgentRun, ToolSettings};
use crate::telemetry::access_log;
use crate::telemetry::metrics::MetricsRegistry;

/// A host for the gateways of many runs. The runs share the host's upstream connections, metrics and access log; each
/// run has its own policy, budget and records. Clones share the host.
#[derive(Clone)]
pub struct GatewayHost {
    runs: RunManager,
    target: ScrapeTarget,
}

/// The gateway of one run, with its socket bound and its audit log open. Dropping a gateway that was never served
/// blocks on the disk.
#[must_use = "a client that connects waits until the gateway is served"]
pub struct HostedGateway {
    open_run: OpenRunGuard,
    listener: UnixListenerGuard,
    gateway: Arc<RunGateway>,
    config: GatewayConfig,
}

impl GatewayHost {
    /// Creates a host. The settings are the defaults of the runs. Must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if a log cannot be opened, or if the policy cannot be compiled.
    pub fn new(config: &GatewayConfig) -> anyhow::Result<Self> {
        // Each hosted gateway is served by tasks of the caller's runtime, so one worker is enough.
        let config = GatewayConfig { workers: 1, ..config.clone() };
        let target = ScrapeTarget {
            address: config.metrics.advertise.clone(),
            service: config.telemetry.service_name.clone(),
        };
        Ok(Self { runs: RunManager::with_private_sockets(&config, TaskGroup::default())?, target })
    }

    /// Binds a run's socket and opens its audit log. Blocks on the disk; must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be bound, the log cannot be opened, the policy cannot be compiled, or the
    /// run is open already.
    pub fn open_gateway(&self, config: GatewayConfig) -> anyhow::Result<HostedGateway> {
        // The socket comes first. If another process serves the socket, this process must not touch that process's
        // records.
        let listener = UnixListenerGuard::bind_socket(
            &config.listen.socket_path,
            config.listen.socket_permissions(),
        )?;
        let gateways = self.runs.open_hosted(config.clone())?;
        // From here on the guard closes the run, even if the caller drops the gateway without serving it.
        let open_run = OpenRunGuard {
            runs: self.runs.clone(),
            run: config.identity.run.clone(),
            stage: OpenRunStage::Unserved,
            runtime: Handle::current(),
        };
        let gateway = Arc::clone(&gateways[0]);
        Ok(HostedGateway { open_run, listener, gateway, config })
    }

    /// Puts other settings in force for runs that are opened from now on. Runs with the same rules and prices share the
    /// rules and prices that are read here.
    ///
    /// # Errors
    /// Returns an error if the settings cannot be compiled. In this case nothing has changed.
    pub fn reload_defaults(&self, config: &GatewayConfig) -> anyhow::Result<()> {
        self.runs.reload_defaults(ChangeSource::Signal, config)
    }

    /// Closes the records of a run whose process ended without closing them. Calls that were open are settled as after
    /// any crash.
    ///
    /// # Errors
    /// Returns an error if the records cannot be opened or closed, or if the run is open here.
    pub async fn close_abandoned_run(&self, config: GatewayConfig) -> anyhow::Result<()> {
        let (run, runs) = (config.identity.run.clone(), self.runs.clone());
        // No agent calls any more, so the run needs no tools, which need a sandbox.
        let config = GatewayConfig { tools: ToolSettings::default(), ..config };
        // Opening the log settles the open calls of the dead process; closing it then writes the end of the run.
        tokio::task::spawn_blocking(move || runs.open_hosted(config)).await??;
        self.runs.close_run(&run).await?;
        Ok(())
    }

    /// Returns the handle that lists and changes the open runs.
    pub fn run_manager(&self) -> &RunManager {
        &self.runs
    }

    /// Returns the metrics of all runs and of the process.
    pub fn metrics(&self) -> &Arc<MetricsRegistry> {
        self.runs.metrics()
    }

    /// Returns the pages that Prometheus may request.
    pub fn metrics_pages(&self) -> Vec<HttpPage> {
        let runs = self.runs.clone();
        vec![
            HttpPage::metrics_page(move || runs.render_metrics()),
            HttpPage::discovery_page(self.target.clone()),
        ]
    }

    /// Returns the access log of all runs, so that the caller can reopen it after a rotation.
    pub fn access_log(&self) -> Arc<access_log::AccessLog> {
        Arc::new(self.runs.access_log_handle().clone())
    }

    /// Exports the remaining measurements and log lines, when all runs have ended.
    ///
    /// # Errors
    /// Returns an error if the records of a run that had not ended cannot be closed.
    pub async fn finish_all(&self) -> anyhow::Result<()> {
        self.runs.finish_all().await
    }
}

impl fmt::Debug for GatewayHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayHost").finish_non_exhaustive()
    }
}

impl HostedGateway {
    pub fn run(&self) -> &Arc<AgentRun> {
        &self.gateway.run
    }

    pub fn socket(&self) -> &Path {
        self.listener.path()
    }

    /// Serves until `stop` is cancelled, lets open calls finish within the drain timeout, and closes the run's records.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be served, or if the records cannot be closed.
    pub async fn serve_until_cancelled(self, stop: CancellationToken) -> anyhow::Result<()> {
        Box::pin(self.serve_in_two_steps(RunShutdown::single_step(stop))).await
    }

    /// Serves like [`serve_until_cancelled`](Self::serve_until_cancelled), but ends in two steps: first the calls, then
    /// the records.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be served, or if the records cannot be closed.
    pub async fn serve_in_two_steps(self, closing: RunShutdown) -> anyhow::Result<()> {
        let Self { mut open_run, listener, gateway, config } = self;
        let own = Arc::clone(&gateway);
        let (handle, tasks) = (listener.accept_handle()?, gateway.tasks.clone());
        // From here on tasks use the run. A drop of this future must wait for them, so the guard closes in the
        // background.
        open_run.stage = OpenRunStage::Served;
        let (server, uids) = (Arc::new(config.server), config.listen.require_uid.into());
        tasks.spawn_task(async move {
            if let Err(error) = run_socket::serve_run_socket(handle, gateway, server, uids).await {
                tracing::error!(%error, "cannot serve a run's socket");
            }
        });
        closing.calls.cancelled().await;
        // A client that connects now is refused at once, instead of waiting in a backlog that no task serves.
        drop(listener);
        open_run.runs.end_run_calls(&own).await;
        // No call runs any more. The caller may still write records until it cancels `records`.
        closing.calls_ended.cancel();
        // The run's flush task has ended with the calls, so this task writes out the buffered records instead.
        flush_until(&own.run, &closing.records).await;
        open_run.close_run().await
    }
}

/// A guard of an open run. The guard closes the run on every path, also if its owner is dropped.
struct OpenRunGuard {
    runs: RunManager,
    run: String,
    stage: OpenRunStage,
    runtime: Handle,
}

/// The progress of an open run, which decides how the guard closes the run.
enum OpenRunStage {
    Unserved,
    Served,
    Closed,
}

impl OpenRunGuard {
    /// Closes the run and returns the result, which a drop could only log.
    async fn close_run(mut self) -> anyhow::Result<()> {
        // The stage is set before the await: if this future is dropped, the closing goes on by itself.
        self.stage = OpenRunStage::Closed;
        let closed = self.runs.close_run(&self.run).await;
        closed.map(|_| ()).with_context(|| format!("run `{}`", self.run))
    }
}

impl Drop for OpenRunGuard {
    fn drop(&mut self) {
        let run = &self.run;
        let closed = match self.stage {
            // The run is closed at once, because the caller that failed to serve it inspects its records next.
            OpenRunStage::Unserved => self.runs.close_unserved_run(run),
            OpenRunStage::Served => {
                // A drop may run outside the runtime, and closing spawns a task.
                let _within = self.runtime.enter();
                self.runs.start_close(run).map(drop)
            }
            OpenRunStage::Closed => Ok(()),
        };
        if let Err(error) = closed {
            tracing::error!(run, "cannot close an abandoned run: {error:#}");
        }
    }
}
