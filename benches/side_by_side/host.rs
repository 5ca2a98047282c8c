//! One process that serves many runs, as a runner with the gateways of its sandboxes is.
//!
//! Each run has its own socket, ledger, audit log and headers; the upstream's connections, the metrics and the access
//! log belong to the process. If the machine allows too few open files for one audit log per run, only the runs that
//! will stream have one.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::limits::{ProcessCapacity, RunCapacity};
use cogni_gateway::gateway::pipeline::policy::{self, GatewayPolicy};
use cogni_gateway::gateway::pipeline::{RunGateway, server};
use cogni_gateway::gateway::run::AgentRun;
use cogni_gateway::gateway::upstream::UpstreamClient;
use cogni_gateway::gateway::upstream::headers::InjectedHeaders;
use cogni_gateway::llm::budget::{BudgetLedger, PriceTable, PriorUsage, Tokens};
use cogni_gateway::telemetry::access_log;
use cogni_gateway::telemetry::audit::{self, records::RunStartedRecord};
use cogni_gateway::telemetry::metrics::MetricsRegistry;
use tokio::sync::Semaphore;

use crate::meter;
use crate::subject::{ACCOUNT, KEY, METADATA};

/// The path of a run's socket.
pub(crate) fn socket_path(dir: &Path, run: usize) -> PathBuf {
    dir.join(format!("{run}/llm.sock"))
}

/// Returns which runs have an audit log: every run, or every `stride`th run if few files may be open.
pub(crate) fn audit_stride(runs: usize, stride: usize) -> Result<usize> {
    Ok(if 2 * runs + SPARE <= meter::allowed_files()? { 1 } else { stride })
}

/// Serves `runs` sockets in `dir` in front of the provider on `port`, until stdin is closed. One run in `stride` will
/// stream.
pub(crate) fn serve(dir: &Path, runs: usize, stride: usize, port: u16) -> Result<()> {
    let audited = audit_stride(runs, stride)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let tasks = TaskGroup::default();
        let host = RunHost::new(dir, port, tasks.clone())?;
        let bind = |run: usize| host.bind(run, run.is_multiple_of(audited));
        let served: Vec<_> = (0..runs).map(bind).collect::<Result<_>>()?;
        writeln!(io::stdout(), "ready")?;
        let closing = tasks.shutdown_token().clone();
        thread::spawn(move || {
            let _ended = io::stdin().read_to_end(&mut vec![]);
            closing.cancel();
        });
        let mut ticks = tokio::time::interval(FLUSH_INTERVAL);
        while tasks.shutdown_token().run_until_cancelled(ticks.tick()).await.is_some() {
            for run in &served {
                run.audit.flush_buffered();
            }
            host.metrics.remove_due_runs(Instant::now());
        }
        tasks.shut_down(Duration::from_secs(1)).await;
        Ok(())
    })
}

/// The parts of the process that all runs share.
struct RunHost {
    dir: PathBuf,
    config: GatewayConfig,
    policy: Arc<policy::PolicyConfig>,
    prices: Arc<PriceTable>,
    server: Arc<server::HttpServerConfig>,
    upstream: Arc<UpstreamClient>,
    metrics: MetricsRegistry,
    access_log: access_log::AccessLog,
    tasks: TaskGroup,
}

impl RunHost {
    fn new(dir: &Path, port: u16, tasks: TaskGroup) -> Result<Self> {
        let mut config = GatewayConfig::default();
        ACCOUNT.clone_into(&mut config.identity.account);
        config.identity.metadata = serde_json::from_str(METADATA)?;
        config.upstream.api_key = SecretString::new(KEY);
        config.upstream.url = format!("127.0.0.1:{port}").parse().ok().context("not an address")?;
        config.budget.max_turns = Some(1_000_000_000);
        config.budget.max_total_tokens = Some(Tokens(1_000_000_000_000));
        config.access_log = access_log::AccessLogDestination::File(dir.join("access.log"));
        let no_run = access_log::AccessLogIdentity { run: "-", attempt: "-" };
        Ok(Self {
            dir: dir.to_owned(),
            server: Arc::new(config.server.clone()),
            upstream: Arc::new(UpstreamClient::new(&config.upstream)?),
            metrics: MetricsRegistry::new(config.upstream.kind.name())?,
            access_log: access_log::AccessLog::open_log(&config.access_log, &no_run)?,
            policy: Arc::new(config.policy.clone()),
            prices: Arc::new(PriceTable::load_table(&config.prices)?),
            config,
            tasks,
        })
    }

    /// Binds one run's socket and serves it.
    fn bind(&self, number: usize, is_audited: bool) -> Result<Arc<AgentRun>> {
        let GatewayConfig { identity, upstream, budget, audit, .. } = &self.config;
        let socket = socket_path(&self.dir, number);
        fs::create_dir(socket.parent().context("a socket lies in a directory")?)?;
        // The library's own listener is not used, because it holds a second descriptor.
        let listener = UnixListener::bind(&socket)?;
        listener.set_nonblocking(true)?;
        let mut identity = identity.clone();
        identity.run = format!("run-{number}");
        let started = RunStartedRecord {
            run: identity.run.clone(),
            attempt: identity.attempt.clone(),
            account: identity.account.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            policy: String::new(),
            prices: String::new(),
            upstream: "litellm",
            trace: None,
        };
        let path = is_audited.then(|| socket.with_file_name("audit.jsonl"));
        let (log, recovered) =
            audit::AuditLog::open_log(&audit::AuditConfig { path, ..audit.clone() }, &started)?;
        let line = access_log::AccessLogIdentity { run: &identity.run, attempt: &identity.attempt };
        let access_log = Arc::new(self.access_log.for_run(&line));
        let policy = GatewayPolicy {
            config: Arc::clone(&self.policy),
            rules: Arc::default(),
            prices: Arc::clone(&self.prices),
            injected_headers: Arc::new(InjectedHeaders::new(
                upstream,
                &identity,
                &self.policy.headers,
            )?),
        };
        let (spent, age) = (recovered.spent, recovered.age);
        let past = PriorUsage { spent, age, ..PriorUsage::default() };
        let ledger = BudgetLedger::new(budget.clone(), past);
        let run = Arc::new(AgentRun::new(identity, ledger, log));
        let gateway = Arc::new(RunGateway {
            policy: Arc::new(policy::SharedPolicy::from_pointee(policy)),
            upstream: Arc::clone(&self.upstream),
            metrics: self.metrics.run_metrics(&run.identity.run, &run.ledger),
            access_log,
            slots: Arc::new(Semaphore::new(self.server.max_connections)),
            capacity: Arc::new(RunCapacity::new(
                &self.server,
                self.server.max_requests,
                Arc::new(ProcessCapacity::new(&self.server, u64::MAX, true)),
            )),
            tasks: self.tasks.clone(),
            tools: None,
            run: Arc::clone(&run),
        });
        let serve = server::run_socket::serve_run_socket(
            listener,
            gateway,
            Arc::clone(&self.server),
            Arc::default(),
        );
        self.tasks.spawn_task(async move {
            if let Err(error) = serve.await {
                let _no_reader = writeln!(io::stderr(), "cannot serve a socket: {error}");
            }
        });
        Ok(run)
    }
}

/// The files of a thousand streams, each with a client and an upstream, and of the process itself.
const SPARE: usize = 3000;
/// The interval, which is that of `cogni-gateway proxy`.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
