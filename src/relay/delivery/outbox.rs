//! The outbox: a row for each run's work that is to be delivered, so that no delivery is lost or done twice.
//!
//! A row says how far the work has come. The row is written after a step and before the next step. After a crash, a
//! step can therefore run again: each step either finds its result or makes the same result again. The bundle and the
//! patches that came out of the sandbox are in a directory beside the outbox, and every step before the push starts
//! from them.
//!
//! A [`WorkspaceRow`] exists before a job's row: for the workspace of a run in progress, and for a workspace in which
//! a run has left something.
//!
//! ```text
//! extracted → quarantined → judged → pushed → pull_requested → done
//!      └───────────┴──────────┴────────┴────────────┴─ held | failed
//! ```
//!
//! **Invariant:** a row moves along these arrows only. The writer must have read the row's present step, and must hold
//! the branch with a fence that is not older than the row's.
//!
//! **Invariant:** a change that a call has made is still there after a power cut, once the call returns.
//!
//! Calls block on the disk and on locks of other processes. Call them from a thread that may block.

mod job;
mod relocate;
mod retained;
mod schema;
mod undelivered;
mod workspace_row;

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, named_params, params};
use serde::Serialize;
use uuid::Uuid;

pub use job::{
    DeliveryJob, DeliveryRequest, DeliveryStep, HostContext, PullRequestRef, PullRequestText,
    SecretDigest, StepOutcome, VerdictKind,
};
pub use retained::RetainedTotals;
pub use undelivered::UndeliveredTotals;
pub use workspace_row::{DeliveryPlan, WorkspaceRow};

use crate::base::dir_tree;
use crate::base::hidden_characters::escape_hidden;
use crate::base::wall_clock::StampClock;
use crate::relay::delivery::rules::ReviewRules;
use crate::relay::repo::BranchKey;
use crate::relay::repo::repository::RepositoryUrl;
pub(in crate::relay::delivery) use job::{CODE_MOVED, CODE_OBJECTS};
use job::{JOB_COLUMNS, read_job, to_millis};

/// The outbox of one machine, an SQLite database.
#[derive(Debug)]
pub struct DeliveryOutbox {
    connection: Mutex<Connection>,
    clock: StampClock,
}

/// An error of reading or changing the outbox.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    #[error("cannot use `{}`", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the outbox cannot be read or written")]
    Database(#[from] rusqlite::Error),
    #[error(
        "the outbox is of a later version ({found}; this program knows {})",
        schema::SCHEMA_VERSION
    )]
    NewerSchema { found: i64 },
    #[error("no delivery `{0}` found; `cogni-gateway relay status` lists the deliveries")]
    NoSuchDelivery(String),
    #[error("cannot change delivery `{id}`: another process has changed it in the meantime")]
    ChangedConcurrently { id: String },
    #[error("a delivery cannot go from state `{from}` to `{to}`")]
    InvalidTransition { from: DeliveryStep, to: DeliveryStep },
    #[error(
        "cannot discard delivery `{id}`: it is delivered, in progress or of a run that has not ended; only work that is held, has failed or is left over can be discarded"
    )]
    StillNeeded { id: String },
    #[error("cannot change delivery `{id}`: a later holder of the branch has claimed it")]
    Fenced { id: String },
    #[error("the outbox cannot store a path that is not UTF-8")]
    PathNotUtf8(#[source] serde_json::Error),
}

impl DeliveryOutbox {
    /// Opens the outbox. Creates the file if it is missing, readable and writable for the present user only.
    ///
    /// # Errors
    /// Returns an error if the file cannot be used, or if a later version of this program made it.
    pub fn open(path: &Path) -> Result<Self, OutboxError> {
        let file = |source| OutboxError::File { path: path.to_owned(), source };
        if let Some(parent) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(file)?;
        }
        // Created here and not by SQLite, so that the mode is right from the start. SQLite gives its other files
        // (`-wal`, `-shm`) the mode of this file.
        File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(file)?;
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        schema::prepare_schema(&mut connection)?;
        if let Some(state) = std::path::absolute(path).map_err(file)?.parent() {
            relocate::adopt_moved_rows(&mut connection, state)?;
        }
        Ok(Self { connection: Mutex::new(connection), clock: StampClock::default() })
    }

    /// Adds a row for work that came out of a sandbox, and removes the row of the work's workspace. Both happen in one
    /// transaction. A row with the same artifacts directory is the same work, and stays as it is.
    ///
    /// # Errors
    /// Returns an error if the database does not work, or if a path is not UTF-8.
    pub fn add_job(&self, order: &DeliveryRequest) -> Result<DeliveryJob, OutboxError> {
        let artifacts = order.artifacts.display().to_string();
        let mut connection = self.lock_connection();
        // Immediate: the write lock is taken before the first read, so that no other process can write in between.
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let cleared = "DELETE FROM desk WHERE artifacts = ?1 RETURNING id, grant_id";
        let removed = change.query_row(cleared, [&artifacts], |row| Ok((row.get(0)?, row.get(1)?)));
        // The job inherits the ID of its workspace row, so that one ID names the work from its run to its delivery.
        let (id, grant) = removed.optional()?.unwrap_or_else(|| (new_id(), None));
        let job = insert_job(&change, (&id, grant), order, self.clock.read_time())?;
        change.commit()?;
        Ok(job)
    }

    /// Adds a row for work that came out of a sandbox, and keeps the row of its workspace, because something remains
    /// there. The job takes the ID of the workspace row, and the workspace row gets a new ID.
    ///
    /// # Errors
    /// Returns [`OutboxError::NoSuchDelivery`] if the workspace row is gone, or an error if the database does not work.
    pub fn add_keeping_workspace(
        &self,
        order: &DeliveryRequest,
        row: &WorkspaceRow,
        why: &str,
    ) -> Result<(DeliveryJob, WorkspaceRow), OutboxError> {
        let left = new_id();
        let job = {
            let mut connection = self.lock_connection();
            let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let renamed = change.execute(
                "UPDATE desk SET id = ?2, remains = ?3, due = NULL WHERE id = ?1",
                params![row.id, left, one_line(why)],
            )?;
            if renamed == 0 {
                return Err(OutboxError::NoSuchDelivery(row.id.clone()));
            }
            let job = insert_job(
                &change,
                (&row.id, row.plan.grant.clone()),
                order,
                self.clock.read_time(),
            )?;
            change.commit()?;
            job
        };
        // Measured after the transaction: walking a large directory must not hold the database's lock.
        self.record_workspace_size(&left, &row.workspace)?;
        Ok((job, self.workspace(&left)?))
    }

    /// Returns a row by its ID.
    ///
    /// # Errors
    /// Returns [`OutboxError::NoSuchDelivery`] if there is no such row, or an error if the database does not work.
    pub fn get(&self, id: &str) -> Result<DeliveryJob, OutboxError> {
        let found =
            self.lock_connection().query_row(&select_sql("id = ?1"), [id], read_job).optional()?;
        // An operator may have typed the ID: a long text is cut before it appears in a message.
        found.ok_or_else(|| OutboxError::NoSuchDelivery(id.chars().take(80).collect()))
    }

    /// Returns all rows, or only the rows whose step is not terminal. The oldest comes first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn list_jobs(&self, only_open: bool) -> Result<Vec<DeliveryJob>, OutboxError> {
        let what = if only_open { OPEN_CONDITION } else { "1" };
        self.query_jobs(what, &[])
    }

    /// Returns the rows of a run's work. The oldest comes first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn jobs_of_run(&self, run: &str) -> Result<Vec<DeliveryJob>, OutboxError> {
        self.query_jobs("run = ?1", &[&run])
    }

    /// Returns the rows that are due for another attempt. Grants take turns, and the oldest row of each grant comes
    /// first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn due_jobs(&self, now: SystemTime) -> Result<Vec<DeliveryJob>, OutboxError> {
        // The condition of `is_due` in SQL: a time beyond any wait was written while the clock was wrong.
        let furthest = to_millis(now + MAX_WAIT);
        self.query_jobs_ordered(
            ROUND_ROBIN_ORDER,
            &format!("{OPEN_CONDITION} AND (due <= ?1 OR due > ?2)"),
            &[&to_millis(now), &furthest],
        )
    }

    /// Returns the rows of a branch whose verdict is that a person has to review the work. The oldest comes first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn needing_review(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        let what = "verdict = 'review' AND repository = ?1 AND branch_key = ?2";
        self.query_jobs(what, &[&repository.canonical_key(), &key.as_str()])
    }

    /// Returns the rows of a branch that are still to be delivered. A run that begins at the branch before that would
    /// not build on their work. The oldest comes first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn pending_jobs(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        let (repository, key) = (repository.canonical_key(), key.as_str());
        let what = format!("{OPEN_CONDITION} AND repository = ?1 AND branch_key = ?2");
        self.query_jobs(&what, &[&repository, &key])
    }

    /// Claims a row for the present holder of the branch.
    ///
    /// # Errors
    /// Returns [`OutboxError::Fenced`] if a later holder of the branch has claimed the row.
    pub fn claim_job(&self, job: &DeliveryJob, fence: u64) -> Result<DeliveryJob, OutboxError> {
        // Test and write are one statement. From then on, a writer with an older fence finds no row in `update_job`.
        let claimed = self.lock_connection().execute(
            "UPDATE job SET fence = ?2 WHERE id = ?1 AND fence <= ?2",
            params![job.id, to_sql_integer(fence)],
        )?;
        if claimed == 0 {
            return Err(OutboxError::Fenced { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Stores the outcome of a step, and moves the row to that step.
    ///
    /// # Errors
    /// Returns [`OutboxError::InvalidTransition`] if the state machine has no such arrow. Returns
    /// [`OutboxError::ChangedConcurrently`] or [`OutboxError::Fenced`] if the row's step or fence is no longer the one
    /// in `job`.
    pub fn advance_job(
        &self,
        job: &DeliveryJob,
        progress: StepOutcome,
    ) -> Result<DeliveryJob, OutboxError> {
        let to = progress.step();
        if !job.step.can_transition_to(to) {
            return Err(OutboxError::InvalidTransition { from: job.step, to });
        }
        let mut next = DeliveryJob { step: to, error: None, code: None, ..job.clone() };
        progress.apply_to(&mut next);
        self.update_job(job, &next)?;
        self.get(&job.id)
    }

    /// Stores the result of publishing the statement beside the commit.
    ///
    /// # Errors
    /// Returns the errors of [`DeliveryOutbox::advance_job`], except [`OutboxError::InvalidTransition`].
    pub fn record_statement(
        &self,
        job: &DeliveryJob,
        said: &str,
    ) -> Result<DeliveryJob, OutboxError> {
        self.update_job(job, &DeliveryJob { statement: Some(one_line(said)), ..job.clone() })?;
        self.get(&job.id)
    }

    /// Reschedules a row that was due, with the reason, and counts the attempt.
    ///
    /// # Errors
    /// Returns the errors of [`DeliveryOutbox::advance_job`], except [`OutboxError::InvalidTransition`].
    pub fn reschedule_after_failure(
        &self,
        job: &DeliveryJob,
        after: Duration,
        why: &str,
    ) -> Result<DeliveryJob, OutboxError> {
        let next = DeliveryJob { attempts: job.attempts + 1, ..job.clone() };
        self.reschedule(&next, after, why)
    }

    /// Reschedules a row, with the reason, and counts no attempt. The row is never due sooner than before.
    ///
    /// # Errors
    /// Returns the errors of [`DeliveryOutbox::advance_job`], except [`OutboxError::InvalidTransition`].
    pub fn reschedule(
        &self,
        job: &DeliveryJob,
        after: Duration,
        why: &str,
    ) -> Result<DeliveryJob, OutboxError> {
        let due = rescheduled_time(job.due, after);
        self.update_job(job, &DeliveryJob { due, error: Some(one_line(why)), ..job.clone() })?;
        self.get(&job.id)
    }

    /// Restarts a delivery from the bundle that came out of the sandbox, at an operator's request.
    ///
    /// # Errors
    /// Returns [`OutboxError::InvalidTransition`] if the work is already delivered.
    pub fn restart(&self, job: &DeliveryJob) -> Result<DeliveryJob, OutboxError> {
        if job.step == DeliveryStep::Done {
            return Err(OutboxError::InvalidTransition {
                from: job.step,
                to: DeliveryStep::Extracted,
            });
        }
        // A push is not undone: the row of pushed work starts again after the push.
        let step = if job.is_pushed { DeliveryStep::Pushed } else { DeliveryStep::Extracted };
        let (due, attempts) = (SystemTime::now(), 0);
        let next = DeliveryJob { step, due, attempts, error: None, code: None, ..job.clone() };
        self.update_job(job, &next)?;
        self.get(&job.id)
    }

    /// Replaces the review rules and the host settings of a row. The caller holds the lease of the branch, so no other
    /// process reviews the work at the same time.
    ///
    /// # Errors
    /// Returns [`OutboxError::InvalidTransition`] if the branch already has the work, and
    /// [`OutboxError::ChangedConcurrently`] if the row's step or fence is no longer the one in `job`.
    pub fn set_rules(
        &self,
        job: &DeliveryJob,
        rules: ReviewRules,
        host: HostContext,
    ) -> Result<DeliveryJob, OutboxError> {
        if job.is_pushed {
            return Err(OutboxError::InvalidTransition {
                from: job.step,
                to: DeliveryStep::Judged,
            });
        }
        let order = DeliveryRequest { rules: Some(rules), host: Some(host), ..job.request.clone() };
        let order = to_json(&order)?;
        // The same guard as in `update_job`: no writer has moved or claimed the row in between.
        let written = self.lock_connection().execute(
            "UPDATE job SET \"order\" = ?1 WHERE id = ?2 AND step = ?3 AND fence = ?4",
            params![order, job.id, job.step.as_str(), to_sql_integer(job.fence)],
        )?;
        if written == 0 {
            return Err(OutboxError::ChangedConcurrently { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Removes the rows that were delivered before `before`, and returns their number. Rows of undelivered work stay,
    /// as does their work.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn remove_delivered(&self, before: SystemTime) -> Result<usize, OutboxError> {
        let delivered = "DELETE FROM job WHERE step = 'done' AND updated < ?1";
        Ok(self.lock_connection().execute(delivered, [to_millis(before)])?)
    }

    /// Discards a held row, a failed row, or a retained workspace, with its directory. Both go in one transaction, the
    /// directory before the row: if the directory cannot be removed, the row still names it, and a later call goes on.
    ///
    /// # Errors
    /// Returns [`OutboxError::StillNeeded`] if the item may still be delivered without an operator, and
    /// [`OutboxError::NoSuchDelivery`] if there is no such item.
    pub fn discard_item(&self, id: &str) -> Result<(), OutboxError> {
        let artifacts = match self.workspace(id) {
            Ok(row) => row.plan.artifacts,
            Err(_) => self.get(id)?.request.artifacts,
        };
        // The conditions are part of the statements: a row that has become open again since it was read must stay.
        let mut connection = self.lock_connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let job = "DELETE FROM job WHERE id = ?1 AND step IN ('held', 'failed')";
        let workspace = "DELETE FROM desk WHERE id = ?1 AND remains IS NOT NULL";
        if change.execute(job, [id])? + change.execute(workspace, [id])? == 0 {
            return Err(OutboxError::StillNeeded { id: id.to_owned() });
        }
        dir_tree::remove_tree(&artifacts)
            .map_err(|source| OutboxError::File { path: artifacts, source })?;
        Ok(change.commit()?)
    }

    /// Updates a row in one statement, so that no reader sees half of the change. The row must still have the step and
    /// the fence of `old`.
    fn update_job(&self, old: &DeliveryJob, new: &DeliveryJob) -> Result<(), OutboxError> {
        let is_kept = matches!(new.step, DeliveryStep::Held | DeliveryStep::Failed);
        // Measured before the lock is taken: walking a large directory would make other writers wait.
        let bytes = if is_kept { retained::measure_dir(&new.request.artifacts) } else { 0 };
        let mut connection = self.lock_connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let written = change.execute(
            "UPDATE job SET step = :step, verdict = :verdict, reasons = :reasons, head = :head, is_pushed = :is_pushed,
                 pull_number = :number, pull_url = :url, attempts = :attempts, due = :due, error = :error,
                 updated = max(:now, updated),
                 code = :code, statement = :statement, mode = :mode, bytes = :bytes
             WHERE id = :id AND step = :old AND fence = :fence",
            named_params! {
                ":step": new.step.as_str(),
                ":verdict": new.verdict.map(VerdictKind::as_str),
                ":reasons": serde_json::to_string(&new.reasons).expect("reasons are text"),
                ":head": new.head.map(|head| head.to_string()),
                ":is_pushed": new.is_pushed,
                ":number": new.pull_request.as_ref().map(|pull| to_sql_integer(pull.number)),
                ":url": new.pull_request.as_ref().map(|pull| &pull.url),
                ":attempts": new.attempts,
                ":due": to_millis(new.due),
                ":error": new.error,
                ":code": new.code,
                ":statement": new.statement,
                ":mode": new.mode,
                ":bytes": bytes,
                ":now": to_millis(self.clock.read_time()),
                ":id": old.id,
                ":old": old.step.as_str(),
                ":fence": to_sql_integer(old.fence),
            },
        )?;
        if written == 1 {
            return Ok(change.commit()?);
        }
        // No row matched. Find out whether a later holder, another writer or a deletion was the cause.
        let fence = change.query_row("SELECT fence FROM job WHERE id = ?1", [&old.id], |row| {
            row.get::<_, i64>(0)
        });
        match fence.optional()? {
            Some(fence) if fence > to_sql_integer(old.fence) => {
                Err(OutboxError::Fenced { id: old.id.clone() })
            }
            Some(_) => Err(OutboxError::ChangedConcurrently { id: old.id.clone() }),
            None => Err(OutboxError::NoSuchDelivery(old.id.clone())),
        }
    }

    fn query_jobs(
        &self,
        what: &str,
        given: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        self.query_jobs_ordered("created, id", what, given)
    }

    fn query_jobs_ordered(
        &self,
        order: &str,
        what: &str,
        given: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        let connection = self.lock_connection();
        let mut statement =
            connection.prepare(&format!("{} ORDER BY {order}", select_sql(what)))?;
        let rows = statement.query_map(given, read_job)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn lock_connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Inserts a job's row, unless there is a row with the same artifacts directory, which is the same work. Returns the
/// row.
fn insert_job(
    change: &Connection,
    (id, grant): (&str, Option<String>),
    order: &DeliveryRequest,
    now: SystemTime,
) -> Result<DeliveryJob, OutboxError> {
    let artifacts = order.artifacts.display().to_string();
    change.execute(
        "INSERT INTO job (id, repository, branch_key, run, \"order\", artifacts, step, due, created, updated, grant_id)
         SELECT :id, :repository, :key, :run, :order, :artifacts, 'extracted', :now, :now, :now, :grant
         WHERE NOT EXISTS (SELECT 1 FROM job WHERE artifacts = :artifacts)",
        named_params! {
            ":id": id,
            ":repository": order.repository.canonical_key(),
            ":key": order.branch().key().as_str(),
            ":run": order.facts.run,
            ":order": to_json(order)?,
            ":artifacts": artifacts,
            ":now": to_millis(now),
            ":grant": grant,
        },
    )?;
    Ok(change.query_row(&select_sql("artifacts = ?1"), [&artifacts], read_job)?)
}

/// Serializes a value as JSON. Serialization fails only if the value has a path that is not UTF-8.
fn to_json(what: &impl Serialize) -> Result<String, OutboxError> {
    serde_json::to_string(what).map_err(OutboxError::PathNotUtf8)
}

fn new_id() -> String {
    Uuid::now_v7().simple().to_string()
}

fn select_sql(what: &str) -> String {
    format!("SELECT {JOB_COLUMNS} FROM job WHERE {what}")
}

/// Converts a number to an SQLite integer, which is signed.
fn to_sql_integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Replaces control characters, line breaks among them, by spaces, and other hidden characters by their numbers: a remote
/// or a forge may have written the text. Cuts the text at [`MAX_ERROR_CHARS`].
fn one_line(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    // Cut before and after the replacement, so that its work has a bound, too.
    let line: String = text.chars().map(printable).take(MAX_ERROR_CHARS).collect();
    escape_hidden(&line).chars().take(MAX_ERROR_CHARS).collect()
}

/// Returns true if a row is due. A time that is further away than any wait was written while the clock was ahead, and
/// counts as due.
fn is_due(due: SystemTime, now: SystemTime) -> bool {
    due <= now || due > now + MAX_WAIT
}

/// Returns the new due time of a row that is rescheduled. The row is never due sooner than before.
fn rescheduled_time(due: SystemTime, after: Duration) -> SystemTime {
    let now = SystemTime::now();
    let next = now + after.min(MAX_WAIT);
    if is_due(due, now) { next } else { next.max(due) }
}

/// The directory of all works in the state directory.
pub(super) const WORK_DIR: &str = "work";

/// The SQL order in which grants take turns: the oldest row of each grant, then the second of each.
const ROUND_ROBIN_ORDER: &str =
    "row_number() OVER (PARTITION BY grant_id ORDER BY created, id), created, id";

/// The SQL condition of a row whose step is not terminal.
const OPEN_CONDITION: &str = "step NOT IN ('done', 'held', 'failed')";

/// The most characters of an error or a statement's result in a row. Our choice.
const MAX_ERROR_CHARS: usize = 500;

/// The longest wait of a row. Our own waits are shorter; a forge that asks for a longer wait is asked once a day.
const MAX_WAIT: Duration = Duration::from_hours(24);

/// The longest wait for the database's lock. Other processes hold the lock for one statement or short transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
