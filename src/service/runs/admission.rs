//! Accepts or refuses runs. A run is accepted when the run is in the journal, and not before.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::execute::RunFailure;
use super::{RunService, RunServiceInner, RunSubmission};
use crate::base::{db, disk};
use crate::runner::{GatewayServer, RunPlan, agents};
use crate::service::auth;
use crate::service::store::{AddRunOutcome, EventFeed, ExhaustedCap, NewRunRow, SpendingCaps};

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
    /// The maximum number of concurrent runs of the grant.
    pub max_runs: Option<u32>,
    /// The caps on the money that the grant's runs may cost together.
    pub caps: SpendingCaps,
}

/// The reason for which a run was refused. A refused run leaves no row and no file.
#[derive(Debug, thiserror::Error)]
pub enum RunStartError {
    #[error("the service is stopping; try again elsewhere, or later")]
    Draining,
    #[error("{0} runs are under way, and no more are allowed at once; try again later")]
    Full(usize),
    #[error(
        "{0} runs of this grant are under way, and it may have no more at once; wait for one to end"
    )]
    GrantFull(u32),
    #[error("{0}")]
    GrantBudget(ExhaustedCap),
    #[error("{0}; an operator can discard some of it, with `cogni-gateway relay discard`")]
    WorkspacesFull(String),
    #[error(transparent)]
    NoAgent(#[from] agents::UnknownAgentError),
    #[error("{0}")]
    Invalid(String),
    #[error("the idempotency key was used for another run, `{0}`, which asked for something else")]
    Conflict(String),
    /// A fault of the service, not of the caller.
    #[error("the outbox cannot be read: {0}")]
    Outbox(String),
    /// A fault of the service, not of the caller.
    #[error("the run cannot be written into the journal")]
    Journal(#[from] db::DatabaseError),
}

impl RunStartError {
    /// Returns the stable code for programs, as the manual documents it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Draining => "draining",
            Self::Full(_) => "overloaded",
            Self::GrantFull(_) => "too_many_runs",
            Self::GrantBudget(_) => "grant_budget_exhausted",
            Self::WorkspacesFull(_) => "workspaces_full",
            Self::NoAgent(_) => "no_such_agent",
            Self::Invalid(_) => "invalid_request",
            Self::Conflict(_) => "idempotency_conflict",
            Self::Journal(error) if disk::is_disk_full(error) => "storage_full",
            Self::Outbox(_) | Self::Journal(_) => "internal",
        }
    }
}

/// A permit for one concurrent run. At most `max_runs` permits exist.
pub(super) type RunPermit = OwnedSemaphorePermit;

impl RunService {
    /// Accepts a run, which begins at once. A repeated request with the same key returns the same run.
    ///
    /// # Errors
    /// Returns the reason for which the run is refused.
    pub async fn start_run(
        &self,
        wanted: RunSubmission,
        terms: RunStartOptions,
    ) -> Result<AcceptedRun, RunStartError> {
        // The client may disconnect while the run is being accepted. The detached task continues, so a run in the
        // journal is always executed.
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
        let RunStartOptions { key, max_runs, caps } = terms;
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
        if self.0.journal.is_grant_full(&wanted.grant, max_runs).await? {
            return Err(RunStartError::GrantFull(max_runs.unwrap_or_default()));
        }
        // 3. Take a permit before the row is written, so that an accepted run can begin at once.
        let places = Arc::clone(&self.0.run_permits);
        let full = |_| RunStartError::Full(self.0.settings.max_runs);
        let place = places.try_acquire_owned().map_err(full)?;
        let new = NewRunRow {
            id: run.clone(),
            grant: wanted.grant.clone(),
            idempotency_key: key,
            max_runs,
            caps,
            max_cost_usd: plan.config.budget.max_cost_usd,
            digest: wanted.digest(),
            agent: wanted.agent.clone(),
            account: wanted.account.clone(),
            model: plan.model().unwrap_or_default().to_owned(),
            submission: wanted.to_json(),
        };
        // 4. One transaction checks the key again, the grant's limits and its caps, and writes the row. Two requests at
        // the same moment cannot both pass.
        match self.0.journal.add_run(new).await? {
            AddRunOutcome::New(feed, reserved) => {
                let plan = Box::new(plan.with_max_cost(reserved));
                self.spawn_run(wanted.with_reserved_cost(reserved), feed, Some((plan, place)));
                Ok(AcceptedRun { run, is_known: false })
            }
            AddRunOutcome::Known(row) => Ok(AcceptedRun { run: row.id, is_known: true }),
            AddRunOutcome::Conflict(row) => Err(RunStartError::Conflict(row.id)),
            AddRunOutcome::Full => Err(RunStartError::GrantFull(max_runs.unwrap_or_default())),
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

    /// Returns the run that an earlier request with the same key started.
    async fn find_by_idempotency_key(
        &self,
        wanted: &RunSubmission,
        key: &str,
    ) -> Result<Option<AcceptedRun>, RunStartError> {
        match self.0.journal.find_by_idempotency_key(&wanted.grant, key).await? {
            Some(row) if row.digest != wanted.digest() => Err(RunStartError::Conflict(row.id)),
            row => Ok(row.map(|row| AcceptedRun { run: row.id, is_known: true })),
        }
    }

    /// Executes a run of the journal to its end in a background task. A run that was accepted now has its plan and its
    /// permit. For a run of an earlier process the task first waits for a permit, and then resolves the submission.
    pub(super) fn spawn_run(
        &self,
        wanted: RunSubmission,
        feed: EventFeed,
        accepted: Option<(Box<RunPlan>, RunPermit)>,
    ) {
        let (plan, place) = accepted.unzip();
        // A child of `force_stop`: if the service is already leaving, this run is cancelled, too.
        let (shared, cancel) = (Arc::clone(&self.0), self.0.force_stop.child_token());
        shared.lock_live().insert(feed.run_id().to_owned(), cancel.clone());
        self.0.tasks.spawn_task(async move {
            let turn = match place {
                Some(place) => QueueOutcome::Started(place),
                None => shared.wait_for_permit(&cancel, &wanted.grant).await,
            };
            match turn {
                QueueOutcome::Started(place) => {
                    Box::pin(shared.execute_run((&wanted, plan), &feed, cancel, place)).await;
                }
                QueueOutcome::Cancelled => {
                    let done = Err(RunFailure::Cancelled);
                    shared
                        .persist_end(&mut shared.usage_recorder(&feed), shared.run_end(done, &feed))
                        .await;
                }
                QueueOutcome::Refused(why) => {
                    shared
                        .persist_end(
                            &mut shared.usage_recorder(&feed),
                            shared.run_end(Err(why), &feed),
                        )
                        .await;
                }
                QueueOutcome::Postponed => shared.journal.detach_watchers(&feed),
            }
            shared.lock_live().remove(feed.run_id());
        });
    }
}

/// The outcome of a run's wait for a permit.
enum QueueOutcome {
    Started(RunPermit),
    Cancelled,
    /// The run's grant was revoked, has expired or cannot be read.
    Refused(RunFailure),
    /// The process ends before the run begins. The next process begins the run.
    Postponed,
}

impl RunServiceInner {
    async fn wait_for_permit(&self, cancel: &CancellationToken, grant: &str) -> QueueOutcome {
        let places = Arc::clone(&self.run_permits);
        let turn = tokio::select! {
            // `biased` polls in this order: when the service leaves, both `force_stop` and its child `cancel` are
            // cancelled, and `force_stop` must win.
            biased;
            // `force_stop` cancels every run, but runs that have not begun belong to the next process.
            () = self.force_stop.cancelled() => QueueOutcome::Postponed,
            () = cancel.cancelled() => QueueOutcome::Cancelled,
            () = self.draining.cancelled() => QueueOutcome::Postponed,
            place = places.acquire_owned() => place.map_or(QueueOutcome::Postponed, QueueOutcome::Started),
        };
        // The grant was valid when the run was accepted; an operator may have revoked the grant while the run waited.
        match turn {
            QueueOutcome::Started(place) => match self.grants.check_id(grant).await {
                Ok(()) => QueueOutcome::Started(place),
                Err(auth::GrantStoreError::Denied(denied)) => {
                    QueueOutcome::Refused(RunFailure::Grant(denied))
                }
                Err(error) => QueueOutcome::Refused(RunFailure::Internal(error.into())),
            },
            turn => turn,
        }
    }

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
