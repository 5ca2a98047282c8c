//! Many runs in one process, each on a socket of its own: what a service has in place of one [`App`](super::App) for
//! each.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::runs::flush_until;
use super::{By, Runs, Shutdown};
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
}

/// One run, whose socket is bound and whose log is open. Where it is dropped and not served, that blocks on the disk.
#[must_use = "whoever connects waits until it is served"]
pub struct Seat {
    held: Held,
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
        let config = Config { workers: 1, ..config.clone() };
        let target = Target {
            address: config.metrics.advertise.clone(),
            service: config.telemetry.service_name.clone(),
        };
        Ok(Self { runs: Runs::for_seats(&config, Drain::default())?, target })
    }

    /// Binds a run's socket and opens its log. Blocks on the disk; must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be bound, opened or compiled, or the run is open already.
    pub fn open(&self, config: Config) -> anyhow::Result<Seat> {
        // First: who finds another process on the socket must not touch its records.
        let listener = Listener::bind(&config.listen.socket_path, config.listen.permissions())?;
        let gateways = self.runs.open_seat(config.clone())?;
        let held = Held {
            runs: self.runs.clone(),
            run: config.identity.run.clone(),
            stage: Stage::Unserved,
            runtime: Handle::current(),
        };
        let gateway = Arc::clone(&gateways[0]);
        Ok(Seat { held, listener, gateway, config })
    }

    /// Puts other settings in force for runs that are opened from now on. Those that have the same rules and prices have
    /// them as they are read here.
    ///
    /// # Errors
    /// What cannot be compiled; nothing has changed.
    pub fn renew(&self, config: &Config) -> anyhow::Result<()> {
        self.runs.renew(By::Signal, config)
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
        Box::pin(self.serve_until(Shutdown::at_once(stop))).await
    }

    /// Serves as [`serve`](Self::serve) does, and ends in two steps.
    ///
    /// # Errors
    /// The listener could not be served, or the records not be closed.
    pub async fn serve_until(self, closing: Shutdown) -> anyhow::Result<()> {
        let Self { mut held, listener, gateway, config } = self;
        let own = Arc::clone(&gateway);
        let (handle, tasks) = (listener.accept_handle()?, gateway.tasks.clone());
        held.stage = Stage::Served;
        let (server, uids) = (Arc::new(config.server), config.listen.require_uid.into());
        tasks.spawn(async move {
            if let Err(error) = socket::serve(handle, gateway, server, uids).await {
                tracing::error!(%error, "cannot serve a run's socket");
            }
        });
        closing.calls.cancelled().await;
        // Who comes now is refused at once, instead of waiting in the backlog for nobody.
        drop(listener);
        held.runs.end_calls(&own).await;
        closing.quiet.cancel();
        flush_until(&own.run, &closing.records).await;
        held.close().await
    }
}

/// An open run. Whatever becomes of whoever has it, it is closed.
struct Held {
    runs: Runs,
    run: String,
    stage: Stage,
    runtime: Handle,
}

enum Stage {
    Unserved,
    Served,
    Closed,
}

impl Held {
    async fn close(mut self) -> anyhow::Result<()> {
        self.stage = Stage::Closed;
        let closed = self.runs.close(&self.run).await;
        closed.map(|_| ()).with_context(|| format!("run `{}`", self.run))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let run = &self.run;
        let closed = match self.stage {
            // At once: whoever could not go on with it looks at its records next.
            Stage::Unserved => self.runs.close_unserved(run),
            Stage::Served => {
                let _within = self.runtime.enter();
                self.runs.begin_closing(run).map(drop)
            }
            Stage::Closed => Ok(()),
        };
        if let Err(error) = closed {
            tracing::error!(run, "a run that is given up could not be closed: {error:#}");
        }
    }
}
