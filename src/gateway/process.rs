//! The composition root: a configuration becomes bound sockets, and those a service that drains.
//!
//! Bind first, serve later, and tell the address: what fails, fails before anyone depends on it.

mod background;
mod control;
pub mod descriptors;
mod host;
mod listener;
mod run_audit;
mod run_manager;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::base;
use crate::base::metrics::HttpPage;
use crate::base::metrics::discovery::ScrapeTarget;
use crate::base::task_group::{ShutdownOutcome, TaskGroup};
use crate::gateway::config::GatewayConfig;
use crate::telemetry::access_log;

pub use control::{ChangeSource, ServedRunHandle, compile_policy};
pub use host::{GatewayHost, HostedGateway};
pub use run_manager::{RunClosingState, RunManager};

use listener::{GatewayListener, WorkerFuture};

/// One run's gateway or that of many, bound and ready to serve.
pub struct GatewayProcess {
    config: Box<GatewayConfig>,
    runs: RunManager,
    front: GatewayListener,
    metrics_listener: Option<TcpListener>,
    tasks: TaskGroup,
}

impl GatewayProcess {
    /// Opens the logs and binds the sockets. Must be called within a runtime.
    ///
    /// # Errors
    /// What cannot be opened or bound, and why.
    pub fn build_process(config: GatewayConfig) -> anyhow::Result<Self> {
        let tasks = TaskGroup::default();
        let runs = RunManager::new(&config, tasks.clone())?;
        let front = GatewayListener::bind_listener(&config, &runs, &tasks)?;
        let metrics_listener = config.metrics.address.map(bind_metrics).transpose()?;
        let config = Box::new(config);
        Ok(Self { config, runs, front, metrics_listener, tasks })
    }

    /// The run's socket, where the process has one run.
    pub fn socket_path(&self) -> Option<&Path> {
        self.front.socket_path()
    }

    /// What log lines are within, where the process has one run.
    pub fn log_span(&self) -> tracing::Span {
        let run = self.socket_path().and_then(|_| self.runs.list_runs().pop());
        run.map_or_else(tracing::Span::none, |run| run.log_span())
    }

    /// Where runs share a listener, with the port that was chosen for port 0.
    pub fn listen_address(&self) -> Option<SocketAddr> {
        self.front.listen_address()
    }

    /// Where metrics are served, with the port that was chosen for port 0.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    pub fn access_log(&self) -> Arc<access_log::AccessLog> {
        Arc::new(self.runs.access_log_handle().clone())
    }

    /// To open, close and change runs while they are served.
    pub fn run_manager(&self) -> &RunManager {
        &self.runs
    }

    /// Puts a configuration in force that was read again: what runs are judged by, and where they share a
    /// listener its keys and certificates. After an error nothing has changed.
    pub fn config_reloader(
        &self,
    ) -> impl Fn(ChangeSource, anyhow::Result<GatewayConfig>) -> anyhow::Result<()> + Send + Sync + use<>
    {
        let (runs, renewal) = (self.runs.clone(), self.front.tls_reloader());
        move |by, fresh| {
            let reload = |fresh| {
                let renew = renewal(&fresh)?;
                runs.reload_runs(by, fresh)?;
                renew();
                Ok(())
            };
            let done = fresh.and_then(reload);
            runs.metrics().set_reload_status(done.is_ok());
            done
        }
    }

    /// Serves until `shutdown`, lets open calls finish within the drain timeout, and closes the records.
    ///
    /// # Errors
    /// A listener could not be served, or an audit log not be closed.
    pub async fn serve_until_cancelled(self, shutdown: CancellationToken) -> anyhow::Result<()> {
        self.serve_in_two_steps(RunShutdown::single_step(shutdown)).await
    }

    /// Serves as [`serve`](Self::serve_until_cancelled) does, and ends in two steps.
    ///
    /// # Errors
    /// A listener could not be served, or an audit log not be closed.
    pub async fn serve_in_two_steps(mut self, closing: RunShutdown) -> anyhow::Result<()> {
        let metrics = self.metrics_address().map(tracing::field::display);
        self.serve_metrics();
        let workers = self.start_workers()?;
        let runs = self.runs.list_runs();
        tracing::info!(
            run = runs.first().filter(|_| self.socket_path().is_some()).map(|run| &*run.identity.run),
            socket = self.socket_path().map(|path| tracing::field::display(path.display())),
            address = self.listen_address().map(tracing::field::display),
            runs = runs.len(),
            metrics,
            upstream = %self.config.upstream.url,
            "ready"
        );
        let only = runs.first().filter(|_| self.socket_path().is_some()).cloned();
        drop(runs);
        closing.calls.cancelled().await;
        tracing::info!("draining");
        // Who comes now is refused at once, instead of waiting in the backlog for nobody.
        drop(self.front);
        let drained = self.tasks.shut_down(self.config.drain_timeout).await;
        if drained == ShutdownOutcome::Cut {
            tracing::warn!(timeout = ?self.config.drain_timeout, "calls were still open and have been cut");
        }
        for worker in workers {
            let _ = tokio::task::spawn_blocking(move || worker.join()).await;
        }
        closing.quiet.cancel();
        if let Some(run) = only {
            background::flush_until(&run, &closing.records).await;
        }
        self.runs.finish_all().await?;
        tracing::info!("stopped");
        Ok(())
    }

    /// The first worker is the current thread; the others have threads and runtimes of their own.
    fn start_workers(&self) -> io::Result<Vec<thread::JoinHandle<()>>> {
        let mut threads = vec![];
        for worker in 0..self.config.workers {
            let serving = self.front.worker_future(worker)?;
            if worker == 0 {
                self.tasks.spawn_task(run_worker(serving));
            } else {
                threads.push(start_thread(worker, self.tasks.clone(), run_worker(serving))?);
            }
        }
        Ok(threads)
    }

    fn serve_metrics(&mut self) {
        let Some(listener) = self.metrics_listener.take() else { return };
        let runs = self.runs.clone();
        let target = ScrapeTarget {
            address: self.config.metrics.advertise.clone(),
            service: self.config.telemetry.service_name.clone(),
        };
        let pages = vec![
            HttpPage::metrics_page(move || runs.render_metrics()),
            HttpPage::discovery_page(target),
        ];
        let closing = self.tasks.shutdown_token().clone();
        self.tasks.spawn_task(async move {
            base::metrics::serve_pages(listener, pages, closing.cancelled()).await;
        });
    }
}

/// The end of a run's gateway in two steps: first its calls, then its records. What becomes of the run's work is written
/// to them in between, while nothing of the run's is served any more.
#[derive(Clone, Debug, Default)]
pub struct RunShutdown {
    /// Cancelled when no call may begin any more; open calls may end within the drain timeout.
    pub calls: CancellationToken,
    /// Cancelled by the gateway, when its listener is closed and the last call has ended.
    pub quiet: CancellationToken,
    /// Cancelled when the records may be closed.
    pub records: CancellationToken,
}

impl RunShutdown {
    /// Ends both at the same time.
    pub fn single_step(shutdown: CancellationToken) -> Self {
        Self { calls: shutdown.clone(), records: shutdown, ..Self::default() }
    }
}

/// That somebody wants the process to end.
#[derive(Clone, Debug, Default)]
pub struct StopRequest {
    /// As soon as what is under way has ended.
    pub shutdown: CancellationToken,
    /// They have asked again, and do not want to wait.
    pub hurry: CancellationToken,
}

impl StopRequest {
    fn request_stop(&self) {
        let asked = if self.shutdown.is_cancelled() { &self.hurry } else { &self.shutdown };
        asked.cancel();
    }
}

/// The signals that a process obeys. From the registration on, none of them ends the process, and each that comes before
/// [`obey`](Self::handle_signals) is remembered once.
#[derive(Debug)]
pub struct ServerSignals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
    reopen: Signal,
    hangup: Signal,
}

impl ServerSignals {
    /// Registers the handlers. Must be called within a runtime, and before anything that takes time.
    ///
    /// # Errors
    /// A handler cannot be installed.
    pub fn register_handlers() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            reopen: signal(SignalKind::user_defined1())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Turns signals into what they ask for: to stop, to open the logs anew after a rotation, or to read the
    /// configuration again.
    pub async fn handle_signals(
        mut self,
        stop: StopRequest,
        access_log: Arc<access_log::AccessLog>,
        reload: impl Fn() -> anyhow::Result<()>,
    ) -> Infallible {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => stop.request_stop(),
                _ = self.interrupt.recv() => stop.request_stop(),
                _ = self.quit.recv() => stop.request_stop(),
                _ = self.reopen.recv() => if let Err(error) = access_log.reopen_file() {
                    tracing::error!(%error, "cannot open the access log anew");
                },
                _ = self.hangup.recv() => if let Err(error) = reload() {
                    tracing::error!("nothing has changed: {error:#}");
                },
            }
        }
    }
}

async fn run_worker(serving: WorkerFuture) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "cannot serve the listener");
    }
}

/// Binds the listener that Prometheus scrapes at. Must be called within a runtime.
///
/// # Errors
/// It cannot be bound.
pub fn bind_metrics(address: SocketAddr) -> anyhow::Result<TcpListener> {
    listener::bind_tcp(address)
        .and_then(TcpListener::from_std)
        .with_context(|| format!("`METRICS_ADDR` is `{address}`, which cannot be bound"))
}

/// A worker with a runtime of its own, which lives until all tasks have ended.
fn start_thread(
    worker: usize,
    tasks: TaskGroup,
    serve: impl Future<Output = ()> + Send + 'static,
) -> io::Result<thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name(format!("worker-{worker}")).spawn(move || {
        runtime.block_on(async move {
            serve.await;
            tasks.wait_ended().await;
        });
    })
}
