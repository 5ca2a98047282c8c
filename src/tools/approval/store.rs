//! The store of questions about tool calls: rows of a database, and the calls of this process that wait for them.
//!
//! **Invariant:** a caller learns of a step only after its transaction is on disk.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, named_params, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::open_questions::{RunOwnerFuture, question_places};
use super::outbox::{self, Outbox};
use super::present_tools::PresentTools;
use super::{ApprovalRow, ApprovalState, to_unix_millis};
use crate::base::db::{DatabaseError, SqliteDatabase};
use crate::base::file_digest::FileDigestCache;
use crate::base::keyed_permits::{KeyedPermit, KeyedPermits};
use crate::base::log_line_limiter::LogLineLimiter;
use crate::llm::budget::{Nanodollars, RaiseError, SpendingLimits};

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
    owner: Arc<dyn Fn(String) -> RunOwnerFuture + Send + Sync>,
}

/// The state of one question, for the call that waits for it. Dropping the watch forgets the call, not the question.
pub struct ApprovalWatch {
    id: String,
    store: ApprovalStore,
    state: watch::Receiver<ApprovalState>,
    _place: KeyedPermit,
}

/// A person's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalDecision {
    pub is_approved: bool,
    /// The digest of the call that the person has seen.
    pub digest: String,
    /// The grant that answers.
    pub by: String,
    pub reason: Option<String>,
    /// The limits that the person raises, for a question about a budget.
    pub raise: Option<SpendingLimits>,
    /// The id of the signed reply that the answer came in; it counts once.
    pub reply: Option<String>,
}

/// The outcome of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecisionOutcome {
    /// The answer counts. The row has the new state.
    Decided(Box<ApprovalRow>),
    /// The question has another digest.
    OtherDigest,
    /// The answer does not raise the limits as the question needs it.
    WrongRaise(RaiseError),
    /// The answer raises limits, or must, and the question says otherwise.
    RaiseMismatch,
    /// The signed reply was received before.
    Replayed,
    /// The question was closed before.
    Closed(ApprovalState),
    Unknown,
}

/// The filter of a list of questions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalFilter {
    pub state: Option<ApprovalState>,
    pub run: Option<String>,
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
                let closed = close_rows(change, (condition, &value), end, now)?;
                for row in &closed {
                    outbox.add_message(change, row, now)?;
                }
                Ok(closed.len())
            })
            .await
            .inspect(|_| self.outbox.wake_sender())
    }

    /// Deletes the closed questions that were asked before a time. Returns their number.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn forget_before(&self, before: SystemTime) -> Result<usize, DatabaseError> {
        let before = to_unix_millis(before);
        let delete =
            "DELETE FROM approval WHERE requested < ?1 AND state NOT IN ('pending', 'approved')";
        self.database.write_in_transaction(move |change| change.execute(delete, [before])).await
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
        let query = format!(
            "SELECT {columns} FROM approval WHERE {state} AND (?2 IS NULL OR run = ?2)
             AND (?3 IS NULL OR (requested, id) {beyond} (SELECT requested, id FROM approval WHERE id = ?3))
             ORDER BY requested {order}, id {order} LIMIT ?4"
        );
        let read = move |view: &Connection| {
            let state = filter.state.map(ApprovalState::as_str);
            view.prepare_cached(&query)?
                .query_map(params![state, filter.run, filter.after, filter.limit], read_row)?
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
        let left = not_after_ms.saturating_sub(to_unix_millis(SystemTime::now()));
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
            Some(end) => self.close(&watch.id, end, SystemTime::now()).await,
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

fn insert_row(change: &Transaction<'_>, row: &ApprovalRow) -> rusqlite::Result<bool> {
    let count = "SELECT count(*) FROM approval WHERE run = ?1";
    let asked: u32 = change.query_row(count, [&row.run], |found| found.get(0))?;
    if asked >= MAX_QUESTIONS_PER_RUN {
        return Ok(false);
    }
    let evidence = serde_json::to_string(&row.evidence).unwrap_or_default();
    let price = i64::try_from(row.price.0).unwrap_or(i64::MAX);
    change.execute(
        "INSERT INTO approval (id, run, agent, tool, rule, definition, policy, digest, arguments, evidence, price, state, requested, not_after, budget)
         VALUES (:id, :run, :agent, :tool, :rule, :definition, :policy, :digest, :arguments, :evidence, :price, 'pending', :requested, :not_after, :budget)",
        named_params! {
            ":id": row.id,
            ":run": row.run,
            ":agent": row.agent,
            ":tool": row.tool,
            ":rule": row.rule,
            ":definition": row.definition,
            ":policy": row.policy,
            ":digest": row.digest,
            ":arguments": row.arguments,
            ":evidence": evidence,
            ":price": price,
            ":requested": row.requested_ms,
            ":not_after": row.not_after_ms,
            ":budget": row.budget.as_ref().map(to_json),
        },
    )?;
    Ok(true)
}

fn write_decision(
    change: &Transaction<'_>,
    id: &str,
    decision: &ApprovalDecision,
    now: i64,
) -> rusqlite::Result<DecisionOutcome> {
    // 1. A signed reply counts once, whatever it says. The row is read and changed in the same transaction, so that no
    //    other step comes between.
    if let Some(reply) = &decision.reply
        && !outbox::insert_reply(change, reply, now)?
    {
        return Ok(DecisionOutcome::Replayed);
    }
    let Some(row) = find_row(change, id)? else { return Ok(DecisionOutcome::Unknown) };
    if row.digest != decision.digest {
        return Ok(DecisionOutcome::OtherDigest);
    }
    if row.state != ApprovalState::Pending {
        return Ok(DecisionOutcome::Closed(row.state));
    }
    // 2. An answer that comes too late is no answer, even if the waiting call has not noticed the time yet.
    if row.not_after_ms <= now {
        return Ok(DecisionOutcome::Closed(ApprovalState::Expired));
    }
    // 3. A yes to a budget says how far it is raised; every other answer raises nothing.
    match (&row.budget, &decision.raise) {
        (Some(budget), Some(raise)) if decision.is_approved => {
            if let Err(error) = budget.limits.check_raise(raise, budget.limit) {
                return Ok(DecisionOutcome::WrongRaise(error));
            }
        }
        (Some(_), None) if decision.is_approved => return Ok(DecisionOutcome::RaiseMismatch),
        (_, Some(_)) => return Ok(DecisionOutcome::RaiseMismatch),
        (_, None) => {}
    }
    // 4. The arguments of a denied call are not needed any more.
    let ApprovalDecision { is_approved, by, reason, raise, .. } = decision;
    let raised = raise.as_ref().map(to_json);
    let (state, arguments) = if *is_approved {
        (ApprovalState::Approved, row.arguments)
    } else {
        (ApprovalState::Denied, None)
    };
    change.execute(
        "UPDATE approval SET state = ?2, arguments = ?3, resolved = ?4, decided_by = ?5, reason = ?6, raised = ?7
         WHERE id = ?1",
        params![id, state.as_str(), arguments, now, by, reason, raised],
    )?;
    // The row exists: this transaction has just changed it.
    let decided = find_row(change, id)?;
    Ok(decided.map_or(DecisionOutcome::Unknown, |row| DecisionOutcome::Decided(Box::new(row))))
}

/// Closes the open questions that match a condition on `?1`, and returns them. A person's answer stays in the row.
fn close_rows(
    change: &Transaction<'_>,
    (condition, value): (&str, &str),
    (state, reason): (ApprovalState, &str),
    now: i64,
) -> rusqlite::Result<Vec<ApprovalRow>> {
    let close = format!(
        "UPDATE approval SET state = ?2, arguments = NULL, resolved = coalesce(resolved, ?3), reason = coalesce(reason, ?4)
         WHERE {condition} AND state IN ('pending', 'approved') RETURNING {COLUMNS}"
    );
    let mut close = change.prepare_cached(&close)?;
    let closed = close.query_map(params![value, state.as_str(), now, reason], read_row)?;
    closed.collect()
}

fn find_row(view: &Connection, id: &str) -> rusqlite::Result<Option<ApprovalRow>> {
    let query = format!("SELECT {COLUMNS} FROM approval WHERE id = ?1");
    view.prepare_cached(&query)?.query_row([id], read_row).optional()
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<ApprovalRow> {
    let odd = |index, what: &'static str| {
        rusqlite::Error::FromSqlConversionFailure(index, Type::Text, what.into())
    };
    let state: String = row.get("state")?;
    let state = ApprovalState::ALL.into_iter().find(|known| known.as_str() == state);
    let evidence: String = row.get("evidence")?;
    let evidence: BTreeMap<String, String> =
        serde_json::from_str(&evidence).map_err(|_| odd(8, "no map of evidence"))?;
    let price: i64 = row.get("price")?;
    Ok(ApprovalRow {
        id: row.get("id")?,
        run: row.get("run")?,
        agent: row.get("agent")?,
        tool: row.get("tool")?,
        rule: row.get("rule")?,
        definition: row.get("definition")?,
        policy: row.get("policy")?,
        digest: row.get("digest")?,
        arguments: row.get("arguments")?,
        evidence,
        price: Nanodollars(price.max(0).cast_unsigned()),
        state: state.ok_or_else(|| odd(11, "no state of a question"))?,
        requested_ms: row.get("requested")?,
        not_after_ms: row.get("not_after")?,
        resolved_ms: row.get("resolved")?,
        by: row.get("decided_by")?,
        reason: row.get("reason")?,
        call: row.get("call")?,
        budget: read_json(row, "budget")?,
        raised: read_json(row, "raised")?,
    })
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("the value has string keys")
}

fn read_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let Some(text) = row.get::<_, Option<String>>(column)? else { return Ok(None) };
    let index = row.as_ref().column_index(column)?;
    let read = serde_json::from_str(&text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(index, Type::Text, error.into())
    });
    read.map(Some)
}

const COLUMNS: &str = "id, run, agent, tool, rule, definition, policy, digest, arguments, evidence, price, state, requested, not_after, resolved, decided_by, reason, call, budget, raised";

/// The reason in the row of a question whose run has ended.
const RUN_ENDED: &str = "the run has ended";

/// The reason in the row of a question without an answer.
const EXPIRED: &str = "no person has answered in time";

/// The most calls of all runs that wait for a larger budget. Our choice: each holds a connection and its body.
const MAX_UNFUNDED_CALLS: usize = 1024;

/// The most questions of a run. Our choice: a person answers no more with care.
pub const MAX_QUESTIONS_PER_RUN: u32 = 256;
