//! The runs of a service: accepted, started, watched and brought to a definite end, whatever happens to the process.
//!
//! Reading order: [`submission`] is what somebody asks for; [`admission`] says yes or no; [`execute`] takes one run from its
//! row to its end, with what the agent says turned into events by [`agent_events`] and what its calls come to by [`usage_recorder`];
//! [`recovery`] does for another process's runs what that process cannot do any more, and [`resume_deliveries`] what it was
//! about to.
//!
//! **Invariant:** a run that was accepted is in the journal, and ends there exactly once. Before it does, what is in its
//! log of its calls is in the books.
//!
//! **Invariant:** one process has the state directory, so that nobody else begins or ends its runs.

mod admission;
mod agent_events;
mod execute;
mod log_seal;
mod masking;
mod outcome;
mod recovery;
mod resume_deliveries;
mod retention;
mod retention_clock;
mod standing;
mod state_dir_lock;
pub mod submission;
mod upstream_models;
mod usage_recorder;
mod warm_pools;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::base::path_mask::PathMask;
use crate::base::secret::SecretString;
use crate::base::task_group::TaskGroup;
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::GatewayHost;
use crate::relay::delivery::DeliveryService;
use crate::runner::agents::AgentCatalog;
use crate::runner::branch_delivery::recover_all;
use crate::runner::long_running::workspace_store::{
    self, PruneOutcome, StoredWorkspace, WorkspaceStore,
};
use crate::runner::long_running::{self, LongRunningPool};
use crate::runner::sweep::LeftoverSweeper;
use crate::runner::{DriverChoice, HostEnvironment};
use crate::service::auth::GrantStore;
use crate::service::billing::BillingStore;
use crate::service::store::RunStore;
use crate::telemetry::audit::{AuditPublicKey, AuditSigningKey};

pub use admission::{AcceptedRun, RunStartError, RunStartOptions};
pub use standing::ServiceStatus;
pub use state_dir_lock::StateDirLock;
pub use submission::RunSubmission;

use retention_clock::RetentionClock;
use standing::CachedServiceStatus;
use upstream_models::UpstreamModelCache;
use warm_pools::WarmPools;

/// What a service does its work with. Clones are the same.
#[derive(Clone)]
pub struct RunService(Arc<RunServiceInner>);

/// Where a service has its runs, and how many.
#[derive(Clone, Debug)]
pub struct RunServiceConfig {
    /// The journal, audit logs and what the relay keeps. Nothing in it is ever shown to a sandbox.
    pub state_dir: PathBuf,
    /// Where runs have their directories, which go with them; and what sandboxes are made with.
    pub host: HostEnvironment,
    /// For agents that do not say.
    pub driver: DriverChoice,
    /// Whether the embedded driver may do without limits on memory, processes and processors.
    pub allow_unlimited: bool,
    /// More at once are refused.
    pub max_runs: usize,
    /// Between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// How long runs that have ended are remembered.
    pub retention: Duration,
    /// How long a resident's workspace is kept that nobody uses.
    pub workspace_retention: Duration,
    /// How long audit logs are kept; for ever where nobody says.
    pub audit_retention: Option<Duration>,
    /// How long the books keep the calls of runs that are forgotten; for ever where nobody says.
    pub billing_retention: Option<Duration>,
    /// What audit logs are signed with, for as long as the service runs.
    pub signing_key: SecretString,
}

/// What the supervisor composes.
pub struct RunServiceDeps {
    /// The state directory's, taken before anything in it is opened.
    pub lock: StateDirLock,
    /// The gateway's settings; who a run is, and what it may spend, is said for each.
    pub config: GatewayConfig,
    pub catalog: AgentCatalog,
    pub seats: GatewayHost,
    pub journal: RunStore,
    pub grants: GrantStore,
    pub books: BillingStore,
    /// Without one, no run has a repository.
    pub relay: Option<Arc<DeliveryService>>,
}

struct RunServiceInner {
    settings: RunServiceConfig,
    /// The other half of its signing key.
    public_key: AuditPublicKey,
    config: ArcSwap<GatewayConfig>,
    catalog: ArcSwap<AgentCatalog>,
    seats: GatewayHost,
    journal: RunStore,
    grants: GrantStore,
    books: BillingStore,
    relay: ArcSwapOption<DeliveryService>,
    /// The paths of this machine, which are not told to callers.
    path_mask: ArcSwap<PathMask>,
    residents: LongRunningPool,
    stock: WarmPools,
    models: UpstreamModelCache,
    standing: CachedServiceStatus,
    places: Arc<Semaphore>,
    /// For runs that wait for another one of their resident sandbox, and have no place meanwhile.
    waits: Semaphore,
    live: Mutex<HashMap<String, CancellationToken>>,
    /// Nothing new begins.
    draining: CancellationToken,
    /// Deliveries are not waited for any longer, and every run is cancelled.
    leave: CancellationToken,
    tasks: TaskGroup,
    _lock: StateDirLock,
}

impl RunService {
    /// Takes up what was left in the state directory. Must be called within a runtime.
    ///
    /// # Errors
    /// Something in it cannot be read.
    pub async fn open(settings: RunServiceConfig, parts: RunServiceDeps) -> anyhow::Result<Self> {
        let RunServiceDeps { lock, mut config, catalog, seats, journal, grants, books, relay } =
            parts;
        // What LiteLLM says of its calls finds back to these books.
        config.identity.deployment = Some(books.deployment_id().await?);
        seats.metrics().register_agents(catalog.entries().map(|entry| entry.name.as_str()));
        warn_ineffective_rules(relay.as_deref(), &catalog);
        let public_key = *AuditSigningKey::new(Some(&settings.signing_key))?.public_key();
        let stock = WarmPools::new(&settings, &config, &catalog);
        let path_mask = masking::build_path_mask(&settings, &config, &catalog);
        let supervisor = Self(Arc::new(RunServiceInner {
            public_key,
            config: ArcSwap::from_pointee(config),
            catalog: ArcSwap::from_pointee(catalog),
            seats,
            journal,
            grants,
            books,
            relay: ArcSwapOption::new(relay),
            path_mask: ArcSwap::from_pointee(path_mask),
            residents: LongRunningPool::new(
                &WorkspaceStore::in_state_dir(&settings.state_dir),
                pool_limits(&settings),
            ),
            stock,
            models: UpstreamModelCache::default(),
            standing: CachedServiceStatus::default(),
            places: Arc::new(Semaphore::new(settings.max_runs)),
            waits: Semaphore::new(settings.max_runs),
            live: Mutex::default(),
            draining: CancellationToken::new(),
            leave: CancellationToken::new(),
            tasks: TaskGroup::default(),
            _lock: lock,
            settings,
        }));
        retention_clock::note_first(&supervisor.0.journal)
            .await
            .context("the journal cannot be written")?;
        Box::pin(supervisor.recover_runs())
            .await
            .context("what an earlier process has left cannot be taken up")?;
        Ok(supervisor)
    }

    /// Ends a run; it is over some moments later. One that has ended stays as it is, and one whose agent has ended brings
    /// its work to its branch first.
    pub fn cancel_run(&self, run: &str) {
        if let Some(live) = self.0.lock_live().get(run) {
            live.cancel();
        }
    }

    pub fn run_store(&self) -> &RunStore {
        &self.0.journal
    }

    pub fn catalog(&self) -> Arc<AgentCatalog> {
        self.0.catalog.load_full()
    }

    pub fn delivery_service(&self) -> Option<Arc<DeliveryService>> {
        self.0.relay.load_full()
    }

    pub fn settings(&self) -> &RunServiceConfig {
        &self.0.settings
    }

    /// How many runs have not ended.
    pub fn live_count(&self) -> usize {
        self.0.lock_live().len()
    }

    pub fn is_draining(&self) -> bool {
        self.0.draining.is_cancelled()
    }

    /// The file of a run's audit log.
    pub fn audit_log_path(&self, run: &str) -> PathBuf {
        self.0.settings.audit_log_path(run)
    }

    /// Whose signatures are in the audit logs.
    pub fn public_key(&self) -> AuditPublicKey {
        self.0.public_key
    }

    /// Puts others in force, for runs that are accepted from now on.
    pub fn reload(
        &self,
        mut config: GatewayConfig,
        catalog: AgentCatalog,
        relay: Option<Arc<DeliveryService>>,
    ) {
        config.identity.deployment.clone_from(&self.0.config.load().identity.deployment);
        self.0.seats.metrics().register_agents(catalog.entries().map(|entry| entry.name.as_str()));
        warn_ineffective_rules(relay.as_deref(), &catalog);
        let path_mask = masking::build_path_mask(&self.0.settings, &config, &catalog);
        self.0.path_mask.store(Arc::new(path_mask));
        self.0.config.store(Arc::new(config));
        self.0.catalog.store(Arc::new(catalog));
        self.0.relay.store(relay);
    }

    /// Does what has to be done from time to time, until `stop`.
    pub async fn run_maintenance(&self, stop: CancellationToken) {
        let sweep = self.0.settings.leftover_sweeper();
        let housekeeping = async {
            let (mut thrown, mut is_closed): (Option<Instant>, _) = (None, false);
            let mut clock = RetentionClock::load(self.0.journal.clone()).await;
            while !stop.is_cancelled() {
                if !is_closed {
                    is_closed = self.close_unsealed(&stop).await;
                }
                let is_trusted = clock.check_trusted().await;
                if is_trusted {
                    self.forget_expired(&stop).await;
                }
                self.resume_deliveries(&stop).await;
                if is_trusted && thrown.is_none_or(|at| at.elapsed() >= PURGE_INTERVAL) {
                    Box::pin(self.0.purge_expired(&stop)).await;
                    thrown = Some(Instant::now());
                }
                tokio::select! {
                    () = sleep(MAINTENANCE_INTERVAL) => (),
                    () = stop.cancelled() => (),
                }
            }
        };
        let residents = self.0.residents.maintain(stop.clone());
        let stock = self.0.stock.maintain(&stop);
        let sweep = sweep.run_periodically(SWEEP_INTERVAL, stop.clone());
        tokio::join!(sweep, residents, stock, housekeeping, self.cancel_revoked(&stop));
    }

    /// Accepts nothing more and begins nothing more, lets runs end until `deadline` or `hurry`, then cancels them, and
    /// waits for their ends. What is on its way to a branch by then is left to the outbox, and what has not begun, or has
    /// an end that cannot be written, to the next process.
    pub async fn drain(&self, deadline: Instant, hurry: &CancellationToken) {
        self.0.draining.cancel();
        let mut finish = std::pin::pin!(self.0.tasks.shut_down(NO_TIMEOUT));
        tokio::select! {
            _ = finish.as_mut() => return,
            () = sleep_until(deadline) => (),
            () = hurry.cancelled() => (),
        }
        tracing::warn!(runs = self.live_count(), "runs have not ended in time, and are cancelled");
        self.0.leave.cancel();
        finish.await;
    }

    /// Returns whether all are closed that can be.
    async fn close_unsealed(&self, stop: &CancellationToken) -> bool {
        let closed = self.0.close_unsealed(stop).await;
        closed
            .inspect_err(|error| {
                tracing::error!("audit logs of ended runs cannot be closed yet: {error:#}");
            })
            .is_ok()
    }

    /// Cancels runs of grants that were revoked together with their runs, until `stop`.
    async fn cancel_revoked(&self, stop: &CancellationToken) {
        while stop.run_until_cancelled(sleep(REVOCATION_INTERVAL)).await.is_some() {
            if self.live_count() > 0
                && let Err(error) = self.try_cancel_revoked().await
            {
                tracing::error!("cannot cancel the runs of revoked grants: {error:#}");
            }
        }
    }

    async fn try_cancel_revoked(&self) -> anyhow::Result<()> {
        let grants = self.0.grants.ids_with_cancelled_runs().await?;
        if grants.is_empty() {
            return Ok(());
        }
        for row in self.0.journal.unfinished_runs().await? {
            if grants.contains(&row.grant) {
                tracing::info!(
                    run = row.id,
                    grant = row.grant,
                    "a run is cancelled with its grant"
                );
                self.cancel_run(&row.id);
            }
        }
        Ok(())
    }

    /// Forgets what is older than it is kept.
    async fn forget_expired(&self, stop: &CancellationToken) {
        let forgotten = SystemTime::now().checked_sub(self.0.settings.retention);
        if let Some(before) = forgotten {
            match self.0.journal.forget_ended_before(before).await {
                Ok(0) => (),
                Ok(runs) => tracing::info!(runs, "forgot runs that ended long ago"),
                Err(error) => tracing::error!(%error, "cannot forget old runs"),
            }
        }
        match self.0.books.purge_waiting(SystemTime::now()).await {
            Ok(0) => (),
            Ok(notices) => {
                tracing::warn!(notices, "forgot what LiteLLM said of calls that never came");
            }
            Err(error) => tracing::error!(%error, "the books cannot be tidied"),
        }
        // Removing one takes as long as what is in it is much.
        stop.run_until_cancelled(self.prune_workspaces()).await;
    }

    /// Takes up deliveries whose time has come.
    async fn resume_deliveries(&self, stop: &CancellationToken) {
        let Some(relay) = self.delivery_service() else { return };
        let left = stop.run_until_cancelled(Box::pin(recover_all(&relay)));
        if let Some(Err(error)) = left.await {
            tracing::error!("cannot take out what runs have left: {error:#}");
        }
        if let Err(error) = Box::pin(relay.resume_due_jobs(stop)).await {
            tracing::error!("cannot resume deliveries: {:#}", anyhow::Error::new(error));
        }
    }

    /// What residents have kept, and nobody has used for so long.
    async fn prune_workspaces(&self) {
        let (all, age) = (
            WorkspaceStore::in_state_dir(&self.0.settings.state_dir),
            self.0.settings.workspace_retention,
        );
        let relay = self.delivery_service();
        let is_awaited = move |line: &workspace_store::StoredBranchRef| {
            relay
                .as_ref()
                .is_some_and(|relay| workspace_store::has_pending_delivery(relay.outbox(), line))
        };
        let swept = tokio::task::spawn_blocking(move || all.prune_expired(age, is_awaited)).await;
        match swept.map_err(std::io::Error::from).flatten() {
            Ok(swept) => swept.iter().for_each(log_prune_outcome),
            Err(error) => tracing::error!(%error, "cannot forget old workspaces"),
        }
    }
}

fn log_prune_outcome((kept, fate): &(StoredWorkspace, PruneOutcome)) {
    let of = kept.tenant.as_ref().map(tracing::field::display);
    match fate {
        PruneOutcome::Forgotten => {
            tracing::info!(id = kept.id, of, "forgot a workspace that nobody uses");
        }
        PruneOutcome::Stuck(error) => {
            tracing::warn!(id = kept.id, of, error, "cannot forget a workspace that nobody uses");
        }
        PruneOutcome::InUse
        | PruneOutcome::Awaited
        | PruneOutcome::Young
        | PruneOutcome::Unused => (),
    }
}

impl RunServiceConfig {
    pub(crate) fn audit_log_path(&self, run: &str) -> PathBuf {
        self.state_dir.join("audit").join(format!("{run}.jsonl"))
    }

    fn leftover_sweeper(&self) -> LeftoverSweeper {
        LeftoverSweeper {
            docker_socket: self.host.docker_socket.clone(),
            run_dir: self.host.run_dir.clone(),
            apply: true,
            all: false,
        }
    }
}

impl RunServiceInner {
    fn lock_live(&self) -> MutexGuard<'_, HashMap<String, CancellationToken>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RunService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").field("live", &self.live_count()).finish_non_exhaustive()
    }
}

/// Says which rules of agents are looser than the relay's, and so say nothing.
fn warn_ineffective_rules(relay: Option<&DeliveryService>, catalog: &AgentCatalog) {
    let Some(relay) = relay else { return };
    catalog
        .entries()
        .for_each(|entry| relay.warn_ineffective_rules(&entry.name, entry.relay.as_ref()));
}

/// Of agents whose sandboxes outlive their runs.
fn pool_limits(settings: &RunServiceConfig) -> long_running::LongRunningPoolLimits {
    long_running::LongRunningPoolLimits {
        most: settings.max_runs,
        runs: MAX_RUNS_PER_SANDBOX,
        max_age: MAX_SANDBOX_AGE,
        max_idle: MAX_SANDBOX_IDLE,
        wait: SANDBOX_WAIT_TIMEOUT,
    }
}

/// Runs in one resident sandbox, before there is a new one.
const MAX_RUNS_PER_SANDBOX: u32 = 100;

/// A resident sandbox is made anew once a day at least.
const MAX_SANDBOX_AGE: Duration = Duration::from_hours(24);

/// A resident sandbox that nobody has used for so long gives its memory back.
const MAX_SANDBOX_IDLE: Duration = Duration::from_mins(10);

/// How long a run waits for the one before it on its branch, or for a place.
const SANDBOX_WAIT_TIMEOUT: Duration = Duration::from_mins(10);

/// How often a service looks for what is due.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(30);

/// How often it looks for grants that were revoked together with their runs.
const REVOCATION_INTERVAL: Duration = Duration::from_secs(2);

/// How often it looks for files that are older than they are kept.
const PURGE_INTERVAL: Duration = Duration::from_hours(1);

/// How often it looks for what crashed processes have left.
const SWEEP_INTERVAL: Duration = Duration::from_mins(5);

/// A run has a deadline of its own.
const NO_TIMEOUT: Duration = Duration::from_secs(u32::MAX as u64);
