//! Many runs in one process, each on a socket of its own: what a service has in place of one [`App`](super::App) for
//! each.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use tokio_util::sync::CancellationToken;

use super::Runs;
use crate::base::drain::Drain;
use crate::base::metrics::Page;
use crate::base::metrics::discovery::Target;
use crate::base::unix::Listener;
use crate::config::Config;
use crate::gateway::Gateway;
use crate::gateway::server::socket;
use crate::observe::access_log;
use crate::observe::metrics::Metrics;
use crate::run::Run;

/// Where runs get their gateways. They share its upstream connections, metrics and access log; each has its own
/// policy, budget and records. Clones are the same.
#[derive(Clone)]
pub struct Seats {
    runs: Runs,
    target: Target,
    tasks: Drain,
}

/// One run, whose socket is bound and whose log is open.
#[must_use = "whoever connects waits until it is served"]
pub struct Seat {
    runs: Runs,
    listener: Listener,
    gateway: Arc<Gateway>,
    config: Config,
}

impl Seats {
    /// For runs whose settings begin with these. Must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be opened or compiled.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let tasks = Drain::default();
        let config = Config { workers: 1, ..config.clone() };
        let target = Target {
            address: config.metrics.advertise.clone(),
            service: config.telemetry.service_name.clone(),
        };
        Ok(Self { runs: Runs::for_seats(&config, tasks.clone())?, target, tasks })
    }

    /// Binds a run's socket and opens its log. Blocks on the disk; must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be bound, opened or compiled, or the run is open already.
    pub fn open(&self, config: Config) -> anyhow::Result<Seat> {
        // First: who finds another process on the socket must not touch its records.
        let listener = Listener::bind(&config.listen.socket_path, config.listen.permissions())?;
        let gateways = self.runs.open_seat(config.clone())?;
        let gateway = Arc::clone(&gateways[0]);
        Ok(Seat { runs: self.runs.clone(), listener, gateway, config })
    }

    /// Closes the records of a run whose process has ended without doing so: what was open is settled as it is after
    /// any crash.
    ///
    /// # Errors
    /// They cannot be opened or closed, or the run is open here.
    pub async fn finish_abandoned(&self, config: Config) -> anyhow::Result<()> {
        let (run, runs) = (config.identity.run.clone(), self.runs.clone());
        tokio::task::spawn_blocking(move || runs.open_seat(config)).await??;
        self.runs.close(&run).await?;
        Ok(())
    }

    /// To look at the open runs, and change them.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// Of all runs, and of the process.
    pub fn metrics(&self) -> &Arc<Metrics> {
        self.runs.metrics()
    }

    /// What Prometheus may ask for.
    pub fn pages(&self) -> Vec<Page> {
        let runs = self.runs.clone();
        vec![Page::metrics(move || runs.scrape()), Page::discovery(self.target.clone())]
    }

    /// Of all runs, to be opened anew after a rotation.
    pub fn access_log(&self) -> Arc<access_log::Log> {
        Arc::new(self.runs.access_log().clone())
    }

    /// Sends out what was measured and logged, when all runs have ended.
    ///
    /// # Errors
    /// The records of a run that had not ended could not be closed.
    pub async fn finish(&self) -> anyhow::Result<()> {
        self.runs.finish().await
    }

    /// For what runs beside the runs, and ends with the process.
    pub fn tasks(&self) -> &Drain {
        &self.tasks
    }
}

impl fmt::Debug for Seats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seats").finish_non_exhaustive()
    }
}

impl Seat {
    pub fn run(&self) -> &Arc<Run> {
        &self.gateway.run
    }

    pub fn socket(&self) -> &Path {
        self.listener.path()
    }

    /// Serves until `stop`, lets open calls finish within the drain timeout, and closes the run's records.
    ///
    /// # Errors
    /// The listener could not be served, or the records not be closed.
    pub async fn serve(self, stop: CancellationToken) -> anyhow::Result<()> {
        let Self { runs, listener, gateway, config } = self;
        let (handle, tasks) = (listener.accept_handle()?, gateway.tasks.clone());
        let (server, uids) = (Arc::new(config.server), config.listen.require_uid.into());
        let run = gateway.run.identity.run.clone();
        tasks.spawn(async move {
            if let Err(error) = socket::serve(handle, gateway, server, uids).await {
                tracing::error!(%error, "cannot serve a run's socket");
            }
        });
        stop.cancelled().await;
        // Who comes now is refused at once, instead of waiting in the backlog for nobody.
        drop(listener);
        runs.close(&run).await.map(|_| ()).with_context(|| format!("run `{run}`"))
    }
}
