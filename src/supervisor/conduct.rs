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

use super::admission::Place;
use super::bill::Bill;
use super::script::Script;
use super::wanted::Line;
use super::{Shared, Wanted, ending};
use crate::app::Closing;
use crate::catalog::Entry;
use crate::grant::Denied;
use crate::journal::{Ended, Feed, Kind};
use crate::relay;
use crate::runner::delivery::{Relayed, Target};
use crate::runner::residents::{Entered, Key, Unclaimed};
use crate::runner::{ErrorCode, Order, Prepared, Reins, RunResult, slots};
use crate::sandbox::output::{Output, Stream};

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("it was cancelled before it began")]
    Cancelled,
    #[error("it was cancelled before it began: {0}")]
    Grant(Denied),
    #[error("the branch cannot be worked on: {0:#}")]
    Branch(anyhow::Error),
    #[error("{0:#}")]
    Large(anyhow::Error),
    #[error("there is no sandbox for it: {0}")]
    Busy(Unclaimed),
    #[error("{0:#}")]
    Internal(#[from] anyhow::Error),
    /// A fault of ours, which ends no other run.
    #[error("the service has failed in the midst of it; its log says where")]
    Panicked,
}

impl Failed {
    /// Why a run cannot be prepared. How large a repository is, is no fault of ours.
    fn of(error: anyhow::Error) -> Self {
        match error.downcast_ref() {
            Some(relay::Error::Large { .. } | relay::Error::Costly { .. }) => Self::Large(error),
            _ => Self::Internal(error),
        }
    }

    /// As a result's.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Cancelled => ErrorCode::Cancelled.as_str(),
            Self::Grant(_) => "grant_revoked",
            Self::Branch(_) => "branch_unavailable",
            Self::Large(_) | Self::Busy(Unclaimed::NoRoom { .. }) => {
                ErrorCode::WorkspaceFull.as_str()
            }
            Self::Busy(_) => "sandbox_busy",
            Self::Internal(_) | Self::Panicked => ErrorCode::Internal.as_str(),
        }
    }
}

impl From<Unclaimed> for Failed {
    fn from(unclaimed: Unclaimed) -> Self {
        match unclaimed {
            Unclaimed::Order(error) => Self::of(error),
            Unclaimed::Cancelled => Self::Cancelled,
            busy => Self::Busy(busy),
        }
    }
}

impl Shared {
    /// Runs it, and writes down how it went, whatever happens.
    pub(super) async fn run_to_its_end(
        &self,
        wanted: &Wanted,
        feed: &Feed,
        cancel: CancellationToken,
        place: Place,
    ) {
        let (mut bill, mut place) = (self.bill(feed), Some(place));
        let run = async {
            let (metrics, begun) = (self.seats.metrics(), Instant::now());
            let live = metrics.sandbox_started(&wanted.agent);
            let run = self.try_run(wanted, &mut bill, cancel, &mut place);
            let run = AssertUnwindSafe(Box::pin(run));
            let mut done = run.catch_unwind().await.unwrap_or(Err(Failed::Panicked));
            if done.is_err() {
                self.close_left(feed.run()).await;
            }
            self.own_up(&mut done);
            drop(live);
            metrics.sandbox_ended(&wanted.agent, outcome(&done), begun.elapsed());
            metrics.events_dropped(feed.dropped());
            match &done {
                Err(error @ (Failed::Internal(_) | Failed::Panicked)) => {
                    tracing::error!(run = feed.run(), "the run has failed: {error:#}");
                }
                // What was asked for cannot be had; whoever asked is told.
                Err(error) => tracing::info!(run = feed.run(), "the run has not begun: {error:#}"),
                Ok(_) => (),
            }
            self.end(&mut bill, self.ended(done, feed)).await;
        };
        tokio::join!(run, self.journal.keep(feed));
    }

    /// The end that is written down of a run, as its caller may read it.
    pub(super) fn ended(&self, mut done: Result<RunResult, Failed>, feed: &Feed) -> Ended {
        match &mut done {
            Ok(result) => {
                self.mask_result(result);
                ending::of_result(result, feed)
            }
            Err(failed) => {
                let (code, mut message) = (failed.code(), failed.to_string());
                self.mask(feed.run(), &mut message);
                ending::failed(code, &message, feed)
            }
        }
    }

    pub(super) fn bill(&self, feed: &Feed) -> Bill {
        Bill::new(self.books.clone(), feed.clone(), self.settings.audit_log(feed.run()))
    }

    /// After a fault: the calls that are under way are settled, and the log is closed, as at any other end.
    async fn close_left(&self, run: &str) {
        let runs = self.seats.runs();
        let closed = async {
            // A run that is not open never was, or is being closed already.
            let _ = runs.close(run).await;
            while runs.closing(run) == Some(Closing::Draining) {
                tokio::time::sleep(FIRST_PAUSE).await;
            }
        };
        if tokio::time::timeout(CLOSING, closed).await.is_err() {
            tracing::error!(run, "what a fault has left open is not closed: calls may be missing");
        }
    }

    /// Nobody is to look for who has cancelled a run that the service has not waited for.
    fn own_up(&self, done: &mut Result<RunResult, Failed>) {
        if let Ok(result) = done
            && result.error_code == Some(ErrorCode::Cancelled)
            && self.leave.is_cancelled()
        {
            result.error.get_or_insert_with(|| NOT_AWAITED.to_owned());
        }
    }

    async fn try_run(
        &self,
        wanted: &Wanted,
        bill: &mut Bill,
        cancel: CancellationToken,
        place: &mut Option<Place>,
    ) -> Result<RunResult, Failed> {
        let feed = bill.feed().clone();
        let run = feed.run();
        let (config, catalog) = (self.config.load_full(), self.catalog.load_full());
        let entry = Arc::clone(catalog.find(&wanted.agent).context("it is gone")?);
        let mut order = wanted.order(run, (&self.settings, &config, &catalog))?;
        if let Some(agent) = order.agent.as_mut().filter(|agent| agent.models.is_empty()) {
            agent.models = self.models.of(&entry, &config).await;
        }
        self.journal.begin(run, wanted.begun().to_json()).await.map_err(anyhow::Error::from)?;
        feed.tell(
            Kind::RunStarted,
            &json!({"run": run, "agent": entry.name, "model": order.model()}),
        );
        let line = wanted.line(run).map_err(anyhow::Error::from)?;
        if let Some(line) = &line {
            let target = self.target(wanted, line, &entry).boxed();
            let begun = cancel.run_until_cancelled(target).await.ok_or(Failed::Cancelled)?;
            order.target = Some(begun.map_err(Failed::Branch)?);
        }
        let driver = order.driver.name();
        if cancel.is_cancelled() {
            return Err(Failed::Cancelled);
        }
        let prepared = Box::pin(self.prepare(order, wanted, (&entry, &cancel), place)).await?;
        let mut result = self.follow(prepared, &entry, bill, cancel).await;
        result.relay = result.relay.or_else(|| wanted.skipped(line.as_ref()));
        self.count(driver, &result);
        Ok(result)
    }

    async fn target(&self, wanted: &Wanted, line: &Line, entry: &Entry) -> anyhow::Result<Target> {
        let relay = self.relay.load_full().context("this service has no relay")?;
        let (base, leave) = (wanted.branch.base.clone(), self.leave.clone());
        let Line { repository, key } = line.clone();
        // Nobody's cancel takes out by half what an earlier run has left there.
        let begin = async move {
            let begin = Target::begin(relay, repository, &key, base.as_deref()).boxed();
            leave.run_until_cancelled(begin).await
        };
        let target = self.tasks.carry(begin).await.context(NOT_AWAITED)??;
        let target = target.with_pull_request(wanted.branch.pull_request);
        Ok(target.of_grant(&wanted.grant).by(entry))
    }

    /// Binds its socket and fills its workspace; where its agent lives on, in the sandbox of its branch.
    async fn prepare(
        &self,
        mut order: Order,
        wanted: &Wanted,
        (entry, cancel): (&Entry, &CancellationToken),
        place: &mut Option<Place>,
    ) -> Result<Prepared, Failed> {
        order.seats = Some(self.seats.clone());
        if let Some(mut key) = wanted.resident(entry) {
            // What an earlier version has kept for the grant is then this account's.
            if self.grants.has_one_account(&wanted.grant).await {
                key = key.inheriting();
            }
            let entered = self.enter(&key, cancel, place).await?;
            let claimed = self.residents.claim_entered(cancel, entered, &key, order).boxed().await;
            return claimed.map_err(Failed::from);
        }
        let slots = self.stock.of(&entry.name);
        let prepare = move || match slots.map(|slots| slots.claim(order.clone())) {
            Some(Ok(prepared)) => Ok(prepared),
            // A sandbox of its own would fail for the same reason, or for what the claim has left.
            Some(Err(slots::Unclaimed::Order(error))) => Err(error),
            Some(Err(unclaimed)) => {
                tracing::debug!(run = order.spec.run, %unclaimed, "the run has no slot");
                Prepared::new(order)
            }
            None => Prepared::new(order),
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        prepared.map_err(anyhow::Error::from)?.map_err(Failed::of)
    }

    /// Waits for the run before it without a place among the runs: other runs need not wait for that. There are as many
    /// places for those that wait.
    async fn enter(
        &self,
        key: &Key,
        cancel: &CancellationToken,
        place: &mut Option<Place>,
    ) -> Result<Entered, Failed> {
        if let Some(entered) = self.residents.try_enter(key) {
            return Ok(entered);
        }
        let most = self.settings.max_runs;
        let _waits =
            self.waits.try_acquire().map_err(|_| Failed::Busy(Unclaimed::Crowded(most)))?;
        *place = None;
        let entered = self.residents.enter(cancel, key).await?;
        // Whoever has a place never waits for a key, so that one becomes free.
        let again = Arc::clone(&self.places).acquire_owned();
        let again = cancel.run_until_cancelled(again).await.ok_or(Failed::Cancelled)?;
        *place = Some(again.context("the places are gone")?);
        Ok(entered)
    }

    async fn follow(
        &self,
        prepared: Prepared,
        entry: &Entry,
        bill: &mut Bill,
        cancel: CancellationToken,
    ) -> RunResult {
        let feed = bill.feed().clone();
        let script = Script::new(feed.clone(), entry.stream);
        let output = Output::of(Stream::Stderr, prepared.max_output_bytes(), script);
        let ledger = prepared.ledger();
        let ledger = ledger.as_deref();
        let (answered, answer) = oneshot::channel();
        let reins = Reins { cancel, leave: self.leave.clone(), answered: Some(answered) };
        // Boxed without its type: the compiler looks for `Send` through all of it otherwise, and gives up.
        let run = prepared.run_into(output, reins).boxed();
        let told = async {
            let answer = tokio::select! {
                answer = answer => answer.ok(),
                never = bill.follow(ledger) => match never {},
            };
            // Its work may be on its way for longer.
            if let Some(answer) = answer.as_ref().and_then(ending::answer) {
                bill.take_last(ledger).await;
                feed.tell(Kind::AssistantFinal, &answer);
            }
            bill.follow(ledger).await
        };
        tokio::select! {
            result = run => result,
            never = told => match never {},
        }
    }

    fn count(&self, driver: &'static str, result: &RunResult) {
        let metrics = self.seats.metrics();
        if let Some(start) = result.timings.start_ms {
            metrics.sandbox_start(driver, Duration::from_millis(start));
        }
        if let Some(Relayed::Delivered(delivered)) = &result.relay {
            metrics.relay_delivered(delivered.verdict.unwrap_or("none"));
        }
    }

    /// What cannot be written is tried again, first the end of the audit log: nobody else will end it, but the next process
    /// when this one is not to wait any longer.
    pub(super) async fn end(&self, bill: &mut Bill, mut ended: Ended) {
        let run = bill.feed().run().to_owned();
        let (mut pause, mut is_sealed) = (FIRST_PAUSE, false);
        loop {
            let tried = async {
                if !is_sealed {
                    ended.log = Box::pin(self.seal(&run)).await?;
                    is_sealed = true;
                }
                self.try_end(bill, &ended).await
            };
            let Err(error) = tried.await else { return };
            tracing::error!(run, "cannot write down how a run has ended: {error:#}");
            if self.leave.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                tracing::warn!(run, "its end is left to the next process");
                return self.journal.part(bill.feed());
            }
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Its calls are booked before: of a run that has ended, nobody looks for any.
    pub(super) async fn try_end(&self, bill: &mut Bill, ended: &Ended) -> anyhow::Result<()> {
        bill.try_take().await?;
        let ended = Ended { charged: bill.charged(), ..ended.clone() };
        Ok(self.journal.end(bill.feed(), ended).await?)
    }
}

fn outcome(done: &Result<RunResult, Failed>) -> &'static str {
    match done {
        Ok(result) => result.error_code.map_or("ok", ErrorCode::as_str),
        Err(failed) => failed.code(),
    }
}

const NOT_AWAITED: &str = "the service was stopped, and has not waited for the run";

/// Longer than open calls are waited for, by default.
const CLOSING: Duration = Duration::from_secs(15);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);
