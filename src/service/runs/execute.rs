//! One run of a service, from its row to its end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::FutureExt;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admission::RunPermit;
use super::agent_events::AgentEventParser;
use super::submission::BranchRef;
use super::usage_recorder::UsageRecorder;
use super::{RunServiceInner, RunSubmission, outcome};
use crate::gateway::process::RunClosingState;
use crate::relay::repo;
use crate::runner::agents::AgentDefinition;
use crate::runner::branch_delivery::{DeliveryReport, DeliveryTarget};
use crate::runner::long_running::{LongRunningClaimError, SandboxKey, SandboxKeyGuard};
use crate::runner::{PreparedRun, RunErrorCode, RunHandles, RunPlan, RunResult, warm_pool};
use crate::sandbox::output::{OutputCapture, OutputStream};
use crate::service::auth::AccessDeniedError;
use crate::service::store::{EventFeed, RunEnd, RunEventKind};

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunFailure {
    #[error("it was cancelled before it began")]
    Cancelled,
    #[error("it was cancelled before it began: {0}")]
    Grant(AccessDeniedError),
    #[error("the branch cannot be worked on: {0:#}")]
    Branch(anyhow::Error),
    #[error("{0:#}")]
    Large(anyhow::Error),
    #[error("there is no sandbox for it: {0}")]
    Busy(LongRunningClaimError),
    #[error("{0:#}")]
    Internal(#[from] anyhow::Error),
    /// A fault of ours, which ends no other run.
    #[error("the service has failed in the midst of it; its log says where")]
    Panicked,
}

impl RunFailure {
    /// Why a run cannot be prepared. How large a repository is, is no fault of ours.
    fn from_error(error: anyhow::Error) -> Self {
        match error.downcast_ref() {
            Some(repo::RepoError::Large { .. } | repo::RepoError::Costly { .. }) => {
                Self::Large(error)
            }
            _ => Self::Internal(error),
        }
    }

    /// As a result's.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Cancelled => RunErrorCode::Cancelled.as_str(),
            Self::Grant(_) => "grant_revoked",
            Self::Branch(_) => "branch_unavailable",
            Self::Large(_) | Self::Busy(LongRunningClaimError::NoRoom { .. }) => {
                RunErrorCode::WorkspaceFull.as_str()
            }
            Self::Busy(_) => "sandbox_busy",
            Self::Internal(_) | Self::Panicked => RunErrorCode::Internal.as_str(),
        }
    }
}

impl From<LongRunningClaimError> for RunFailure {
    fn from(unclaimed: LongRunningClaimError) -> Self {
        match unclaimed {
            LongRunningClaimError::Order(error) => Self::from_error(error),
            LongRunningClaimError::Cancelled => Self::Cancelled,
            busy => Self::Busy(busy),
        }
    }
}

impl RunServiceInner {
    /// Runs it, and writes down how it went, whatever happens.
    pub(super) async fn execute_run(
        &self,
        wanted: &RunSubmission,
        feed: &EventFeed,
        cancel: CancellationToken,
        place: RunPermit,
    ) {
        let (mut bill, mut place) = (self.usage_recorder(feed), Some(place));
        let run = async {
            let (metrics, begun) = (self.seats.metrics(), Instant::now());
            let live = metrics.record_run_started(&wanted.agent);
            let run = self.execute(wanted, &mut bill, cancel, &mut place);
            let run = AssertUnwindSafe(Box::pin(run));
            let mut done = run.catch_unwind().await.unwrap_or(Err(RunFailure::Panicked));
            if done.is_err() {
                self.close_abandoned_log(feed.run_id()).await;
            }
            self.explain_shutdown_cancel(&mut done);
            drop(live);
            metrics.record_run_ended(&wanted.agent, outcome_label(&done), begun.elapsed());
            metrics.record_dropped_events(feed.dropped_count());
            match &done {
                Err(error @ (RunFailure::Internal(_) | RunFailure::Panicked)) => {
                    tracing::error!(run = feed.run_id(), "the run has failed: {error:#}");
                }
                // What was asked for cannot be had; whoever asked is told.
                Err(error) => {
                    tracing::info!(run = feed.run_id(), "the run has not begun: {error:#}");
                }
                Ok(_) => (),
            }
            self.persist_end(&mut bill, self.run_end(done, feed)).await;
        };
        tokio::join!(run, self.journal.persist_events(feed));
    }

    /// The end that is written down of a run, as its caller may read it.
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
            self.books.clone(),
            feed.clone(),
            self.settings.audit_log_path(feed.run_id()),
        )
    }

    /// After a fault: the calls that are under way are settled, and the log is closed, as at any other end.
    async fn close_abandoned_log(&self, run: &str) {
        let runs = self.seats.run_manager();
        let closed = async {
            // A run that is not open never was, or is being closed already.
            let _ = runs.close_run(run).await;
            while runs.closing_state(run) == Some(RunClosingState::Draining) {
                tokio::time::sleep(MIN_RETRY_DELAY).await;
            }
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::error!(run, "what a fault has left open is not closed: calls may be missing");
        }
    }

    /// Nobody is to look for who has cancelled a run that the service has not waited for.
    fn explain_shutdown_cancel(&self, done: &mut Result<RunResult, RunFailure>) {
        if let Ok(result) = done
            && result.error_code == Some(RunErrorCode::Cancelled)
            && self.leave.is_cancelled()
        {
            result.error.get_or_insert_with(|| SHUTDOWN_MESSAGE.to_owned());
        }
    }

    async fn execute(
        &self,
        wanted: &RunSubmission,
        bill: &mut UsageRecorder,
        cancel: CancellationToken,
        place: &mut Option<RunPermit>,
    ) -> Result<RunResult, RunFailure> {
        let feed = bill.feed().clone();
        let run = feed.run_id();
        let (config, catalog) = (self.config.load_full(), self.catalog.load_full());
        let entry = Arc::clone(catalog.find_agent(&wanted.agent).context("it is gone")?);
        let mut order = wanted.run_plan(run, (&self.settings, &config, &catalog))?;
        if let Some(agent) = order.agent.as_mut().filter(|agent| agent.models.is_empty()) {
            agent.models = self.models.for_agent(&entry, &config).await;
        }
        self.journal
            .mark_running(run, wanted.without_content().to_json())
            .await
            .map_err(anyhow::Error::from)?;
        feed.publish(
            RunEventKind::RunStarted,
            &json!({"run": run, "agent": entry.name, "model": order.model()}),
        );
        let line = wanted.branch_ref(run).map_err(anyhow::Error::from)?;
        if let Some(line) = &line {
            let target = self.acquire_target(wanted, line, &entry).boxed();
            let begun = cancel.run_until_cancelled(target).await.ok_or(RunFailure::Cancelled)?;
            order.target = Some(begun.map_err(RunFailure::Branch)?);
        }
        let driver = order.driver.name();
        if cancel.is_cancelled() {
            return Err(RunFailure::Cancelled);
        }
        let prepared = Box::pin(self.prepare_run(order, wanted, (&entry, &cancel), place)).await?;
        let mut result = self.run_and_stream(prepared, &entry, bill, cancel).await;
        result.relay = result.relay.or_else(|| wanted.skipped_delivery(line.as_ref()));
        self.record_metrics(driver, &result);
        Ok(result)
    }

    async fn acquire_target(
        &self,
        wanted: &RunSubmission,
        line: &BranchRef,
        entry: &AgentDefinition,
    ) -> anyhow::Result<DeliveryTarget> {
        let relay = self.relay.load_full().context("this service has no relay")?;
        let (base, leave) = (wanted.branch.base.clone(), self.leave.clone());
        let BranchRef { repository, key } = line.clone();
        // Nobody's cancel takes out by half what an earlier run has left there.
        let begin = async move {
            let begin = DeliveryTarget::acquire(relay, repository, &key, base.as_deref()).boxed();
            leave.run_until_cancelled(begin).await
        };
        let target = self.tasks.run_detached(begin).await.context(SHUTDOWN_MESSAGE)??;
        let target = target.with_pull_request(wanted.branch.pull_request);
        Ok(target.for_grant(&wanted.grant).for_agent(entry))
    }

    /// Binds its socket and fills its workspace; where its agent lives on, in the sandbox of its branch.
    async fn prepare_run(
        &self,
        mut order: RunPlan,
        wanted: &RunSubmission,
        (entry, cancel): (&AgentDefinition, &CancellationToken),
        place: &mut Option<RunPermit>,
    ) -> Result<PreparedRun, RunFailure> {
        order.seats = Some(self.seats.clone());
        if let Some(mut key) = wanted.long_running_key(entry) {
            // What an earlier version has kept for the grant is then this account's.
            if self.grants.has_one_account(&wanted.grant).await {
                key = key.with_inheritance();
            }
            let entered = self.lock_sandbox(&key, cancel, place).await?;
            let claimed = self.residents.claim_locked(cancel, entered, &key, order).boxed().await;
            return claimed.map_err(RunFailure::from);
        }
        let slots = self.stock.for_agent(&entry.name);
        let prepare = move || match slots.map(|slots| slots.claim(order.clone())) {
            Some(Ok(prepared)) => Ok(prepared),
            // A sandbox of its own would fail for the same reason, or for what the claim has left.
            Some(Err(warm_pool::WarmClaimError::Order(error))) => Err(error),
            Some(Err(unclaimed)) => {
                tracing::debug!(run = order.spec.run, %unclaimed, "the run has no slot");
                PreparedRun::new(order)
            }
            None => PreparedRun::new(order),
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        prepared.map_err(anyhow::Error::from)?.map_err(RunFailure::from_error)
    }

    /// Waits for the run before it without a place among the runs: other runs need not wait for that. There are as many
    /// places for those that wait.
    async fn lock_sandbox(
        &self,
        key: &SandboxKey,
        cancel: &CancellationToken,
        place: &mut Option<RunPermit>,
    ) -> Result<SandboxKeyGuard, RunFailure> {
        if let Some(entered) = self.residents.try_lock_key(key) {
            return Ok(entered);
        }
        let most = self.settings.max_runs;
        let _waits = self
            .waits
            .try_acquire()
            .map_err(|_| RunFailure::Busy(LongRunningClaimError::Crowded(most)))?;
        *place = None;
        let entered = self.residents.lock_key(cancel, key).await?;
        // Whoever has a place never waits for a key, so that one becomes free.
        let again = Arc::clone(&self.places).acquire_owned();
        let again = cancel.run_until_cancelled(again).await.ok_or(RunFailure::Cancelled)?;
        *place = Some(again.context("the places are gone")?);
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
        let reins = RunHandles { cancel, leave: self.leave.clone(), answered: Some(answered) };
        // Boxed without its type: the compiler looks for `Send` through all of it otherwise, and gives up.
        let run = prepared.run_with_output(output, reins).boxed();
        let told = async {
            let answer = tokio::select! {
                answer = answer => answer.ok(),
                never = bill.follow_log(ledger) => match never {},
            };
            // Its work may be on its way for longer.
            if let Some(answer) = answer.as_ref().and_then(outcome::answer_event) {
                bill.record_final(ledger).await;
                feed.publish(RunEventKind::AssistantFinal, &answer);
            }
            bill.follow_log(ledger).await
        };
        tokio::select! {
            result = run => result,
            never = told => match never {},
        }
    }

    fn record_metrics(&self, driver: &'static str, result: &RunResult) {
        let metrics = self.seats.metrics();
        if let Some(start) = result.timings.start_ms {
            metrics.record_sandbox_start_time(driver, Duration::from_millis(start));
        }
        if let Some(DeliveryReport::Delivered(delivered)) = &result.relay {
            metrics.record_delivery_verdict(delivered.verdict.unwrap_or("none"));
        }
    }

    /// What cannot be written is tried again, first the end of the audit log: nobody else will end it, but the next process
    /// when this one is not to wait any longer.
    pub(super) async fn persist_end(&self, bill: &mut UsageRecorder, mut ended: RunEnd) {
        let run = bill.feed().run_id().to_owned();
        let (mut pause, mut is_sealed) = (MIN_RETRY_DELAY, false);
        loop {
            let tried = async {
                if !is_sealed {
                    ended.log = Box::pin(self.seal_log(&run)).await?;
                    is_sealed = true;
                }
                self.try_persist_end(bill, &ended).await
            };
            let Err(error) = tried.await else { return };
            tracing::error!(run, "cannot write down how a run has ended: {error:#}");
            if self.leave.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                tracing::warn!(run, "its end is left to the next process");
                return self.journal.detach_watchers(bill.feed());
            }
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        }
    }

    /// Its calls are booked before: of a run that has ended, nobody looks for any.
    pub(super) async fn try_persist_end(
        &self,
        bill: &mut UsageRecorder,
        ended: &RunEnd,
    ) -> anyhow::Result<()> {
        bill.try_record_new().await?;
        let ended = RunEnd { charged: bill.charged(), ..ended.clone() };
        Ok(self.journal.finish_run(bill.feed(), ended).await?)
    }
}

fn outcome_label(done: &Result<RunResult, RunFailure>) -> &'static str {
    match done {
        Ok(result) => result.error_code.map_or("ok", RunErrorCode::as_str),
        Err(failed) => failed.code(),
    }
}

const SHUTDOWN_MESSAGE: &str = "the service was stopped, and has not waited for the run";

/// Longer than open calls are waited for, by default.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(15);

const MIN_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
