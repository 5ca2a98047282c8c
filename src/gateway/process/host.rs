//! Many runs in one process, each on a socket of its own: what a service has in place of one [`App`](super::GatewayProcess) for
//! each.

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
use crate::gateway::run::AgentRun;
use crate::telemetry::access_log;
use crate::telemetry::metrics::MetricsRegistry;

/// Where runs get their gateways. They share its upstream connections, metrics and access log; each has its own
/// policy, budget and records. Clones are the same.
#[derive(Clone)]
pub struct GatewayHost {
    runs: RunManager,
    target: ScrapeTarget,
}

/// One run, whose socket is bound and whose log is open. Where it is dropped and not served, that blocks on the disk.
#[must_use = "whoever connects waits until it is served"]
pub struct HostedGateway {
    held: OpenRunGuard,
    listener: UnixListenerGuard,
    gateway: Arc<RunGateway>,
    config: GatewayConfig,
}

impl GatewayHost {
    /// For runs whose settings begin with these. Must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be opened or compiled.
    pub fn new(config: &GatewayConfig) -> anyhow::Result<Self> {
        let config = GatewayConfig { workers: 1, ..config.clone() };
        let target = ScrapeTarget {
            address: config.metrics.advertise.clone(),
            service: config.telemetry.service_name.clone(),
        };
        Ok(Self { runs: RunManager::with_private_sockets(&config, TaskGroup::default())?, target })
    }

    /// Binds a run's socket and opens its log. Blocks on the disk; must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be bound, opened or compiled, or the run is open already.
    pub fn open_gateway(&self, config: GatewayConfig) -> anyhow::Result<HostedGateway> {
        // First: who finds another process on the socket must not touch its records.
        let listener = UnixListenerGuard::bind_socket(
            &config.listen.socket_path,
            config.listen.socket_permissions(),
        )?;
        let gateways = self.runs.open_hosted(config.clone())?;
        let held = OpenRunGuard {
            runs: self.runs.clone(),
            run: config.identity.run.clone(),
            stage: OpenRunStage::Unserved,
            runtime: Handle::current(),
        };
        let gateway = Arc::clone(&gateways[0]);
        Ok(HostedGateway { held, listener, gateway, config })
    }

    /// Puts other settings in force for runs that are opened from now on. Those that have the same rules and prices have
    /// them as they are read here.
    ///
    /// # Errors
    /// What cannot be compiled; nothing has changed.
    pub fn reload_defaults(&self, config: &GatewayConfig) -> anyhow::Result<()> {
        self.runs.reload_defaults(ChangeSource::Signal, config)
    }

    /// Closes the records of a run whose process has ended without doing so: what was open is settled as it is after
    /// any crash.
    ///
    /// # Errors
    /// They cannot be opened or closed, or the run is open here.
    pub async fn close_abandoned_run(&self, config: GatewayConfig) -> anyhow::Result<()> {
        let (run, runs) = (config.identity.run.clone(), self.runs.clone());
        tokio::task::spawn_blocking(move || runs.open_hosted(config)).await??;
        self.runs.close_run(&run).await?;
        Ok(())
    }

    /// To look at the open runs, and change them.
    pub fn run_manager(&self) -> &RunManager {
        &self.runs
    }

    /// Of all runs, and of the process.
    pub fn metrics(&self) -> &Arc<MetricsRegistry> {
        self.runs.metrics()
    }

    /// What Prometheus may ask for.
    pub fn metrics_pages(&self) -> Vec<HttpPage> {
        let runs = self.runs.clone();
        vec![
            HttpPage::metrics_page(move || runs.render_metrics()),
            HttpPage::discovery_page(self.target.clone()),
        ]
    }

    /// Of all runs, to be opened anew after a rotation.
    pub fn access_log(&self) -> Arc<access_log::AccessLog> {
        Arc::new(self.runs.access_log_handle().clone())
    }

    /// Sends out what was measured and logged, when all runs have ended.
    ///
    /// # Errors
    /// The records of a run that had not ended could not be closed.
    pub async fn finish_all(&self) -> anyhow::Result<()> {
        self.runs.finish_all().await
    }
}

impl fmt::Debug for GatewayHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seats").finish_non_exhaustive()
    }
}

impl HostedGateway {
    pub fn run(&self) -> &Arc<AgentRun> {
        &self.gateway.run
    }

    pub fn socket(&self) -> &Path {
        self.listener.path()
    }

    /// Serves until `stop`, lets open calls finish within the drain timeout, and closes the run's records.
    ///
    /// # Errors
    /// The listener could not be served, or the records not be closed.
    pub async fn serve_until_cancelled(self, stop: CancellationToken) -> anyhow::Result<()> {
        Box::pin(self.serve_in_two_steps(RunShutdown::single_step(stop))).await
    }

    /// Serves as [`serve`](Self::serve_until_cancelled) does, and ends in two steps.
    ///
    /// # Errors
    /// The listener could not be served, or the records not be closed.
    pub async fn serve_in_two_steps(self, closing: RunShutdown) -> anyhow::Result<()> {
        let Self { mut held, listener, gateway, config } = self;
        let own = Arc::clone(&gateway);
        let (handle, tasks) = (listener.accept_handle()?, gateway.tasks.clone());
        held.stage = OpenRunStage::Served;
        let (server, uids) = (Arc::new(config.server), config.listen.require_uid.into());
        tasks.spawn_task(async move {
            if let Err(error) = run_socket::serve_run_socket(handle, gateway, server, uids).await {
                tracing::error!(%error, "cannot serve a run's socket");
            }
        });
        closing.calls.cancelled().await;
        // Who comes now is refused at once, instead of waiting in the backlog for nobody.
        drop(listener);
        held.runs.end_run_calls(&own).await;
        closing.quiet.cancel();
        flush_until(&own.run, &closing.records).await;
        held.close_run().await
    }
}

/// An open run. Whatever becomes of whoever has it, it is closed.
struct OpenRunGuard {
    runs: RunManager,
    run: String,
    stage: OpenRunStage,
    runtime: Handle,
}

enum OpenRunStage {
    Unserved,
    Served,
    Closed,
}

impl OpenRunGuard {
    async fn close_run(mut self) -> anyhow::Result<()> {
        self.stage = OpenRunStage::Closed;
        let closed = self.runs.close_run(&self.run).await;
        closed.map(|_| ()).with_context(|| format!("run `{}`", self.run))
    }
}

impl Drop for OpenRunGuard {
    fn drop(&mut self) {
        let run = &self.run;
        let closed = match self.stage {
            // At once: whoever could not go on with it looks at its records next.
            OpenRunStage::Unserved => self.runs.close_unserved_run(run),
            OpenRunStage::Served => {
                let _within = self.runtime.enter();
                self.runs.start_close(run).map(drop)
            }
            OpenRunStage::Closed => Ok(()),
        };
        if let Err(error) = closed {
            tracing::error!(run, "a run that is given up could not be closed: {error:#}");
        }
    }
}
