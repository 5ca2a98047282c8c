//! The composition root: a configuration becomes bound sockets, and those a service that drains.
//!
//! Bind first, serve later, and tell the address: what fails, fails before anyone depends on it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::audit::record::Started;
use crate::audit::{self, Recovered};
use crate::base::drain::{Drain, Drained};
use crate::base::unix::Listener;
use crate::budget::Ledger;
use crate::config::Config;
use crate::gateway::access_log;
use crate::gateway::headers::Overwrites;
use crate::gateway::metrics::Metrics;
use crate::gateway::upstream::Upstream;
use crate::gateway::{Gateway, server};
use crate::run::Run;

/// One run's gateway, bound and ready to serve.
pub struct App {
    config: Config,
    run: Arc<Run>,
    listener: Listener,
    metrics: Arc<Metrics>,
    metrics_listener: Option<TcpListener>,
    access_log: Arc<access_log::Log>,
    overwrites: Arc<Overwrites>,
    /// One for each worker.
    upstreams: Vec<Upstream>,
    tasks: Drain,
}

impl App {
    /// Opens the logs and binds the sockets. Must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be opened or bound, and why.
    pub fn build(config: Config) -> anyhow::Result<Self> {
        let overwrites =
            Overwrites::new(&config.upstream, &config.identity, &config.policy.headers)?;
        let upstreams = (0..config.workers)
            .map(|_| Upstream::new(&config.upstream))
            .collect::<io::Result<_>>()
            .context("the upstream's authorities cannot be loaded")?;
        let listener = Listener::bind(&config.listen.socket_path, config.listen.permissions())?;
        let (audit, recovered) = open_audit(&config)?;
        let ledger = Ledger::new(config.budget.clone(), recovered.spent);
        let run = Arc::new(Run::new(config.identity.clone(), ledger, audit));
        let identity =
            access_log::Identity { run: &config.identity.run, attempt: &config.identity.attempt };
        let access_log = Arc::new(access_log::Log::open(&config.access_log, &identity)?);
        let metrics = Arc::new(Metrics::new(config.upstream.kind.name())?);
        let metrics_listener = config.metrics.address.map(bind_metrics).transpose()?;
        Ok(Self {
            config,
            run,
            listener,
            metrics,
            metrics_listener,
            access_log,
            overwrites: Arc::new(overwrites),
            upstreams,
            tasks: Drain::default(),
        })
    }

    pub fn socket(&self) -> &Path {
        self.listener.path()
    }

    /// Where metrics are served, with the port that was chosen for port 0.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    pub fn access_log(&self) -> Arc<access_log::Log> {
        Arc::clone(&self.access_log)
    }

    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// Serves until `shutdown`, lets open calls finish within the drain timeout, and closes the records.
    ///
    /// # Errors
    /// The socket could not be served, or the audit log not be closed.
    pub async fn serve(mut self, shutdown: CancellationToken) -> anyhow::Result<()> {
        let metrics = self.metrics_address().map(tracing::field::display);
        self.start_chores();
        let workers = self.start_workers()?;
        tracing::info!(
            run = self.run.identity.run,
            socket = %self.listener.path().display(),
            metrics,
            upstream = %self.config.upstream.url,
            "ready"
        );
        shutdown.cancelled().await;
        tracing::info!("draining");
        // Who comes now is refused at once, instead of waiting in the backlog for nobody.
        drop(self.listener);
        let drained = self.tasks.finish(self.config.drain_timeout).await;
        if drained == Drained::Cut {
            tracing::warn!(timeout = ?self.config.drain_timeout, "calls were still open and have been cut");
        }
        for worker in workers {
            let _ = tokio::task::spawn_blocking(move || worker.join()).await;
        }
        self.access_log.flush();
        self.run.finish().context("the audit log could not be closed")?;
        tracing::info!("stopped");
        Ok(())
    }

    /// The first worker is the current thread; the others have threads and runtimes of their own.
    fn start_workers(&mut self) -> io::Result<Vec<thread::JoinHandle<()>>> {
        let server = Arc::new(self.config.server.clone());
        let mut threads = vec![];
        for (worker, upstream) in std::mem::take(&mut self.upstreams).into_iter().enumerate() {
            let gateway = Arc::new(self.gateway(upstream));
            let listener = self.listener.accept_handle()?;
            let (server, tasks) = (Arc::clone(&server), self.tasks.clone());
            let serve = async move {
                if let Err(error) = server::serve(listener, gateway, server).await {
                    tracing::error!(%error, "cannot serve the socket");
                }
            };
            if worker == 0 {
                self.tasks.spawn(serve);
            } else {
                threads.push(start_thread(worker, tasks, serve)?);
            }
        }
        Ok(threads)
    }

    fn gateway(&self, upstream: Upstream) -> Gateway {
        Gateway {
            run: Arc::clone(&self.run),
            policy: Arc::new(self.config.policy.clone()),
            overwrites: Arc::clone(&self.overwrites),
            upstream: Arc::new(upstream),
            metrics: self.metrics.run(&self.run.identity.run, &self.run.ledger),
            access_log: Arc::clone(&self.access_log),
            tasks: self.tasks.clone(),
        }
    }

    /// Writes out what is buffered, and serves the metrics.
    fn start_chores(&mut self) {
        let (run, access_log, metrics) =
            (Arc::clone(&self.run), self.access_log(), Arc::clone(&self.metrics));
        let (flushed, closing) = (Arc::clone(&run), self.tasks.closing().clone());
        self.tasks.spawn(async move {
            let flush = async {
                loop {
                    flushed.audit.unflushed().await;
                    tokio::time::sleep(FLUSH_INTERVAL).await;
                    flushed.audit.flush();
                }
            };
            closing.run_until_cancelled(flush).await;
        });
        let Some(listener) = self.metrics_listener.take() else { return };
        let metered = metrics.run(&run.identity.run, &run.ledger);
        let scrape = move || {
            metered.audit_lag(&run.audit.lag());
            metrics.access_log_lost(access_log.lost());
            metrics.sweep(Instant::now());
            metrics.render()
        };
        let closing = self.tasks.closing().clone();
        self.tasks.spawn(async move {
            crate::base::metrics::serve(listener, scrape, closing.cancelled()).await;
        });
    }
}

/// Turns signals into what they ask for: to stop, or to open the logs anew after a rotation.
///
/// # Errors
/// A handler cannot be installed.
pub fn signals(
    shutdown: CancellationToken,
    access_log: Arc<access_log::Log>,
) -> io::Result<impl Future<Output = std::convert::Infallible>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    let mut reopen = signal(SignalKind::user_defined1())?;
    Ok(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => shutdown.cancel(),
                _ = interrupt.recv() => shutdown.cancel(),
                _ = quit.recv() => shutdown.cancel(),
                _ = reopen.recv() => if let Err(error) = access_log.reopen() {
                    tracing::error!(%error, "cannot open the access log anew");
                },
            }
        }
    })
}

fn open_audit(config: &Config) -> anyhow::Result<(audit::Log, Recovered)> {
    let started = Started {
        run: config.identity.run.clone(),
        attempt: config.identity.attempt.clone(),
        account: config.identity.account.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy: config.digest(),
    };
    let (log, recovered) = audit::Log::open(&config.audit, &started)?;
    if recovered.resumed {
        tracing::info!(spent = ?recovered.spent, crashed = recovered.crashed, torn_bytes = recovered.torn_bytes, "resumed the audit log");
    }
    Ok((log, recovered))
}

fn bind_metrics(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let bind = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    };
    bind().with_context(|| format!("`METRICS_ADDR` is `{address}`, which cannot be bound"))
}

/// A worker with a runtime of its own, which lives until all tasks have ended.
fn start_thread(
    worker: usize,
    tasks: Drain,
    serve: impl Future<Output = ()> + Send + 'static,
) -> io::Result<thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name(format!("worker-{worker}")).spawn(move || {
        runtime.block_on(async move {
            serve.await;
            tasks.ended().await;
        });
    })
}

/// How late a record or a line may reach the kernel when nothing pushes it out before.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
