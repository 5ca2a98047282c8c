//! The runs of a service: the service accepts, starts and watches each run and brings the run to a definite end, even
//! if the process dies.
//!
//! Reading order: [`submission`] is the client's request. [`admission`] accepts or refuses the request. [`run_queue`]
//! shares the places out among the grants, and [`queued_run`] waits for the run's turn. [`execute`] takes one run from
//! its row to its end. [`agent_events`] turns the agent's output into events, and [`usage_recorder`]
//! reports and records the usage of the run's calls. [`recovery`] ends the runs of a process that has died, and
//! [`resume_deliveries`] finishes the deliveries of such runs.
//!
//! **Invariant:** an accepted run is in the run store, and ends there exactly once. Before the run ends, the calls in its
//! audit log are in the billing store.
//!
//! **Invariant:** one process holds the state directory, so that no other process begins or ends its runs.

mod admission;
mod agent_events;
mod approvals;
mod execute;
mod log_seal;
mod masking;
mod outcome;
mod queued_run;
mod recovery;
mod resume_deliveries;
mod retention;
mod retention_clock;
mod run_queue;
mod standing;
mod state_dir_lock;
mod state_gauges;
pub mod storage;
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

use crate::base::db::SqliteDatabase;
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
use crate::tools::approval::store::ApprovalStore;

pub use admission::{AcceptedRun, RunStartError, RunStartOptions};
pub use approvals::{BudgetRaiseError, open_webhook};
pub use run_queue::{GrantRunLimits, QueueStanding};
pub use standing::ServiceStatus;
pub use state_dir_lock::StateDirLock;
pub use submission::RunSubmission;

use approvals::open_approvals;
use retention_clock::RetentionClock;
use run_queue::{RunQueue, RunQueueLimits};
use standing::CachedServiceStatus;
use upstream_models::UpstreamModelCache;
use warm_pools::WarmPools;

/// The service that accepts and executes runs. Clones share the same state.
#[derive(Clone)]
pub struct RunService(Arc<RunServiceInner>);

/// The settings of a run service: its directories, its limits and its retention times.
#[derive(Clone, Debug)]
pub struct RunServiceConfig {
    /// The directory of the run store, the audit logs and the relay's state. No sandbox ever sees its content.
    pub state_dir: PathBuf,
    /// The parent of the runs' directories, which are removed with their runs, and the files that sandboxes are made
    /// from.
    pub host: HostEnvironment,
    /// The driver for agents whose entries name none.
    pub driver: DriverChoice,
    /// True if the embedded driver may run without limits on memory, processes and processors.
    pub allow_unlimited: bool,
    /// The maximum number of concurrent runs. Further runs wait in the queue.
    pub max_runs: usize,
    /// The maximum number of runs in the queue. The service refuses further runs.
    pub max_queued_runs: usize,
    /// The maximum number of runs of one grant in the queue.
    pub max_queued_runs_per_grant: usize,
    /// The maximum time that a run waits in the queue.
    pub max_queue_wait: Duration,
    /// The time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// The time for which the run store stores runs that have ended.
    pub retention: Duration,
    /// The maximum bytes of outputs, results and events that the ended runs of one grant keep.
    pub max_kept_bytes: u64,
    /// True if no pull request shows the user's request.
    pub hide_requests: bool,
    /// The time for which an unused persistent workspace is stored.
    pub workspace_retention: Duration,
    /// The time for which audit logs are stored. `None` stores them forever.
    pub audit_retention: Option<Duration>,
    /// The time for which the billing store keeps the calls of forgotten runs. `None` keeps the calls forever.
    pub billing_retention: Option<Duration>,
    /// The key that signs audit logs, for as long as the service runs.
    pub signing_key: SecretString,
}

/// The parts that a run service is composed of.
pub struct RunServiceDeps {
    /// The lock of the state directory. The caller takes the lock before it opens any file there.
    pub lock: StateDirLock,
    /// The gateway's settings. Each run adds its own identity and budget.
    pub config: GatewayConfig,
    pub catalog: AgentCatalog,
    pub gateway_host: GatewayHost,
    pub run_store: RunStore,
    pub grants: GrantStore,
    pub billing: BillingStore,
    /// The relay. Without a relay, no run has a repository.
    pub relay: Option<Arc<DeliveryService>>,
    /// The database of the questions about tool calls; `None` if no person can answer, and no rule may ask.
    pub questions: Option<SqliteDatabase>,
}

struct RunServiceInner {
    settings: RunServiceConfig,
    /// The public half of the signing key.
    public_key: AuditPublicKey,
    config: ArcSwap<GatewayConfig>,
    catalog: ArcSwap<AgentCatalog>,
    gateway_host: GatewayHost,
    run_store: RunStore,
    grants: GrantStore,
    billing: BillingStore,
    approvals: Option<ApprovalStore>,
    relay: ArcSwapOption<DeliveryService>,
    /// The paths of this machine, which are masked in texts for callers.
    path_mask: ArcSwap<PathMask>,
    long_running_pool: LongRunningPool,
    warm_pools: WarmPools,
    models: UpstreamModelCache,
    upstream_status: CachedServiceStatus,
    /// The places of runs, and the runs that wait for one.
    queue: RunQueue,
    /// Permits for runs that wait for an earlier run in their long-running sandbox. Such a run has lent its place.
    waiting_permits: Semaphore,
    live: Mutex<HashMap<String, CancellationToken>>,
    /// Cancelled when the service drains: no new run begins.
    draining: CancellationToken,
    /// Cancelled at the deadline of a drain: the service stops waiting for deliveries and cancels every run.
    force_stop: CancellationToken,
    tasks: TaskGroup,
    _lock: StateDirLock,
}

impl RunService {
    /// Opens the service and recovers the runs that an earlier process left. Must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if a file of the state directory cannot be read, or the run store cannot be written.
    pub async fn open(settings: RunServiceConfig, parts: RunServiceDeps) -> anyhow::Result<Self> {
        let RunServiceDeps {
            lock,
            mut config,
            catalog,
            gateway_host,
            run_store,
            grants,
            billing,
            relay,
            questions,
        } = parts;
        let approvals = match questions {
            Some(database) => Some(open_approvals(database, run_store.clone()).await?),
            None => None,
        };
        // LiteLLM's reports carry this id, so that ingestion accepts only the reports about this billing store.
        config.identity.deployment = Some(billing.deployment_id().await?);
        approvals::add_approvals(&mut config, approvals.as_ref());
        if let Some(approvals) = &approvals {
            approvals.set_webhook(open_webhook(&config)?);
        }
        approvals::replace_present_tools((&config, &catalog), approvals.as_ref());
        gateway_host.metrics().register_agents(catalog.entries().map(|entry| entry.name.as_str()));
        warn_ineffective_rules(relay.as_deref(), &catalog);
        let public_key = *AuditSigningKey::new(Some(&settings.signing_key))?.public_key();
        let warm_pools = WarmPools::new(&settings, &config, &catalog);
        let path_mask = masking::build_path_mask(&settings, &config, &catalog);
        let run_service = Self(Arc::new(RunServiceInner {
            public_key,
            config: ArcSwap::from_pointee(config),
            catalog: ArcSwap::from_pointee(catalog),
            gateway_host,
            run_store,
            grants,
            billing,
            approvals,
            relay: ArcSwapOption::new(relay),
            path_mask: ArcSwap::from_pointee(path_mask),
            long_running_pool: LongRunningPool::new(
                &WorkspaceStore::in_state_dir(&settings.state_dir),
                pool_limits(&settings),
            ),
            warm_pools,
            models: UpstreamModelCache::default(),
            upstream_status: CachedServiceStatus::default(),
            queue: RunQueue::new(settings.queue_limits()),
            waiting_permits: Semaphore::new(settings.max_runs),
            live: Mutex::default(),
            draining: CancellationToken::new(),
            force_stop: CancellationToken::new(),
            tasks: TaskGroup::default(),
            _lock: lock,
            settings,
        }));
        retention_clock::note_first(&run_service.0.run_store)
            .await
            .context("cannot write the run store")?;
        run_service
            .withdraw_earlier_questions()
            .await
            .context("cannot withdraw the questions of an earlier process")?;
        Box::pin(run_service.recover_runs())
            .await
            .context("cannot recover the runs of an earlier process")?;
        // All runs of the earlier process are in the queue now, so that they begin in their order.
        run_service.0.queue.open();
        run_service.publish_gauges();
        Ok(run_service)
    }

    /// Requests a run's end, which follows some moments later. A run that has ended does not change. A run whose agent
    /// has ended still delivers its work to its branch first.
    pub fn cancel_run(&self, run: &str) {
        if let Some(live) = self.0.lock_live().get(run) {
            live.cancel();
        }
    }

    pub fn run_store(&self) -> &RunStore {
        &self.0.run_store
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

    /// Returns the number of runs that have not ended.
    pub fn live_count(&self) -> usize {
        self.0.lock_live().len()
    }

    pub fn is_draining(&self) -> bool {
        self.0.draining.is_cancelled()
    }

    /// Returns the path of a run's audit log.
    pub fn audit_log_path(&self, run: &str) -> PathBuf {
        self.0.settings.audit_log_path(run)
    }

    /// Returns the key that verifies the signatures of the audit logs.
    pub fn public_key(&self) -> AuditPublicKey {
        self.0.public_key
    }

    /// Replaces the configuration, the catalog and the relay for runs that are accepted from now on.
    pub fn reload(
        &self,
        mut config: GatewayConfig,
        catalog: AgentCatalog,
        relay: Option<Arc<DeliveryService>>,
    ) {
        // The deployment id belongs to the billing store, not to the configuration file, so the new configuration
        // inherits the id.
        config.identity.deployment.clone_from(&self.0.config.load().identity.deployment);
        approvals::add_approvals(&mut config, self.0.approvals.as_ref());
        approvals::replace_webhook(&config, self.0.approvals.as_ref());
        approvals::replace_present_tools((&config, &catalog), self.0.approvals.as_ref());
        self.0
            .gateway_host
            .metrics()
            .register_agents(catalog.entries().map(|entry| entry.name.as_str()));
        warn_ineffective_rules(relay.as_deref(), &catalog);
        let path_mask = masking::build_path_mask(&self.0.settings, &config, &catalog);
        self.0.path_mask.store(Arc::new(path_mask));
        self.0.config.store(Arc::new(config));
        self.0.catalog.store(Arc::new(catalog));
        self.0.relay.store(relay);
    }

    /// Runs the periodic maintenance until `stop`: sweeping, retention, deliveries, sandbox pools and revocations.
    pub async fn run_maintenance(&self, stop: CancellationToken) {
        let sweep = self.0.settings.leftover_sweeper();
        let housekeeping = async {
            let (mut thrown, mut is_closed): (Option<Instant>, _) = (None, false);
            let mut clock = RetentionClock::load(self.0.run_store.clone()).await;
            while !stop.is_cancelled() {
                // 1. Close audit logs that an earlier version left open. The step is repeated until it has succeeded
                // once.
                if !is_closed {
                    is_closed = self.close_unsealed(&stop).await;
                }
                // 2. Delete by age only while the wall clock is trusted: a clock that jumped ahead would make
                // everything old.
                let now = clock.trusted_time().await;
                if let Some(now) = now {
                    self.forget_expired(now, &stop).await;
                }
                // 3. The bound of a grant holds for runs of an earlier process and an earlier setting, too.
                self.0.remove_excess_records().await;
                // 4. Deliveries have their own retry times and need no trusted clock.
                self.resume_deliveries(&stop).await;
                // 5. The purge lists whole directories, so an hour lies between two purges.
                if let Some(now) = now
                    && thrown.is_none_or(|at| at.elapsed() >= PURGE_INTERVAL)
                {
                    Box::pin(self.0.purge_expired(now, &stop)).await;
                    thrown = Some(Instant::now());
                }
                tokio::select! {
                    () = sleep(MAINTENANCE_INTERVAL) => (),
                    () = stop.cancelled() => (),
                }
            }
        };
        let pool = self.0.long_running_pool.maintain(stop.clone());
        let stock = self.0.warm_pools.maintain(&stop);
        let sweep = sweep.run_periodically(SWEEP_INTERVAL, stop.clone());
        let approvals = self.maintain_approvals(&stop);
        tokio::join!(sweep, pool, stock, housekeeping, approvals, self.cancel_revoked(&stop));
    }

    /// Stops accepting and beginning runs, and waits for the ends of the runs. At `deadline` or at `hurry` the
    /// remaining runs are cancelled. The outbox keeps unfinished deliveries. The next process takes the runs that have
    /// not begun and the runs whose end cannot be written.
    pub async fn drain(&self, deadline: Instant, hurry: &CancellationToken) {
        // 1. No new run begins. Queued runs leave the queue and stay in the run store for the next process.
        self.0.draining.cancel();
        // 2. Wait for the tasks without a timeout of their own; `deadline` and `hurry` bound the wait.
        let mut finish = std::pin::pin!(self.0.tasks.shut_down(NO_TIMEOUT));
        tokio::select! {
            _ = finish.as_mut() => return,
            () = sleep_until(deadline) => (),
            () = hurry.cancelled() => (),
        }
        // 3. Cancel the rest. The tasks must still finish, because each of them writes its run's end.
        tracing::warn!(runs = self.live_count(), "runs have not ended in time, and are cancelled");
        self.0.force_stop.cancel();
        finish.await;
    }

    /// Closes the open audit logs of ended runs. Returns true if no log has to be tried again.
    async fn close_unsealed(&self, stop: &CancellationToken) -> bool {
        let closed = self.0.close_unsealed(stop).await;
        closed
            .inspect_err(|error| {
                tracing::error!("audit logs of ended runs cannot be closed yet: {error:#}");
            })
            .is_ok()
    }

    /// Ends the queued runs of revoked grants, and cancels all runs of grants that were revoked together with their
    /// runs, until `stop`.
    async fn cancel_revoked(&self, stop: &CancellationToken) {
        while stop.run_until_cancelled(sleep(REVOCATION_INTERVAL)).await.is_some() {
            self.deny_revoked_grants().await;
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
        for row in self.0.run_store.unfinished_runs().await? {
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

    /// Deletes old runs, unmatched notices and unused workspaces.
    async fn forget_expired(&self, now: SystemTime, stop: &CancellationToken) {
        // A retention longer than the clock's own range subtracts to `None`; then no run is old enough.
        let forgotten = now.checked_sub(self.0.settings.retention);
        if let Some(before) = forgotten {
            match self.0.run_store.forget_ended_before(before).await {
                Ok(0) => (),
                Ok(runs) => tracing::info!(runs, "forgot runs that ended long ago"),
                Err(error) => tracing::error!(%error, "cannot forget old runs"),
            }
        }
        if let (Some(approvals), Some(before)) = (&self.0.approvals, forgotten)
            && let Err(error) = approvals.forget_before(before).await
        {
            tracing::error!(%error, "cannot forget old questions about tool calls");
        }
        match self.0.billing.purge_waiting(now).await {
            Ok(0) => (),
            Ok(notices) => {
                tracing::warn!(notices, "forgot LiteLLM's notices of calls that never arrived");
            }
            Err(error) => {
                tracing::error!(%error, "cannot purge old notices from the billing records");
            }
        }
        // The time to remove a workspace grows with the number of its files, so a shutdown interrupts the removal.
        stop.run_until_cancelled(self.prune_workspaces()).await;
    }

    /// Collects work from orphaned workspaces and resumes the deliveries that are due.
    async fn resume_deliveries(&self, stop: &CancellationToken) {
        let Some(relay) = self.delivery_service() else { return };
        let left = stop.run_until_cancelled(Box::pin(recover_all(&relay)));
        if let Some(Err(error)) = left.await {
            tracing::error!("cannot collect the work of orphaned workspaces: {error:#}");
        }
        if let Err(error) = Box::pin(relay.resume_due_jobs(stop)).await {
            tracing::error!("cannot resume deliveries: {:#}", anyhow::Error::new(error));
        }
    }

    /// Deletes persistent workspaces that no run has used for the retention time.
    async fn prune_workspaces(&self) {
        let (all, age) = (
            WorkspaceStore::in_state_dir(&self.0.settings.state_dir),
            self.0.settings.workspace_retention,
        );
        let relay = self.delivery_service();
        // A workspace stays while the relay has unfinished or uncollected work of its branch.
        let is_awaited = move |line: &workspace_store::StoredBranchRef| {
            relay
                .as_ref()
                .is_some_and(|relay| workspace_store::has_pending_delivery(relay.outbox(), line))
        };
        let swept = tokio::task::spawn_blocking(move || all.prune_expired(age, is_awaited)).await;
        match swept.map_err(std::io::Error::from).flatten() {
            Ok(swept) => swept.iter().for_each(log_prune_outcome),
            Err(error) => tracing::error!(%error, "cannot delete unused workspaces"),
        }
    }
}

fn log_prune_outcome((kept, fate): &(StoredWorkspace, PruneOutcome)) {
    let of = kept.owner.as_ref().map(tracing::field::display);
    match fate {
        PruneOutcome::Removed => {
            tracing::info!(id = kept.id, of, "forgot an unused workspace");
        }
        PruneOutcome::RemoveFailed(error) => {
            tracing::warn!(id = kept.id, of, error, "cannot forget an unused workspace");
        }
        PruneOutcome::InUse
        | PruneOutcome::DeliveryPending
        | PruneOutcome::RecentlyUsed
        | PruneOutcome::Unused => (),
    }
}

impl RunServiceConfig {
    pub(crate) fn audit_log_path(&self, run: &str) -> PathBuf {
        self.audit_dir().join(format!("{run}.jsonl"))
    }

    /// Returns the directory of the runs' audit logs.
    fn audit_dir(&self) -> PathBuf {
        self.state_dir.join("audit")
    }

    fn queue_limits(&self) -> RunQueueLimits {
        RunQueueLimits {
            places: self.max_runs,
            queued: self.max_queued_runs,
            queued_per_grant: self.max_queued_runs_per_grant,
        }
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
        f.debug_struct("RunService").field("live", &self.live_count()).finish_non_exhaustive()
    }
}

/// Warns about agent rules that have no effect because the relay's own rule is stricter.
fn warn_ineffective_rules(relay: Option<&DeliveryService>, catalog: &AgentCatalog) {
    let Some(relay) = relay else { return };
    catalog
        .entries()
        .for_each(|entry| relay.warn_ineffective_rules(&entry.name, entry.relay.as_ref()));
}

/// Returns the limits of the pool of long-running sandboxes.
fn pool_limits(settings: &RunServiceConfig) -> long_running::LongRunningPoolLimits {
    long_running::LongRunningPoolLimits {
        max_sandboxes: settings.max_runs,
        max_runs: MAX_RUNS_PER_SANDBOX,
        max_age: MAX_SANDBOX_AGE,
        max_idle: MAX_SANDBOX_IDLE,
        wait: SANDBOX_WAIT_TIMEOUT,
    }
}

/// The maximum number of runs in one long-running sandbox, before a new sandbox replaces it. Our choice.
const MAX_RUNS_PER_SANDBOX: u32 = 100;

/// The maximum age of a long-running sandbox, before a new sandbox replaces it. Our choice.
const MAX_SANDBOX_AGE: Duration = Duration::from_hours(24);

/// The maximum idle time of a long-running sandbox, before its removal frees its memory. Our choice.
const MAX_SANDBOX_IDLE: Duration = Duration::from_mins(10);

/// The maximum time that a run waits for the previous run on its branch, or for a sandbox of the pool. Our choice.
const SANDBOX_WAIT_TIMEOUT: Duration = Duration::from_mins(10);

/// The interval of the service's maintenance. Our choice.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(30);

/// The interval between checks for grants that were revoked together with their runs. Our choice.
const REVOCATION_INTERVAL: Duration = Duration::from_secs(2);

/// The interval between purges of expired files and recorded calls. Our choice.
const PURGE_INTERVAL: Duration = Duration::from_hours(1);

/// The interval between sweeps for leftovers of crashed processes. Our choice.
const SWEEP_INTERVAL: Duration = Duration::from_mins(5);

/// A wait without an end, in effect: each run has a deadline of its own.
const NO_TIMEOUT: Duration = Duration::from_secs(u32::MAX as u64);
