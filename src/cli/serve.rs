//! `cogni-gateway serve`: a service for agents, chats, runs and their costs over HTTP.

mod options;
mod reload;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Command};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::relay::RunSecrets;
use super::{flags, hide_env_values};
use crate::base::db::SqliteDatabase;
use crate::base::private_dir;
use crate::base::task_group::TaskGroup;
use crate::gateway::config::{ConfigSetting, SETTINGS};
use crate::gateway::process::{self, GatewayHost, ServerSignals};
use crate::relay::delivery::{DeliveryError, DeliveryService};
use crate::relay::git;
use crate::relay::repo;
use crate::runner;
use crate::runner::agents::availability::{AvailabilityCache, CACHE_TTL, HostCapabilities};
use crate::service::api::{
    ApiLimits, ApiListener, ApiState, GrantShareLimiter, GrantWorkLimiter, ProofCache,
};
use crate::service::auth::{self, GrantStore};
use crate::service::billing::{self, BillingStore};
use crate::service::runs::{RunService, RunServiceConfig, RunServiceDeps, StateDirLock};
use crate::service::store::{self, RunStore};
use crate::tools::approval::APPROVAL_SCHEMA;

pub use options::ServeOptions;

use reload::{ReconcileRunner, ServiceReloader};

/// Builds the command: its own flags, and one flag for each setting that is not about one run.
pub fn command() -> Command {
    Command::new("serve").about(ABOUT).defer(add_arguments)
}

fn add_arguments(command: Command) -> Command {
    // The description is set last, because the flags' type brings its own.
    let command = options::add_flags(
        command.after_help(AFTER_HELP).args(flags::flags_for(service_settings())),
    );
    hide_env_values(command)
        .about(ABOUT)
        .mut_arg("DRAIN_TIMEOUT_SECONDS", |arg| arg.help(flags::DRAIN_TIMEOUT_HELP))
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets runs end.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    flags::check_environment()?;
    let matches = matches.clone();
    let read = move || ServeOptions::load(&matches, |name| std::env::var(name).ok());
    let given = read()?;
    process::descriptors::raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(Box::pin(open_and_serve(given, read)));
    // Deliveries that git still works on are in the outbox, and the next process continues them.
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    served.map(|()| ExitCode::SUCCESS)
}

async fn open_and_serve(
    given: ServeOptions,
    read: impl Fn() -> anyhow::Result<ServeOptions>,
) -> anyhow::Result<()> {
    let serve = given.serve.clone();
    // A signal that arrives before the service is ready must not end a half-started service.
    let signals = ServerSignals::register_handlers()?;
    // The listener is bound before everything else: if another process has the address, this process must not touch
    // that process's records.
    let listener = ApiListener::bind_listener(&serve.listen)?;
    let metrics = given.config.metrics.address.map(process::bind_metrics).transpose()?;
    // The lock comes before the database: another process's state must not be migrated to another version.
    let lock = StateDirLock::acquire(&serve.state_directory()).await?;
    create_run_dir(&serve.run_dir)?;
    let host = GatewayHost::new(&given.config)?;
    let database = open_database(&serve.database_path(), &host)?;
    let billing_store = BillingStore::new(database.clone()).with_bound(serve.receipt_bound);
    let grants = GrantStore::new(database.clone());
    let parts = RunServiceDeps {
        lock,
        config: given.config.clone(),
        catalog: given.catalog.clone(),
        gateway_host: host.clone(),
        run_store: RunStore::new(database.clone()),
        grants: grants.clone(),
        billing: billing_store.clone(),
        relay: open_delivery_service(&given)?,
        // Without grants, every caller may have started the run, so no caller may answer.
        questions: (!serve.insecure_no_auth).then_some(database),
    };
    let settings = given.run_service_config()?;
    let machine = host_capabilities(&settings);
    let run_service = Box::pin(RunService::open(settings, parts)).await?;
    let api = Arc::new(ApiState {
        billing: billing_store.clone(),
        grants,
        anonymous_grant: serve.insecure_no_auth.then(|| Arc::new(ApiState::anonymous_grant())),
        run_service: run_service.clone(),
        availability: AvailabilityCache::new(machine, CACHE_TTL),
        metrics: Arc::clone(host.metrics()),
        watchers: GrantShareLimiter::new(serve.max_watchers, serve.max_connections),
        downloads: GrantShareLimiter::new(MAX_DOWNLOADS_PER_GRANT, MAX_DOWNLOADS),
        long_reads: GrantWorkLimiter::new(MAX_LONG_READS_PER_GRANT),
        proofs: ProofCache::new(proof_concurrency()),
        reports: GrantWorkLimiter::new(MAX_REPORTS_PER_GRANT).with_total_limit(MAX_REPORTS),
        limits: ApiLimits { connections: serve.max_connections, timeout: serve.request_timeout },
        tasks: TaskGroup::default(),
    });
    let stop = process::StopRequest::default();
    let common = (billing_store, Arc::clone(host.metrics()));
    let (reconcile_runner, litellm) =
        ReconcileRunner::new(common, &given.config, serve.reconcile_every)?;
    let reloader = ServiceReloader {
        options: &given,
        run_service: &run_service,
        gateway_host: &host,
        litellm,
    };
    // A failed reload changes nothing; the metrics report it.
    let reload = || {
        let done = read().and_then(|fresh| reloader.apply(fresh));
        host.metrics().set_reload_status(done.is_ok());
        done
    };
    // From here on signals are handled: TERM drains, HUP reloads.
    let signals = signals.handle_signals(stop.clone(), host.access_log(), reload);
    let service = RunningService {
        listener,
        metrics,
        gateway_host: host.clone(),
        run_service: run_service.clone(),
        api,
        reconcile_runner,
    };
    // `biased`: the end of the service is noticed before a further signal.
    tokio::select! {
        biased;
        served = service.run(stop, serve.drain_timeout) => served,
        never = signals => match never {},
    }
}

/// The parts of a service that run until shutdown.
struct RunningService {
    listener: ApiListener,
    metrics: Option<TcpListener>,
    gateway_host: GatewayHost,
    run_service: RunService,
    api: Arc<ApiState>,
    reconcile_runner: ReconcileRunner,
}

impl RunningService {
    async fn run(self, stop_request: process::StopRequest, grace: Duration) -> anyhow::Result<()> {
        let Self { listener, metrics, gateway_host, run_service, api, reconcile_runner } = self;
        // `stop` ends the background work only after the drain: until then runs need their bookkeeping.
        let (stop, tasks) = (CancellationToken::new(), api.tasks.clone());
        let metrics_address = metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        tracing::info!(
            address = listener.listen_address().map(tracing::field::display),
            socket = listener.socket_path().map(|path| tracing::field::display(path.display())),
            metrics = metrics_address.map(tracing::field::display),
            grants = api.anonymous_grant.is_none(),
            "ready"
        );
        let pages = gateway_host.metrics_pages();
        let scraped = async {
            let Some(metrics) = metrics else { return };
            crate::base::metrics::serve_pages(metrics, pages, stop.cancelled()).await;
        };
        // The order of the shutdown: 1. wait for the signal, 2. drain the runs, 3. stop the maintenance and the metrics
        // page, 4. give the API's answers some time.
        let ended = async {
            stop_request.shutdown.cancelled().await;
            tracing::info!(runs = run_service.live_count(), "draining");
            // During the drain the API still answers: `/readyz` reports the drain, and watchers receive the end of
            // their runs.
            run_service.drain(Instant::now() + grace, &stop_request.force).await;
            stop.cancel();
            tasks.shut_down(CLOSE_TIMEOUT).await;
        };
        let served = listener.serve_api(&api);
        let maintenance = run_service.run_maintenance(stop.clone());
        let (served, (), (), (), ()) =
            tokio::join!(served, scraped, maintenance, reconcile_runner.run(stop.clone()), ended);
        served.context("cannot serve the listener")?;
        // The runs' records are closed last, when no request can add to them.
        gateway_host.finish_all().await?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// Opens the relay. A service without git works without repositories, and refuses requests that name one. Every other
/// error must be corrected before the service starts.
fn open_delivery_service(given: &ServeOptions) -> anyhow::Result<Option<Arc<DeliveryService>>> {
    let keys = RunSecrets::from_config(&given.config);
    match given.relay.clone().open_service(|name| std::env::var(name).ok(), keys) {
        Ok(relay) => Ok(Some(Arc::new(relay))),
        // Only a missing or unsuitable git is tolerated.
        Err(error) if is_without_git(&error) => {
            tracing::warn!(
                "git is missing or too old; runs with a repository are refused: {error:#}"
            );
            Ok(None)
        }
        Err(error) => Err(error.context("the relay cannot be opened")),
    }
}

fn is_without_git(error: &anyhow::Error) -> bool {
    let without_git = |error: &_| {
        matches!(
            error,
            DeliveryError::Relay(repo::RepoError::Git(git::GitError::UnsupportedVersion { .. }))
        )
    };
    error.downcast_ref().is_some_and(without_git)
}

/// Opens the service's database. The host's metrics count the writes.
fn open_database(file: &Path, host: &GatewayHost) -> anyhow::Result<SqliteDatabase> {
    let schemas = [auth::GRANT_SCHEMA, store::SCHEMA, billing::SCHEMA, APPROVAL_SCHEMA];
    let writes = host.metrics().state_write_recorder();
    SqliteDatabase::open_with_commit_observer(file, &schemas, writes)
        .with_context(|| format!("cannot serve from `{}`", file.display()))
}

/// Creates the directory for the runs' directories. Other users may pass through the directory but not list it.
fn create_run_dir(run_dir: &Path) -> anyhow::Result<()> {
    let unusable = || format!("`serve.run_dir` is `{}`, which cannot be used", run_dir.display());
    private_dir::make(run_dir, 0o711).with_context(unusable)?;
    runner::check_run_dir(run_dir).with_context(unusable)
}

/// Returns what this machine offers to agents.
fn host_capabilities(settings: &RunServiceConfig) -> HostCapabilities {
    HostCapabilities {
        docker_socket: settings.host.docker_socket.clone(),
        driver: settings.driver,
        init: settings.host.init.clone(),
        may_be_unlimited: settings.allow_unlimited,
    }
}

/// Returns the number of concurrent proofs of audit logs. A proof occupies one processor. At most half of the processors
/// prove at the same time, so that the others stay free.
fn proof_concurrency() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).max(1)
}

fn service_settings() -> impl Iterator<Item = &'static ConfigSetting> {
    let is_here = |setting: &&ConfigSetting| !setting.is_per_run() && !setting.is_operator_only();
    SETTINGS.iter().filter(is_here).filter(|setting| setting.name != "WORKERS")
}

/// The maximum number of concurrent long reads, such as lists and proofs, of one grant. The database has four
/// connections for the long reads of all grants.
const MAX_LONG_READS_PER_GRANT: usize = 2;

/// The maximum number of files that are sent at the same time to one grant. Our choice: a client needs one.
const MAX_DOWNLOADS_PER_GRANT: usize = 4;
/// The maximum number of files that are sent at the same time to all grants. Our choice.
const MAX_DOWNLOADS: usize = 64;

/// The maximum number of cost reports that are received at the same time from one grant. A report may have 16 MiB.
const MAX_REPORTS_PER_GRANT: usize = 2;
/// The maximum number of cost reports that are received at the same time from all grants. Our choice.
const MAX_REPORTS: usize = 4;

/// The time for answers that are still being written after the last run has ended. Our choice.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

const ABOUT: &str = "Serve agents, chats and runs over HTTP, to clients with a grant";

const AFTER_HELP: &str = "\
The service's own settings are in the file's `[serve]`; all others are defaults of runs.

SIGTERM drains: `/readyz` reports it, no new run is accepted, and runs may end within
`serve.drain_timeout`. SIGHUP reads configuration, agents and the relay's files again, for new runs.

Example:
  cogni-gateway grant mint --name me --allow-sandbox --agent '*' --account acct-1
  cogni-gateway serve --litellm-host litellm:4000 --litellm-master-key-file /run/secrets/litellm";
