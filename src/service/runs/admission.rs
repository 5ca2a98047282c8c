//! Accepts or refuses runs. A run is accepted when the run is in the run store, and not before.

use std::io;

use tokio::task::spawn_blocking;
use tokio::time::Instant;
use uuid::Uuid;

use super::queued_run::QueuedRun;
use super::run_queue::{GrantRunLimits, QueueFullError};
use super::storage::check_writable;
use super::{RunService, RunServiceInner, RunSubmission};
use crate::base::{db, disk};
use crate::runner::{GatewayServer, RunPlan, agents};
use crate::service::store::{AddRunOutcome, ExhaustedCap, NewRunRow, SpendingCaps};

/// A run that was accepted, now or before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedRun {
    pub run: String,
    /// True if an earlier request with the same idempotency key started the run.
    pub is_known: bool,
}

/// The idempotency key and the grant's limits for a new run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunStartOptions {
    /// The idempotency key. A repeated request with the same key returns the same run.
    pub key: Option<String>,
    /// The maximum numbers of running and queued runs of the grant.
    pub limits: GrantRunLimits,
    /// The caps on the money that the grant's runs may cost together.
    pub caps: SpendingCaps,
}

/// The reason for which a run was refused. A refused run leaves no row and no file.
#[derive(Debug, thiserror::Error)]
pub enum RunStartError {
    #[error("the service is shutting down and accepts no new runs; try again after its restart")]
    Draining,
    #[error(transparent)]
    QueueFull(#[from] QueueFullError),
    #[error("{0}")]
    GrantBudget(ExhaustedCap),
    #[error("{0}; an operator can discard some of it, with `cogni-gateway relay discard`")]
    WorkspacesFull(String),
    #[error(transparent)]
    NoAgent(#[from] agents::UnknownAgentError),
    #[error("{0}")]
    Invalid(String),
    #[error(
        "the idempotency key belongs to run `{0}`, which was started with another request; use a new key"
    )]
    Conflict(String),
    /// A fault of the service, not of the caller.
    #[error("the outbox cannot be read: {0}")]
    Outbox(String),
    /// A fault of the service, not of the caller.
    #[error("a directory of the service cannot be written")]
    Storage(#[from] io::Error),
    /// A fault of the service, not of the caller.
    #[error("the run cannot be written into the run store")]
    Store(#[from] db::DatabaseError),
}

impl RunStartError {
    /// Returns the stable code for programs, as the manual documents it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Draining => "draining",
            Self::QueueFull(_) => "queue_full",
            Self::GrantBudget(_) => "grant_budget_exhausted",
            Self::WorkspacesFull(_) => "workspaces_full",
            Self::NoAgent(_) => "no_such_agent",
            Self::Invalid(_) => "invalid_request",
            Self::Conflict(_) => "idempotency_conflict",
            Self::Store(error) if disk::is_disk_full(error) => "storage_full",
            Self::Storage(error) if disk::is_disk_full(error) => "storage_full",
            Self::Outbox(_) | Self::Store(_) | Self::Storage(_) => "internal",
        }
    }
}

impl RunService {
    /// Accepts a run, which begins when there is a place for it. A repeated request with the same key returns the same
    /// run.
    ///
    /// # Errors
    /// Returns the reason for which the run is refused.
    pub async fn start_run(
        &self,
        wanted: RunSubmission,
        terms: RunStartOptions,
    ) -> Result<AcceptedRun, RunStartError> {
        // The client may disconnect while the run is being accepted. The detached task continues, so a run in the
        // run store is always executed.
        let this = self.clone();
        let start = async move { Box::pin(this.try_start_run(wanted, terms)).await };
        let started = self.0.tasks.run_detached(start).await;
        started.inspect_err(|refused| {
            self.0.gateway_host.metrics().record_refused_submission(refused.code());
        })
    }

    async fn try_start_run(
        &self,
        wanted: RunSubmission,
        terms: RunStartOptions,
    ) -> Result<AcceptedRun, RunStartError> {
        let RunStartOptions { key, limits, caps } = terms;
        // 1. A known key returns its run, even if the service is draining or full.
        if let Some(key) = &key
            && let Some(known) = self.find_by_idempotency_key(&wanted, key).await?
        {
            return Ok(known);
        }
        if self.is_draining() {
            return Err(RunStartError::Draining);
        }
        // 2. Check everything that needs no write. Version 7 ids sort by time, which the recovery relies on.
        let run = format!("run-{}", Uuid::now_v7());
        let plan = self.0.plan_submission(&wanted, &run)?;
        if plan.branch.is_some() {
            self.check_retention(&wanted.grant).await?;
        }
        self.check_storage().await?;
        // 3. Enter the queue before the row is written, so that the queue's bounds hold. A run that is refused below
        // leaves the queue with its entry.
        let entry = self.0.queue.enqueue_new((&wanted.grant, &run), limits)?;
        let new = NewRunRow {
            id: run.clone(),
            grant: wanted.grant.clone(),
            idempotency_key: key,
            caps,
            max_cost_usd: plan.config.budget.max_cost_usd,
            digest: wanted.digest(),
            agent: wanted.agent.clone(),
            account: wanted.account.clone(),
            model: plan.model().unwrap_or_default().to_owned(),
            submission: wanted.to_json(),
        };
        // 4. One transaction checks the key again and the grant's caps, and writes the row. Two requests at
        // the same moment cannot both pass.
        match self.0.run_store.add_run(new).await? {
            AddRunOutcome::New(feed, reserved) => {
                // A run that waits is planned at its turn, and does not hold its submission in memory until then.
                let resolved = entry.begins_now().then(|| {
                    let plan = Box::new(plan.with_max_cost(reserved));
                    (Box::new(wanted.with_reserved_cost(reserved)), plan)
                });
                let wait_ends = Instant::now() + self.0.settings.max_queue_wait;
                self.spawn_run(QueuedRun { entry, feed, wait_ends }, resolved);
                Ok(AcceptedRun { run, is_known: false })
            }
            AddRunOutcome::Known(row) => Ok(AcceptedRun { run: row.id, is_known: true }),
            AddRunOutcome::Conflict(row) => Err(RunStartError::Conflict(row.id)),
            AddRunOutcome::Exhausted(exhausted) => Err(RunStartError::GrantBudget(exhausted)),
        }
    }

    /// Refuses a run with a branch if the retained work of the grant's earlier runs has reached its limit.
    async fn check_retention(&self, grant: &str) -> Result<(), RunStartError> {
        let Some(relay) = self.delivery_service() else { return Ok(()) };
        let grant = grant.to_owned();
        match spawn_blocking(move || relay.retention_full_reason(Some(&grant))).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(RunStartError::WorkspacesFull(why)),
            Ok(Err(error)) => Err(RunStartError::Outbox(error.to_string())),
            Err(error) => Err(RunStartError::Outbox(error.to_string())),
        }
    }

    /// Checks that each directory of a run can be written, so that no run is accepted that a full disk would end.
    async fn check_storage(&self) -> Result<(), RunStartError> {
        let directories = self.0.settings.written_directories();
        let check = move || directories.iter().try_for_each(|(_, path)| check_writable(path));
        Ok(spawn_blocking(check).await.map_err(io::Error::other)??)
    }

    /// Returns the run that an earlier request with the same key started.
    async fn find_by_idempotency_key(
        &self,
        wanted: &RunSubmission,
        key: &str,
    ) -> Result<Option<AcceptedRun>, RunStartError> {
        match self.0.run_store.find_by_idempotency_key(&wanted.grant, key).await? {
            Some(row) if row.digest != wanted.digest() => Err(RunStartError::Conflict(row.id)),
            row => Ok(row.map(|row| AcceptedRun { run: row.id, is_known: true })),
        }
    }
}

impl RunServiceInner {
    /// Returns the plan of a submission that the service can execute. Creates no file and no row.
    fn plan_submission(&self, wanted: &RunSubmission, run: &str) -> Result<RunPlan, RunStartError> {
        let catalog = self.catalog.load();
        catalog.find_agent(&wanted.agent)?;
        let invalid = |error: anyhow::Error| {
            let mut why = format!("{error:#}");
            self.mask_in_place(run, &mut why);
            RunStartError::Invalid(why)
        };
        let plan = self.resolve_plan(wanted, run).map_err(invalid)?;
        if plan.branch.is_some() {
            let relay = self.relay.load();
            let missing = match &*relay {
                None => Some("this service has no relay, so no repositories"),
                Some(relay) if wanted.branch.pull_request && !relay.has_credential() => Some(
                    "`pull_request` needs a credential of the forge, and this service has none; leave it out, or ask \
                     the service's operator to set `GITHUB_TOKEN`",
                ),
                Some(_) => None,
            };
            if let Some(missing) = missing {
                return Err(RunStartError::Invalid(missing.to_owned()));
            }
        }
        plan.check().map_err(invalid)?;
        Ok(plan)
    }

    /// Returns the plan of a submission, by the present configuration and catalog.
    pub(super) fn resolve_plan(
        &self,
        wanted: &RunSubmission,
        run: &str,
    ) -> anyhow::Result<RunPlan> {
        let gateway = GatewayServer::SharedProcess(self.gateway_host.clone());
        let (config, catalog) = (self.config.load(), self.catalog.load());
        wanted.resolve(run, gateway, (&self.settings, &config, &catalog))
    }
}
