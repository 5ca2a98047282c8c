//! The composition root: builds bound sockets from a configuration, and from the sockets a server that drains.
//!
//! The process binds first, reports its addresses, and serves last. A part that cannot start therefore fails before any
//! client depends on the process.

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

/// The gateway of one run or of many runs, bound and ready to serve.
pub struct GatewayProcess {
    config: Box<GatewayConfig>,
    runs: RunManager,
    listener: GatewayListener,
    metrics_listener: Option<TcpListener>,
    tasks: TaskGroup,
}

impl GatewayProcess {
    /// Opens the logs and binds the sockets. Must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if a log cannot be opened, or a socket cannot be bound.
    pub fn build_process(config: GatewayConfig) -> anyhow::Result<Self> {
        // The runs come first: the listener opens the configured runs while it binds.
        let tasks = TaskGroup::default();
        let runs = RunManager::new(&config, tasks.clone())?;
        let front = GatewayListener::bind_listener(&config, &runs, &tasks)?;
        let metrics_listener = config.metrics.address.map(bind_metrics).transpose()?;
        let config = Box::new(config);
        Ok(Self { config, runs, listener: front, metrics_listener, tasks })
    }

    /// Returns the path of the run's socket; `None` if runs share a listener.
    pub fn socket_path(&self) -> Option<&Path> {
        self.listener.socket_path()
    }

    /// Returns the span for log lines about the run. The span is empty if runs share a listener.
    pub fn log_span(&self) -> tracing::Span {
        let run = self.socket_path().and_then(|_| self.runs.list_runs().pop());
        run.map_or_else(tracing::Span::none, |run| run.log_span())
    }

    /// Returns the address of the shared listener, with the port that the system chose for port 0. `None` if the
    /// process serves one run's socket.
    pub fn listen_address(&self) -> Option<SocketAddr> {
        self.listener.listen_address()
    }

    /// Returns the address of the metrics listener, with the port that the system chose for port 0.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    pub fn access_log(&self) -> Arc<access_log::AccessLog> {
        Arc::new(self.runs.access_log_handle().clone())
    }

    /// Returns the handle that opens, closes and changes runs while the process serves them.
    pub fn run_manager(&self) -> &RunManager {
        &self.runs
    }

    /// Returns a function that puts a configuration in force that was read again. The function changes the policy of
    /// all runs and, for a shared listener, its keys and certificates. After an error nothing has changed.
    pub fn config_reloader(
        &self,
    ) -> impl Fn(ChangeSource, anyhow::Result<GatewayConfig>) -> anyhow::Result<()> + Send + Sync + use<>
    {
        let (runs, renewal) = (self.runs.clone(), self.listener.tls_reloader());
        move |by, new_config| {
            let reload = |new_config| {
                // Everything that can fail comes first: reading keys and certificates, then the runs. `renew` cannot
                // fail.
                let renew = renewal(&new_config)?;
                runs.reload_runs(by, new_config)?;
                renew();
                Ok(())
            };
            let result = new_config.and_then(reload);
            // A configuration that could not even be read counts as a failed reload, too.
            runs.metrics().set_reload_status(result.is_ok());
            result
        }
    }

    /// Serves until `shutdown` is cancelled, lets open calls finish within the drain timeout, and closes the records.
    ///
    /// # Errors
    /// Returns an error if a listener cannot be served, or if an audit log cannot be closed.
    pub async fn serve_until_cancelled(self, shutdown: CancellationToken) -> anyhow::Result<()> {
        self.serve_in_two_steps(RunShutdown::single_step(shutdown)).await
    }

    /// Serves like [`serve_until_cancelled`](Self::serve_until_cancelled), but ends in two steps: first the calls, then
    /// the records.
    ///
    /// # Errors
    /// Returns an error if a listener cannot be served, or if an audit log cannot be closed.
    pub async fn serve_in_two_steps(mut self, closing: RunShutdown) -> anyhow::Result<()> {
        // The address is read before `serve_metrics` takes the listener.
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
        // 1. Serve. The workers run as tasks and threads; this task only waits for the end.
        let only = runs.first().filter(|_| self.socket_path().is_some()).cloned();
        drop(runs);
        closing.calls.cancelled().await;
        tracing::info!("draining");
        // 2. Close the listener. A client that connects now is refused at once, instead of waiting in a backlog that no
        // worker serves.
        drop(self.listener);
        // 3. Let open calls finish. This task is no member of the group, so it can wait for all of the group's tasks.
        let drained = self.tasks.shut_down(self.config.drain_timeout).await;
        if drained == ShutdownOutcome::Aborted {
            tracing::warn!(timeout = ?self.config.drain_timeout, "calls were still open and have been cut");
        }
        // 4. The other workers' threads end when the last task has ended. Joining blocks, so it must not run on this
        // thread.
        for worker in workers {
            let _ = tokio::task::spawn_blocking(move || worker.join()).await;
        }
        // 5. No call runs any more. The caller may still write records until it cancels `records`.
        closing.calls_ended.cancel();
        // The flush task of the run has ended with the group, so this task writes out the buffered records instead.
        if let Some(run) = only {
            background::flush_until(&run, &closing.records).await;
        }
        self.runs.finish_all().await?;
        tracing::info!("stopped");
        Ok(())
    }

    /// Starts the workers. The first worker is the current thread; the others have threads and runtimes of their own.
    fn start_workers(&self) -> io::Result<Vec<thread::JoinHandle<()>>> {
        let mut threads = vec![];
        for worker in 0..self.config.workers {
            let serving = self.listener.worker_future(worker)?;
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

/// The end of a run's gateway in two steps: first its calls, then its records. Between the steps the caller records the
/// result of the run's work, while the gateway no longer serves the run.
#[derive(Clone, Debug, Default)]
pub struct RunShutdown {
    /// Cancelled when no call may start any more. Open calls may finish within the drain timeout.
    pub calls: CancellationToken,
    /// Cancelled by the gateway when its listener is closed and the last call has ended.
    pub calls_ended: CancellationToken,
    /// Cancelled when the gateway may close the records.
    pub records: CancellationToken,
}

impl RunShutdown {
    /// Ends the calls and the records at the same time.
    pub fn single_step(shutdown: CancellationToken) -> Self {
        Self { calls: shutdown.clone(), records: shutdown, ..Self::default() }
    }
}

/// The operator's request that the process ends.
#[derive(Clone, Debug, Default)]
pub struct StopRequest {
    /// Cancelled by the first request: the process ends as soon as the work in progress has ended.
    pub shutdown: CancellationToken,
    /// Cancelled by the second request: the operator does not want to wait.
    pub force: CancellationToken,
}

impl StopRequest {
    fn request_stop(&self) {
        let token = if self.shutdown.is_cancelled() { &self.force } else { &self.shutdown };
        token.cancel();
    }
}

/// The signals that a process obeys. After the registration no such signal ends the process. A signal that arrives
/// before [`handle_signals`](Self::handle_signals) is remembered once.
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
    /// Returns an error if a handler cannot be installed.
    pub fn register_handlers() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            reopen: signal(SignalKind::user_defined1())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Obeys signals: stops the process, reopens the access log after a rotation, or reads the configuration again.
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
                    tracing::error!(%error, "cannot reopen the access log");
                },
                _ = self.hangup.recv() => if let Err(error) = reload() {
                    // The process goes on with the configuration in force. A bad file must not end a server.
                    tracing::error!("the reload has failed; the old configuration stays in force: {error:#}");
                },
            }
        }
    }
}

/// Serves on one worker. An error is logged, and the other workers go on.
async fn run_worker(serving: WorkerFuture) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "cannot serve the listener");
    }
}

/// Binds the listener for Prometheus. Must be called within a runtime.
///
/// # Errors
/// Returns an error if the address cannot be bound.
pub fn bind_metrics(address: SocketAddr) -> anyhow::Result<TcpListener> {
    listener::bind_tcp(address)
        .and_then(TcpListener::from_std)
        .with_context(|| format!("`METRICS_ADDR` is `{address}`, which cannot be bound"))
}

/// Starts a worker on a thread with a runtime of its own. The thread lives until all tasks of the group have ended.
fn start_thread(
    worker: usize,
    tasks: TaskGroup,
    serve: impl Future<Output = ()> + Send + 'static,
) -> io::Result<thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name(format!("worker-{worker}")).spawn(move || {
        runtime.block_on(async move {
            serve.await;
            // Calls of other tasks may still run on this runtime. Dropping the runtime would cut them.
            tasks.wait_ended().await;
        });
    })
}
