//! The store of questions about tool calls: rows of a database, and the calls of this process that wait for them.
//!
//! **Invariant:** a caller learns of a step only after its transaction is on disk.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, Transaction, params};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit, watch};

use super::open_questions::{RunOwnerFuture, question_places};
use super::outbox::Outbox;
use super::present_tools::PresentTools;
pub use super::question_rows::{ApprovalDecision, DecisionOutcome, MAX_QUESTIONS_PER_RUN};
use super::question_rows::{COLUMNS, close_rows, find_row, insert_row, read_row, write_decision};
use super::reach::{ApprovalReach, reach_condition};
use super::standing::StandingApproval;
use super::{ApprovalRow, ApprovalState, standing_rows, to_unix_millis};
use crate::base::db::{DatabaseError, SqliteDatabase};
use crate::base::file_digest::FileDigestCache;
use crate::base::keyed_permits::{KeyedPermit, KeyedPermits};
use crate::base::log_line_limiter::LogLineLimiter;
use crate::base::wall_clock::StampClock;

/// A function that is told of each change of a standing approval, with the run that caused the change.
type StandingObserver = dyn Fn(&str, &StandingApproval) + Send + Sync;

/// The questions of one process. Clones share the same questions.
#[derive(Clone)]
pub struct ApprovalStore {
    pub(super) database: SqliteDatabase,
    /// The calls that wait for the state of their question.
    waiting: Arc<Mutex<HashMap<String, watch::Sender<ApprovalState>>>>,
    observer: Arc<dyn Fn(&ApprovalRow) + Send + Sync>,
    /// Permits for the calls of all runs that wait for a larger budget.
    unfunded: Arc<Semaphore>,
    pub(super) outbox: Arc<Outbox>,
    /// The digests of the programs that people are asked about.
    files: Arc<FileDigestCache>,
    failure_lines: Arc<LogLineLimiter>,
    /// The tools of the present configuration; `None` in a process whose configuration stays.
    present: Arc<RwLock<Option<Arc<PresentTools>>>>,
    places: Arc<KeyedPermits>,
    pub(super) owner: Arc<dyn Fn(String) -> RunOwnerFuture + Send + Sync>,
    pub(super) standing_observer: Arc<StandingObserver>,
    /// The salt of the digests of standing approvals, once it is read.
    pub(super) salt: Arc<OnceCell<Arc<str>>>,
    clock: Arc<StampClock>,
}

/// The state of one question, for the call that waits for it. Dropping the watch forgets the call, not the question.
pub struct ApprovalWatch {
    id: String,
    store: ApprovalStore,
    state: watch::Receiver<ApprovalState>,
    _place: KeyedPermit,
}

/// The filter of a list of questions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalFilter {
    pub state: Option<ApprovalState>,
    pub run: Option<String>,
    /// The agents and accounts whose questions are listed.
    pub reach: ApprovalReach,
    /// The last question of the page before.
    pub after: Option<String>,
    pub limit: u32,
}

impl ApprovalStore {
    /// Creates the store on a database that has our [`APPROVAL_SCHEMA`](super::APPROVAL_SCHEMA).
    pub fn new(database: SqliteDatabase) -> Self {
        let unfunded = Arc::new(Semaphore::new(MAX_UNFUNDED_CALLS));
        Self {
            database,
            waiting: Arc::default(),
            observer: Arc::new(|_| ()),
            unfunded,
            outbox: Arc::default(),
            files: Arc::default(),
            failure_lines: Arc::default(),
            present: Arc::default(),
            places: question_places(),
            owner: Arc::new(|_| Box::pin(async { None })),
            standing_observer: Arc::new(|_, _| ()),
            salt: Arc::default(),
            clock: Arc::default(),
        }
    }

    /// Sets the function that receives each row after a step: a new question, and a question that was closed.
    #[must_use]
    pub fn with_observer(self, observer: impl Fn(&ApprovalRow) + Send + Sync + 'static) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }

    /// Sets the function that returns the owner of a run. The open questions of one owner are bounded.
    #[must_use]
    pub fn with_owners(
        self,
        owner: impl Fn(String) -> RunOwnerFuture + Send + Sync + 'static,
    ) -> Self {
        Self { owner: Arc::new(owner), ..self }
    }

    /// Sets the function that receives each standing approval after a step, and the run that the step is about.
    #[must_use]
    pub fn with_standing_observer(
        self,
        observer: impl Fn(&str, &StandingApproval) + Send + Sync + 'static,
    ) -> Self {
        Self { standing_observer: Arc::new(observer), ..self }
    }

    /// Sets the clock of all steps.
    #[must_use]
    pub fn with_clock(self, clock: StampClock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// Returns the time of a step. A wall clock that is set back makes no question or approval live longer.
    pub fn read_time(&self) -> SystemTime {
        self.clock.read_time()
    }

    pub fn now_ms(&self) -> i64 {
        to_unix_millis(self.read_time())
    }

    /// Adds a question. Returns `None` if the run has asked too often, or too many questions are open.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then no person is asked.
    pub async fn ask(&self, row: ApprovalRow) -> Result<Option<ApprovalWatch>, DatabaseError> {
        let owner = (self.owner)(row.run.clone()).await;
        let Some(place) = self.places.try_take(owner.as_deref()) else { return Ok(None) };
        // The sender exists before the row, so that no answer is missed.
        let (sender, state) = watch::channel(ApprovalState::Pending);
        self.lock_waiting().insert(row.id.clone(), sender);
        let watch = ApprovalWatch { id: row.id.clone(), store: self.clone(), state, _place: place };
        let (written, outbox) = (row.clone(), Arc::clone(&self.outbox));
        let is_added = self
            .database
            .write_in_transaction(move |change| {
                let is_added = insert_row(change, &written)?;
                if is_added {
                    outbox.add_message(change, &written, written.requested_ms)?;
                }
                Ok(is_added)
            })
            .await?;
        if !is_added {
            return Ok(None);
        }
        (self.observer)(&row);
        self.outbox.wake_sender();
        Ok(Some(watch))
    }

    /// Answers a question.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the question is not answered.
    pub async fn decide(
        &self,
        id: &str,
        decision: ApprovalDecision,
        now: SystemTime,
    ) -> Result<DecisionOutcome, DatabaseError> {
        let (id, now) = (id.to_owned(), to_unix_millis(now));
        let outbox = Arc::clone(&self.outbox);
        let outcome = self
            .database
            .write_in_transaction(move |change| {
                let outcome = write_decision(change, &id, &decision, now)?;
                if let DecisionOutcome::Decided(row) = &outcome {
                    outbox.add_message(change, row, now)?;
                }
                Ok(outcome)
            })
            .await?;
        if let DecisionOutcome::Decided(row) = &outcome {
            self.publish_row(row);
        }
        Ok(outcome)
    }

    /// Uses an approval up for a call, or for a raise of limits, and returns true if it may take effect. At most one caller ever gets true.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the call must not begin.
    pub async fn consume(
        &self,
        id: &str,
        digest: &str,
        call: Option<&str>,
        now: SystemTime,
    ) -> Result<bool, DatabaseError> {
        let (id, digest, call) = (id.to_owned(), digest.to_owned(), call.map(str::to_owned));
        let now = to_unix_millis(now);
        let consume = "UPDATE approval SET state = 'consumed', arguments = NULL, call = ?3
                       WHERE id = ?1 AND digest = ?2 AND state = 'approved' AND not_after > ?4";
        let changed = self
            .database
            .write_in_transaction(move |change| {
                change.execute(consume, params![id, digest, call, now])
            })
            .await?;
        Ok(changed == 1)
    }

    /// Closes a question without an answer, as expired or withdrawn. Returns the row as it is now: an answer that came
    /// first stays.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn close(
        &self,
        id: &str,
        (state, reason): (ApprovalState, &'static str),
        now: SystemTime,
    ) -> Result<Option<ApprovalRow>, DatabaseError> {
        let (id, now) = (id.to_owned(), to_unix_millis(now));
        let outbox = Arc::clone(&self.outbox);
        let closed = self
            .database
            .write_in_transaction(move |change| {
                let closed = close_rows(change, ("id = ?1", &id), (state, reason), now)?;
                for row in &closed {
                    outbox.add_message(change, row, now)?;
                }
                Ok((!closed.is_empty(), find_row(change, &id)?))
            })
            .await?;
        if let (true, Some(row)) = &closed {
            self.publish_row(row);
        }
        Ok(closed.1)
    }

    /// Withdraws the open questions of a run that has ended.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn withdraw_run(&self, run: &str, now: SystemTime) -> Result<usize, DatabaseError> {
        self.withdraw_where("run = ?1", run, now).await
    }

    /// Withdraws the open questions of an earlier process, whose calls have ended with it.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn withdraw_all(&self, now: SystemTime) -> Result<usize, DatabaseError> {
        self.withdraw_where("?1 = ''", "", now).await
    }

    async fn withdraw_where(
        &self,
        condition: &'static str,
        value: &str,
        now: SystemTime,
    ) -> Result<usize, DatabaseError> {
        let (value, now) = (value.to_owned(), to_unix_millis(now));
        let end = (ApprovalState::Withdrawn, RUN_ENDED);
        let outbox = Arc::clone(&self.outbox);
        self.database
            .write_in_transaction(move |change| {
                standing_rows::end_run_approvals(change, (condition, &value))?;
                let closed = close_rows(change, (condition, &value), end, now)?;
                for row in &closed {
                    outbox.add_message(change, row, now)?;
                }
                Ok(closed.len())
            })
            .await
            .inspect(|_| self.outbox.wake_sender())
    }

    /// Deletes the closed questions and standing approvals that were made before a time. Returns the number of questions.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn forget_before(&self, before: SystemTime) -> Result<usize, DatabaseError> {
        let (before, now) = (to_unix_millis(before), self.now_ms());
        let delete =
            "DELETE FROM approval WHERE requested < ?1 AND state NOT IN ('pending', 'approved')";
        let forget = move |change: &Transaction<'_>| {
            standing_rows::forget_before(change, (before, now))?;
            change.execute(delete, [before])
        };
        self.database.write_in_transaction(forget).await
    }

    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find(&self, id: &str) -> Result<Option<ApprovalRow>, DatabaseError> {
        let id = id.to_owned();
        self.database.read_committed(move |view| find_row(view, &id)).await
    }

    /// Returns a page of the questions that match a filter, without arguments: pending questions with the oldest first, so
    /// that no later one hides it, and others with the newest first.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn list(&self, filter: ApprovalFilter) -> Result<Vec<ApprovalRow>, DatabaseError> {
        // Arguments may be long. A page of them would cost far more than its rows.
        let columns = COLUMNS.replace("arguments", "NULL AS arguments");
        // The index of open questions needs its own condition.
        let (state, beyond, order) = match filter.state {
            Some(ApprovalState::Pending) => {
                ("state IN ('pending', 'approved') AND state = ?1", ">", "ASC")
            }
            _ => ("(?1 IS NULL OR state = ?1)", "<", "DESC"),
        };
        let reach = reach_condition();
        let query = format!(
            "SELECT {columns} FROM approval WHERE {state} AND (?2 IS NULL OR run = ?2)
             AND (?3 IS NULL OR (requested, id) {beyond} (SELECT requested, id FROM approval WHERE id = ?3))
             AND {reach} ORDER BY requested {order}, id {order} LIMIT ?4"
        );
        let read = move |view: &Connection| {
            let ApprovalFilter { state, run, reach, after, limit } = filter;
            let [agents, accounts] = reach.parameters();
            let state = state.map(ApprovalState::as_str);
            view.prepare_cached(&query)?
                .query_map(params![state, run, after, limit, agents, accounts], read_row)?
                .collect()
        };
        self.database.read_committed(read).await
    }

    /// Waits for the answer to a question, the end of its time, or `run_ends`. Returns the row as it is then.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn wait_resolved(
        &self,
        watch: &mut ApprovalWatch,
        not_after_ms: i64,
        run_ends: impl Future<Output = ()>,
    ) -> Result<Option<ApprovalRow>, DatabaseError> {
        let left = not_after_ms.saturating_sub(self.now_ms());
        let left = Duration::from_millis(left.max(0).cast_unsigned());
        let end = tokio::select! {
            biased;
            () = watch.wait_answered() => None,
            () = run_ends => Some((ApprovalState::Withdrawn, RUN_ENDED)),
            () = tokio::time::sleep(left) => Some((ApprovalState::Expired, EXPIRED)),
        };
        match end {
            None => self.find(&watch.id).await,
            // An answer that was written at the same moment stays. The row says which came first.
            Some(end) => self.close(&watch.id, end, self.read_time()).await,
        }
    }

    /// Sets the tools of the present configuration. A call whose tool is not among them does not begin.
    pub fn set_present_tools(&self, tools: PresentTools) {
        *self.present.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(tools));
    }

    pub fn present_tools(&self) -> Option<Arc<PresentTools>> {
        self.present.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns true if the present configuration has a tool for an agent, with this definition and these rules.
    pub fn has_tool(&self, names: (&str, &str), digests: (&str, &str)) -> bool {
        self.present_tools().is_none_or(|present| present.has_tool(names, digests))
    }

    /// Returns true if the present configuration lets people allow more than one call.
    pub fn allows_standing(&self) -> bool {
        self.present_tools().is_none_or(|present| present.approvals.has_standing())
    }

    pub fn file_digests(&self) -> &Arc<FileDigestCache> {
        &self.files
    }

    /// Returns the limit of the log lines about questions that cannot be asked.
    pub fn failure_lines(&self) -> &LogLineLimiter {
        &self.failure_lines
    }

    /// Takes a permit for a call that waits for a larger budget; `None` if the calls of all runs hold all permits.
    pub fn hold_unfunded_call(&self) -> Option<SemaphorePermit<'_>> {
        self.unfunded.try_acquire().ok()
    }

    fn publish_row(&self, row: &ApprovalRow) {
        (self.observer)(row);
        self.outbox.wake_sender();
        if let Some(waiting) = self.lock_waiting().get(&row.id) {
            waiting.send_replace(row.state);
        }
    }

    fn lock_waiting(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<ApprovalState>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ApprovalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApprovalStore").finish_non_exhaustive()
    }
}

impl ApprovalWatch {
    /// Waits until the question is not pending.
    async fn wait_answered(&mut self) {
        // The sender lives in the store until this watch is dropped.
        let _ = self.state.wait_for(|state| *state != ApprovalState::Pending).await;
    }
}

impl Drop for ApprovalWatch {
    fn drop(&mut self) {
        self.store.lock_waiting().remove(&self.id);
    }
}

/// The reason in the row of a question whose run has ended.
const RUN_ENDED: &str = "the run has ended";

/// The reason in the row of a question without an answer.
const EXPIRED: &str = "no person has answered in time";

/// The most calls of all runs that wait for a larger budget. Our choice: each holds a connection and its body.
const MAX_UNFUNDED_CALLS: usize = 1024;
