//! Executes one run of a service, from its row in the run store to its end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::FutureExt;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::agent_events::AgentEventParser;
use super::run_queue::RunPlace;
use super::usage_recorder::UsageRecorder;
use super::{RunServiceInner, RunSubmission, outcome};
use crate::base::disk;
use crate::gateway::process::RunClosingState;
use crate::relay::repo;
use crate::runner::agents::AgentDefinition;
use crate::runner::branch_delivery::{BranchRequest, DeliveryReport, DeliveryTarget};
use crate::runner::long_running::{LongRunningClaimError, SandboxKey, SandboxKeyGuard};
use crate::runner::{
    PreparedRun, RunErrorCode, RunHandles, RunInputs, RunPlan, RunResult, warm_pool,
};
use crate::sandbox::output::{OutputCapture, OutputStream};
use crate::service::auth::AccessDeniedError;
use crate::service::store::{EventFeed, RunEnd, RunEventKind};

/// The reason for which a run has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunFailure {
    #[error("the run was cancelled before it began")]
    Cancelled,
    #[error("the run's grant is no longer valid: {0}")]
    Grant(AccessDeniedError),
    #[error(
        "the run waited {} for a place, which is as long as this service lets a run wait; try again later",
        humantime::format_duration(*.0)
    )]
    QueueTimeout(Duration),
    #[error("the branch cannot be worked on: {0:#}")]
    Branch(anyhow::Error),
    #[error("{0:#}")]
    CheckoutTooLarge(anyhow::Error),
    #[error("there is no sandbox for the run: {0}")]
    NoSandbox(LongRunningClaimError),
    #[error("{0:#}")]
    Internal(#[from] anyhow::Error),
    /// A panic in the service's code, which ends no other run.
    #[error("the service failed during the run; the service's log has the cause")]
    Panicked,
}

impl RunFailure {
    /// Classifies an error of the preparation. The size or cost of a repository is not a fault of the service.
    fn from_error(error: anyhow::Error) -> Self {
        match error.downcast_ref() {
            Some(
                repo::RepoError::CheckoutTooLarge { .. }
                | repo::RepoError::FetchLimitExceeded { .. },
            ) => Self::CheckoutTooLarge(error),
            _ => Self::Internal(error),
        }
    }

    /// Returns the error code, from the same set as [`RunResult::error_code`] and the service's own codes.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Cancelled => RunErrorCode::Cancelled.as_str(),
            Self::Grant(_) => "grant_revoked",
            Self::QueueTimeout(_) => "queue_timeout",
            Self::Branch(_) => "branch_unavailable",
            Self::CheckoutTooLarge(_)
            | Self::NoSandbox(LongRunningClaimError::WorkspaceFull { .. }) => {
                RunErrorCode::WorkspaceFull.as_str()
            }
            Self::NoSandbox(_) => "sandbox_busy",
            Self::Internal(error) if disk::is_disk_full(error.as_ref()) => "storage_full",
            Self::Internal(_) | Self::Panicked => RunErrorCode::Internal.as_str(),
        }
    }
}

impl From<LongRunningClaimError> for RunFailure {
    fn from(unclaimed: LongRunningClaimError) -> Self {
        match unclaimed {
            LongRunningClaimError::Failed(error) => Self::from_error(error),
            LongRunningClaimError::Cancelled => Self::Cancelled,
            busy => Self::NoSandbox(busy),
        }
    }
}

impl RunServiceInner {
    /// Executes a run and writes its end into the run store, even if the run's code panics.
    pub(super) async fn execute_run(
        &self,
        (wanted, plan): (&RunSubmission, Option<Box<RunPlan>>),
        feed: &EventFeed,
        cancel: CancellationToken,
        mut place: RunPlace,
    ) {
        let mut bill = self.usage_recorder(feed);
        let run = async {
            let (metrics, begun) = (self.gateway_host.metrics(), Instant::now());
            let live = metrics.record_run_started(&wanted.agent);
            // A panic of one run becomes that run's end; the task must live on to write the end.
            let run = self.execute((wanted, plan), &mut bill, cancel, &mut place);
            let run = AssertUnwindSafe(Box::pin(run));
            let mut done = run.catch_unwind().await.unwrap_or(Err(RunFailure::Panicked));
            // Without a result, no code has closed the run's gateway, and calls may still be open.
            if done.is_err() {
                self.close_abandoned_log(feed.run_id()).await;
            }
            self.explain_shutdown_cancel(&mut done);
            // The gauge of live runs falls before the end is counted.
            drop(live);
            metrics.record_run_ended(&wanted.agent, outcome_label(&done), begun.elapsed());
            metrics.record_dropped_events(feed.dropped_count());
            match &done {
                Err(error @ (RunFailure::Internal(_) | RunFailure::Panicked)) => {
                    tracing::error!(run = feed.run_id(), "the run has failed: {error:#}");
                }
                // The caller's request cannot be fulfilled. The caller reads the reason in the run's end.
                Err(error) => {
                    tracing::info!(run = feed.run_id(), "the run has not begun: {error:#}");
                }
                Ok(_) => (),
            }
            self.persist_end(&mut bill, self.run_end(done, feed)).await;
        };
        // `persist_events` returns when the feed is closed, which `persist_end` does with the run's end.
        tokio::join!(run, self.run_store.persist_events(feed));
    }

    /// Returns the end of a run for the run store, with the paths of this machine masked for the caller.
    pub(super) fn run_end(
        &self,
        mut done: Result<RunResult, RunFailure>,
        feed: &EventFeed,
    ) -> RunEnd {
        match &mut done {
            Ok(result) => {
                self.mask_result(result);
                outcome::from_run_result(result, feed)
            }
            Err(failed) => {
                let (code, mut message) = (failed.code(), failed.to_string());
                self.mask_in_place(feed.run_id(), &mut message);
                outcome::failed_end(code, &message, feed)
            }
        }
    }

    pub(super) fn usage_recorder(&self, feed: &EventFeed) -> UsageRecorder {
        UsageRecorder::new(
            self.billing.clone(),
            feed.clone(),
            self.settings.audit_log_path(feed.run_id()),
        )
    }

    /// Closes a run's gateway and log after a fault. The open calls are settled, as at any other end.
    async fn close_abandoned_log(&self, run: &str) {
        let runs = self.gateway_host.run_manager();
        let closed = async {
            // An error says that the run was never opened, or that another task is closing the run already.
            let _ = runs.close_run(run).await;
            while runs.closing_state(run) == Some(RunClosingState::Draining) {
                tokio::time::sleep(MIN_RETRY_DELAY).await;
            }
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::error!(
                run,
                "the run's log is not closed in time after a fault: calls may be missing from the billing records"
            );
        }
    }

    /// Adds the reason to the result of a run that the service's shutdown cancelled, so that its reader looks for no
    /// other cause.
    fn explain_shutdown_cancel(&self, done: &mut Result<RunResult, RunFailure>) {
        if let Ok(result) = done
            && result.error_code == Some(RunErrorCode::Cancelled)
            && self.force_stop.is_cancelled()
        {
            result.error.get_or_insert_with(|| SHUTDOWN_MESSAGE.to_owned());
        }
    }

    async fn execute(
        &self,
        (wanted, plan): (&RunSubmission, Option<Box<RunPlan>>),
        bill: &mut UsageRecorder,
        cancel: CancellationToken,
        place: &mut RunPlace,
    ) -> Result<RunResult, RunFailure> {
        let feed = bill.feed().clone();
        let run = feed.run_id();
        let order = match plan {
            Some(plan) => *plan,
            None => self
                .resolve_plan(wanted, run)
                .context("the run was accepted under earlier settings, and cannot begin now")?,
        };
        let agent = order.agent.as_ref().context("the run's plan has no agent")?;
        let entry = Arc::clone(&agent.entry);
        // 1. From here on a later process treats the run as begun: the run is interrupted, never begun again. The row
        // loses the messages and the environment, which may hold secrets. This comes first, so that no run that has its
        // place looks as if it waited.
        self.run_store
            .mark_running(run, wanted.without_content().to_json())
            .await
            .map_err(anyhow::Error::from)?;
        feed.publish(
            RunEventKind::RunStarted,
            &json!({"run": run, "agent": entry.name, "model": order.model()}),
        );
        // 2. List the upstream's models, for agents that need a list.
        let models = self.models.for_agent(agent, &order.config).await;
        let mut inputs = RunInputs { models, target: None, approvals: self.approvals.clone() };
        // 3. Take the branch. The calls that read the branch end when the run is cancelled.
        let is_skipped = wanted.branch.repository.is_some() && order.branch.is_none();
        if let Some(branch) = order.branch.clone() {
            let begun = self.acquire_target(branch, Arc::clone(&entry), cancel.clone());
            let begun = begun.boxed().await;
            // The run keeps its place until no git of its own runs any more. So places bound the gits of cancelled runs.
            if cancel.is_cancelled() {
                return Err(RunFailure::Cancelled);
            }
            inputs.target = Some(begun.map_err(RunFailure::Branch)?);
        }
        // 4. Prepare the sandbox, unless the run was cancelled before.
        let driver = order.driver.name();
        if cancel.is_cancelled() {
            return Err(RunFailure::Cancelled);
        }
        let prepare = self.prepare_run((order, inputs), wanted, (&entry, &cancel), place);
        let prepared = Box::pin(prepare).await?;
        // 5. Run the agent. Work without a branch key is reported as skipped.
        let mut result = self.run_and_stream(prepared, &entry, bill, cancel).await;
        result.relay = result.relay.or(is_skipped.then(DeliveryReport::skipped_without_key));
        self.record_metrics(driver, &result);
        Ok(result)
    }

    async fn acquire_target(
        &self,
        branch: BranchRequest,
        entry: Arc<AgentDefinition>,
        cancel: CancellationToken,
    ) -> anyhow::Result<DeliveryTarget> {
        let relay = self.relay.load_full().context("this service has no relay")?;
        let leave = self.force_stop.clone();
        // The acquisition also collects what an earlier run left on the branch. A cancelled run must not interrupt that
        // collection halfway, so the collection runs in a task of its own and ends early only when the service leaves.
        let begin = async move {
            let begin =
                DeliveryTarget::acquire(relay, branch, Some(&entry), Duration::ZERO, &cancel);
            leave.run_until_cancelled(begin.boxed()).await
        };
        self.tasks.run_detached(begin).await.context(SHUTDOWN_MESSAGE)?
    }

    /// Binds the run's socket and fills its workspace. The sandbox is the long-running one of the run's branch, a warm
    /// one, or a new one.
    async fn prepare_run(
        &self,
        (order, inputs): (RunPlan, RunInputs),
        wanted: &RunSubmission,
        (entry, cancel): (&AgentDefinition, &CancellationToken),
        place: &mut RunPlace,
    ) -> Result<PreparedRun, RunFailure> {
        if let Some(mut key) = wanted.long_running_key(entry) {
            // An earlier version stored workspaces by grant alone. If the grant has one account, such a workspace is
            // that account's.
            if self.grants.has_one_account(&wanted.grant).await {
                key = key.with_inheritance();
            }
            let entered = self.lock_sandbox(&key, cancel, place).await?;
            let claim = self.long_running_pool.claim(cancel, entered, &key, (order, inputs));
            return claim.boxed().await.map_err(RunFailure::from);
        }
        let slots = self.warm_pools.for_agent(&entry.name);
        let prepare = move || match slots.map(|slots| slots.claim(order.clone(), inputs.clone())) {
            Some(Ok(prepared)) => Ok(prepared),
            // A new sandbox would fail for the same reason, or because of what the failed claim left behind.
            Some(Err(warm_pool::WarmClaimError::Failed(error))) => Err(error),
            Some(Err(unclaimed)) => {
                // No warm sandbox fits or is ready; a new sandbox serves the run as well, only later.
                tracing::debug!(run = order.spec.run, %unclaimed, "the run has no slot");
                PreparedRun::new(order, inputs)
            }
            None => PreparedRun::new(order, inputs),
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        prepared.map_err(anyhow::Error::from)?.map_err(RunFailure::from_error)
    }

    /// Locks the sandbox of a key, and waits for the previous run in that sandbox. The waiting run lends its place, so
    /// that other runs can begin. At most `max_runs` runs wait; further runs are refused.
    async fn lock_sandbox(
        &self,
        key: &SandboxKey,
        cancel: &CancellationToken,
        place: &mut RunPlace,
    ) -> Result<SandboxKeyGuard, RunFailure> {
        if let Some(entered) = self.long_running_pool.try_lock_key(key) {
            return Ok(entered);
        }
        let most = self.settings.max_runs;
        let _waits = self
            .waiting_permits
            .try_acquire()
            .map_err(|_| RunFailure::NoSandbox(LongRunningClaimError::TooManyWaiting(most)))?;
        // Lend the place before the wait. A run that held a place while it waited for a key could block the run that
        // holds the key.
        place.lend();
        let entered = self.long_running_pool.lock_key(cancel, key).await?;
        // Lock order: the key first, then a place. A run with a place never waits for a key, so places always become
        // free.
        cancel.run_until_cancelled(place.reclaim()).await.ok_or(RunFailure::Cancelled)?;
        Ok(entered)
    }

    async fn run_and_stream(
        &self,
        prepared: PreparedRun,
        entry: &AgentDefinition,
        bill: &mut UsageRecorder,
        cancel: CancellationToken,
    ) -> RunResult {
        let feed = bill.feed().clone();
        let script = AgentEventParser::new(feed.clone(), entry.stream);
        let output =
            OutputCapture::for_stream(OutputStream::Stderr, prepared.max_output_bytes(), script);
        let ledger = prepared.ledger();
        let ledger = ledger.as_deref();
        let (answered, answer) = oneshot::channel();
        let reins = RunHandles {
            cancel,
            detach_delivery: self.force_stop.clone(),
            on_answer: Some(answered),
        };
        // The box erases the future's type: otherwise the compiler checks `Send` through all of the type, and gives up.
        let run = prepared.run_with_output(output, reins).boxed();
        let told = async {
            let answer = tokio::select! {
                answer = answer => answer.ok(),
                never = bill.follow_log(ledger) => match never {},
            };
            // The watchers receive the answer now, because the delivery of the work may take much longer. The calls are
            // recorded first, so that the usage comes before the answer.
            if let Some(answer) = answer.as_ref().and_then(outcome::answer_event) {
                bill.record_final(ledger).await;
                feed.publish(RunEventKind::AssistantFinal, &answer);
            }
            bill.follow_log(ledger).await
        };
        tokio::select! {
            // Only the run completes. `told` follows the log for as long as it is polled.
            result = run => result,
            never = told => match never {},
        }
    }

    fn record_metrics(&self, driver: &'static str, result: &RunResult) {
        let metrics = self.gateway_host.metrics();
        if let Some(start) = result.timings.start_ms {
            metrics.record_sandbox_start_time(driver, Duration::from_millis(start));
        }
        if let Some(DeliveryReport::Delivered(delivered)) = &result.relay {
            metrics.record_delivery_verdict(delivered.verdict.unwrap_or("none"));
        }
    }

    /// Writes a run's end, and retries until the write succeeds or the service leaves. The audit log is closed and
    /// sealed first, because no other task closes the log. If the service leaves, the next process writes the end.
    pub(super) async fn persist_end(&self, bill: &mut UsageRecorder, mut ended: RunEnd) {
        let run = bill.feed().run_id().to_owned();
        let (mut pause, mut is_sealed) = (MIN_RETRY_DELAY, false);
        loop {
            let tried = async {
                // The seal is taken once. A retry after the seal repeats only the write to the run store.
                if !is_sealed {
                    ended.log = Box::pin(self.seal_log(&run)).await?;
                    is_sealed = true;
                }
                self.try_persist_end(bill, &ended).await
            };
            let Err(error) = tried.await else { return };
            tracing::error!(run, "cannot store the end of the run; trying again: {error:#}");
            if self.force_stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                tracing::warn!(run, "the run's end is not written; the next process writes it");
                return self.run_store.detach_watchers(bill.feed());
            }
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        }
    }

    /// Books the run's calls, then writes its end. The order matters: the service never looks for calls of a run that
    /// has ended.
    pub(super) async fn try_persist_end(
        &self,
        bill: &mut UsageRecorder,
        ended: &RunEnd,
    ) -> anyhow::Result<()> {
        bill.try_record_new().await?;
        self.withdraw_questions(bill.feed().run_id()).await?;
        let ended = RunEnd { charged: bill.charged(), ..ended.clone() };
        self.run_store.finish_run(bill.feed(), ended).await?;
        self.remove_excess_records().await;
        Ok(())
    }
}

fn outcome_label(done: &Result<RunResult, RunFailure>) -> &'static str {
    match done {
        Ok(result) => result.error_code.map_or("ok", RunErrorCode::as_str),
        Err(failed) => failed.code(),
    }
}

/// The error text of a run that the service's shutdown cancelled.
const SHUTDOWN_MESSAGE: &str = "the service was stopped, and has not waited for the run";

/// The maximum wait for the log of a failed run to close. Our choice: longer than the gateway waits for open calls by
/// default.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(15);

/// The first delay between two attempts to write a run's end, and the interval of polling a closing run. Our choice.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The longest delay between two attempts to write a run's end. Our choice.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
