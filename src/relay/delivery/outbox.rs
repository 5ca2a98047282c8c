//! What is to be delivered, a row for each run's work, so that nothing that was begun is forgotten or done twice.
//!
//! A row says how far the work has come. It is written after a step and before the next; each step can therefore find
//! that it was done already, and does it once more or not at all. What came out of the sandbox lies in a directory beside
//! it, since everything before the push is made anew from that.
//!
//! Before there is a row, there is a [`WorkspaceRow`]: the workspace of a run that goes on, or has left something there.
//!
//! ```text
//! extracted → quarantined → judged → pushed → pull_requested → done
//!      └───────────┴──────────┴────────┴────────────┴─ held | failed
//! ```
//!
//! **Invariant:** a row moves along these arrows only, and only for who has seen where it stands, and holds the branch
//! with a fence that is not older than the one before.
//!
//! **Invariant:** what is in a row when a call returns is there after a power cut.
//!
//! Calls wait on the disk, and for other processes: they belong on a thread that may.

mod job;
mod retained;
mod schema;
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
pub use workspace_row::{DeliveryPlan, WorkspaceRow};

use crate::base::dir_tree;
use crate::relay::delivery::rules::ReviewRules;
use crate::relay::repo::BranchKey;
use crate::relay::repo::repository::RepositoryUrl;
pub(in crate::relay::delivery) use job::{CODE_MOVED, CODE_OBJECTS};
use job::{JOB_COLUMNS, read_job, to_millis};

/// The rows of one machine.
#[derive(Debug)]
pub struct DeliveryOutbox {
    connection: Mutex<Connection>,
}

/// Why a row cannot be read or moved.
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
    Later { found: i64 },
    #[error("there is no relay `{0}`; `cogni-gateway relay status` lists them")]
    Unknown(String),
    #[error("relay `{id}` has been moved on by another process meanwhile")]
    Moved { id: String },
    #[error("a relay that is {from} cannot become {to}")]
    Skipped { from: DeliveryStep, to: DeliveryStep },
    #[error(
        "relay `{id}` is delivered, on its way or of a run that goes on; only what is held, has failed or was left can be thrown away"
    )]
    Wanted { id: String },
    #[error("relay `{id}` belongs to a later holder of the branch")]
    Fenced { id: String },
    #[error("it has to do with a path that is not UTF-8, which the outbox cannot keep")]
    Path(#[source] serde_json::Error),
}

impl DeliveryOutbox {
    /// Opens the outbox, or makes it, for us alone.
    ///
    /// # Errors
    /// The file cannot be used, or a later version made it.
    pub fn open(path: &Path) -> Result<Self, OutboxError> {
        let file = |source| OutboxError::File { path: path.to_owned(), source };
        if let Some(parent) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(file)?;
        }
        // SQLite gives its other files the mode of this one.
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
        Ok(Self { connection: Mutex::new(connection) })
    }

    /// Writes down that something came out of a sandbox, in the place of its desk. What is there already stays as it is:
    /// what lies in the same directory is the same work.
    ///
    /// # Errors
    /// As every call.
    pub fn add_job(&self, order: &DeliveryRequest) -> Result<DeliveryJob, OutboxError> {
        let artifacts = order.artifacts.display().to_string();
        let mut connection = self.lock_connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let cleared = "DELETE FROM desk WHERE artifacts = ?1 RETURNING id, grant_id";
        let desk = change.query_row(cleared, [&artifacts], |row| Ok((row.get(0)?, row.get(1)?)));
        let (id, grant) = desk.optional()?.unwrap_or_else(|| (new_id(), None));
        let job = insert_job(&change, (&id, grant), order)?;
        change.commit()?;
        Ok(job)
    }

    /// The same, where something stays in the workspace: the work takes the desk's name, and the desk another.
    ///
    /// # Errors
    /// [`OutboxError::Unknown`] where there is no such desk any more; as every call.
    pub fn add_keeping_workspace(
        &self,
        order: &DeliveryRequest,
        desk: &WorkspaceRow,
        why: &str,
    ) -> Result<(DeliveryJob, WorkspaceRow), OutboxError> {
        let left = new_id();
        let job = {
            let mut connection = self.lock_connection();
            let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let renamed = change.execute(
                "UPDATE desk SET id = ?2, remains = ?3, due = NULL WHERE id = ?1",
                params![desk.id, left, one_line(why)],
            )?;
            if renamed == 0 {
                return Err(OutboxError::Unknown(desk.id.clone()));
            }
            let job = insert_job(&change, (&desk.id, desk.plan.grant.clone()), order)?;
            change.commit()?;
            job
        };
        self.record_workspace_size(&left, &desk.workspace)?;
        Ok((job, self.workspace(&left)?))
    }

    /// # Errors
    /// [`OutboxError::Unknown`], or as every call.
    pub fn get(&self, id: &str) -> Result<DeliveryJob, OutboxError> {
        let found =
            self.lock_connection().query_row(&select_sql("id = ?1"), [id], read_job).optional()?;
        found.ok_or_else(|| OutboxError::Unknown(id.chars().take(80).collect()))
    }

    /// All rows, or those that are not at their end; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn list_jobs(&self, only_open: bool) -> Result<Vec<DeliveryJob>, OutboxError> {
        let what = if only_open { OPEN_CONDITION } else { "1" };
        self.query_jobs(what, &[])
    }

    /// What came out of a run's sandbox; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn jobs_of_run(&self, run: &str) -> Result<Vec<DeliveryJob>, OutboxError> {
        self.query_jobs("run = ?1", &[&run])
    }

    /// What waits to be taken up again, and has waited long enough; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn due_jobs(&self, now: SystemTime) -> Result<Vec<DeliveryJob>, OutboxError> {
        let furthest = to_millis(now + MAX_WAIT);
        self.query_jobs_ordered(
            ROUND_ROBIN_ORDER,
            &format!("{OPEN_CONDITION} AND (due <= ?1 OR due > ?2)"),
            &[&to_millis(now), &furthest],
        )
    }

    /// What was found to need a review, of the work for a branch; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn needing_review(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        let what = "verdict = 'review' AND repository = ?1 AND branch_key = ?2";
        self.query_jobs(what, &[&repository.canonical_key(), &key.as_str()])
    }

    /// What has not been delivered yet to a branch. A run that begins there would not build on it.
    ///
    /// # Errors
    /// As every call.
    pub fn pending_jobs(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<Vec<DeliveryJob>, OutboxError> {
        let (repository, key) = (repository.canonical_key(), key.as_str());
        let what = format!("{OPEN_CONDITION} AND repository = ?1 AND branch_key = ?2");
        self.query_jobs(&what, &[&repository, &key])
    }

    /// Takes a row up for whoever holds the branch now.
    ///
    /// # Errors
    /// [`OutboxError::Fenced`] where a later holder has been at it.
    pub fn claim_job(&self, job: &DeliveryJob, fence: u64) -> Result<DeliveryJob, OutboxError> {
        let claimed = self.lock_connection().execute(
            "UPDATE job SET fence = ?2 WHERE id = ?1 AND fence <= ?2",
            params![job.id, to_sql_integer(fence)],
        )?;
        if claimed == 0 {
            return Err(OutboxError::Fenced { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Writes down that a step is done.
    ///
    /// # Errors
    /// [`OutboxError::Skipped`] where this is not the next step; [`OutboxError::Moved`] or [`OutboxError::Fenced`] where the row is not as
    /// `job` says any more.
    pub fn advance_job(
        &self,
        job: &DeliveryJob,
        progress: StepOutcome,
    ) -> Result<DeliveryJob, OutboxError> {
        let to = progress.step();
        if !job.step.can_transition_to(to) {
            return Err(OutboxError::Skipped { from: job.step, to });
        }
        let mut next = DeliveryJob { step: to, error: None, code: None, ..job.clone() };
        progress.apply_to(&mut next);
        self.update_job(job, &next)?;
        self.get(&job.id)
    }

    /// Writes down what has become of the statement beside the commit.
    ///
    /// # Errors
    /// As [`DeliveryOutbox::advance_job`].
    pub fn record_statement(
        &self,
        job: &DeliveryJob,
        said: &str,
    ) -> Result<DeliveryJob, OutboxError> {
        self.update_job(job, &DeliveryJob { statement: Some(one_line(said)), ..job.clone() })?;
        self.get(&job.id)
    }

    /// Leaves a row for later, with the reason, as its time had come and this was an attempt.
    ///
    /// # Errors
    /// As [`DeliveryOutbox::advance_job`].
    pub fn reschedule_after_failure(
        &self,
        job: &DeliveryJob,
        after: Duration,
        why: &str,
    ) -> Result<DeliveryJob, OutboxError> {
        let next = DeliveryJob { attempts: job.attempts + 1, ..job.clone() };
        self.reschedule(&next, after, why)
    }

    /// The same where it was none. The row is never due sooner than before.
    ///
    /// # Errors
    /// As [`DeliveryOutbox::advance_job`].
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

    /// Begins again with what came out of the sandbox, because somebody asks for it.
    ///
    /// # Errors
    /// [`OutboxError::Skipped`] where it has been delivered already.
    pub fn restart(&self, job: &DeliveryJob) -> Result<DeliveryJob, OutboxError> {
        if job.step == DeliveryStep::Done {
            return Err(OutboxError::Skipped { from: job.step, to: DeliveryStep::Extracted });
        }
        // What has been pushed stays so; only what comes after it is done again.
        let step = if job.is_pushed { DeliveryStep::Pushed } else { DeliveryStep::Extracted };
        let (due, attempts) = (SystemTime::now(), 0);
        let next = DeliveryJob { step, due, attempts, error: None, code: None, ..job.clone() };
        self.update_job(job, &next)?;
        self.get(&job.id)
    }

    /// Has a row judged by other rules, and beside other credentials of this host, than its own, from now on. Who asks for
    /// it has the branch, so that nobody else is judging.
    ///
    /// # Errors
    /// [`OutboxError::Skipped`] where it is at its branch; as [`DeliveryOutbox::advance_job`].
    pub fn set_rules(
        &self,
        job: &DeliveryJob,
        rules: ReviewRules,
        host: HostContext,
    ) -> Result<DeliveryJob, OutboxError> {
        if job.is_pushed {
            return Err(OutboxError::Skipped { from: job.step, to: DeliveryStep::Judged });
        }
        let order = DeliveryRequest { rules: Some(rules), host: Some(host), ..job.order.clone() };
        let order = to_json(&order)?;
        let written = self.lock_connection().execute(
            "UPDATE job SET \"order\" = ?1 WHERE id = ?2 AND step = ?3 AND fence = ?4",
            params![order, job.id, job.step.as_str(), to_sql_integer(job.fence)],
        )?;
        if written == 0 {
            return Err(OutboxError::Moved { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Removes the rows that were delivered before `before`, and says how many. Others are never removed: their work is
    /// kept.
    ///
    /// # Errors
    /// As every call.
    pub fn remove_delivered(&self, before: SystemTime) -> Result<usize, OutboxError> {
        let delivered = "DELETE FROM job WHERE step = 'done' AND updated < ?1";
        Ok(self.lock_connection().execute(delivered, [to_millis(before)])?)
    }

    /// Throws away what nobody wants: a row that was held or has failed, or a workspace that was kept. It is the row that
    /// goes first: what is left of a directory then is swept.
    ///
    /// # Errors
    /// [`OutboxError::Wanted`] where it may come to something by itself; [`OutboxError::Unknown`].
    pub fn discard_item(&self, id: &str) -> Result<(), OutboxError> {
        let artifacts = match self.workspace(id) {
            Ok(desk) => desk.plan.artifacts,
            Err(_) => self.get(id)?.order.artifacts,
        };
        let gone = {
            let connection = self.lock_connection();
            let job = "DELETE FROM job WHERE id = ?1 AND step IN ('held', 'failed')";
            let desk = "DELETE FROM desk WHERE id = ?1 AND remains IS NOT NULL";
            connection.execute(job, [id])? + connection.execute(desk, [id])?
        };
        if gone == 0 {
            return Err(OutboxError::Wanted { id: id.to_owned() });
        }
        dir_tree::remove_tree(&artifacts)
            .map_err(|source| OutboxError::File { path: artifacts, source })
    }

    /// One statement, so that nobody can see half of it.
    fn update_job(&self, old: &DeliveryJob, new: &DeliveryJob) -> Result<(), OutboxError> {
        let is_kept = matches!(new.step, DeliveryStep::Held | DeliveryStep::Failed);
        let bytes = if is_kept { retained::measure_dir(&new.order.artifacts) } else { 0 };
        let mut connection = self.lock_connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let written = change.execute(
            "UPDATE job SET step = :step, verdict = :verdict, reasons = :reasons, head = :head, is_pushed = :is_pushed,
                 pull_number = :number, pull_url = :url, attempts = :attempts, due = :due, error = :error, updated = :now,
                 code = :code, statement = :statement, mode = :mode, bytes = :bytes
             WHERE id = :id AND step = :old AND fence = :fence",
            named_params! {
                ":step": new.step.as_str(),
                ":verdict": new.verdict.map(VerdictKind::as_str),
                ":reasons": serde_json::to_string(&new.reasons).expect("reasons are text"),
                ":head": new.head.map(|head| head.to_string()),
                ":is_pushed": new.is_pushed,
                ":number": new.pull.as_ref().map(|pull| to_sql_integer(pull.number)),
                ":url": new.pull.as_ref().map(|pull| &pull.url),
                ":attempts": new.attempts,
                ":due": to_millis(new.due),
                ":error": new.error,
                ":code": new.code,
                ":statement": new.statement,
                ":mode": new.mode,
                ":bytes": bytes,
                ":now": to_millis(SystemTime::now()),
                ":id": old.id,
                ":old": old.step.as_str(),
                ":fence": to_sql_integer(old.fence),
            },
        )?;
        if written == 1 {
            return Ok(change.commit()?);
        }
        let fence = change.query_row("SELECT fence FROM job WHERE id = ?1", [&old.id], |row| {
            row.get::<_, i64>(0)
        });
        match fence.optional()? {
            Some(fence) if fence > to_sql_integer(old.fence) => {
                Err(OutboxError::Fenced { id: old.id.clone() })
            }
            Some(_) => Err(OutboxError::Moved { id: old.id.clone() }),
            None => Err(OutboxError::Unknown(old.id.clone())),
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

/// What lies in the same directory is the same work.
fn insert_job(
    change: &Connection,
    (id, grant): (&str, Option<String>),
    order: &DeliveryRequest,
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
            ":now": to_millis(SystemTime::now()),
            ":grant": grant,
        },
    )?;
    Ok(change.query_row(&select_sql("artifacts = ?1"), [&artifacts], read_job)?)
}

/// All of it is text, and fails only where a path is none.
fn to_json(what: &impl Serialize) -> Result<String, OutboxError> {
    serde_json::to_string(what).map_err(OutboxError::Path)
}

fn new_id() -> String {
    Uuid::now_v7().simple().to_string()
}

fn select_sql(what: &str) -> String {
    format!("SELECT {JOB_COLUMNS} FROM job WHERE {what}")
}

/// SQLite's integers are signed.
fn to_sql_integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// What stands in a row is short, and has no lines.
fn one_line(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(printable).take(MAX_ERROR_CHARS).collect()
}

/// Returns whether the time of a row has come. A time that is further away than any wait was written while the clock was
/// ahead of now.
fn is_due(due: SystemTime, now: SystemTime) -> bool {
    due <= now || due > now + MAX_WAIT
}

/// Returns when a row is due that was due at a time, and is put off. It is never due sooner than before.
fn rescheduled_time(due: SystemTime, after: Duration) -> SystemTime {
    let now = SystemTime::now();
    let next = now + after.min(MAX_WAIT);
    if is_due(due, now) { next } else { next.max(due) }
}

/// The oldest of each grant, then the second of each: nobody's rows are all before another's.
const ROUND_ROBIN_ORDER: &str =
    "row_number() OVER (PARTITION BY grant_id ORDER BY created, id), created, id";

const OPEN_CONDITION: &str = "step NOT IN ('done', 'held', 'failed')";

const MAX_ERROR_CHARS: usize = 500;

/// Longer than our own waits; a forge that asks for more is asked once a day.
const MAX_WAIT: Duration = Duration::from_hours(24);

/// Other processes hold the file for one statement at a time.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
