//! What is to be delivered, a row for each run's work, so that nothing that was begun is forgotten or done twice.
//!
//! A row says how far the work has come. It is written after a step and before the next; each step can therefore find
//! that it was done already, and does it once more or not at all. What came out of the sandbox lies in a directory beside
//! it, since everything before the push is made anew from that.
//!
//! Before there is a row, there is a [`Desk`]: the workspace of a run that goes on, or has left something there.
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

mod desk;
mod job;
mod kept;
mod schema;

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, named_params, params};
use serde::Serialize;
use uuid::Uuid;

pub use desk::{Desk, Plan};
pub use job::{Host, Job, Mark, Order, Progress, Pull, Step, Verdict, Words};
pub use kept::Kept;

use crate::base::tree;
use crate::delivery::rules::Rules;
use crate::relay::BranchKey;
use crate::relay::repository::Repository;
use job::{COLUMNS, millis, read};
pub(in crate::delivery) use job::{MOVED, OBJECTS};

/// The rows of one machine.
#[derive(Debug)]
pub struct Outbox {
    connection: Mutex<Connection>,
}

/// Why a row cannot be read or moved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use `{}`", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the outbox cannot be read or written")]
    Database(#[from] rusqlite::Error),
    #[error("the outbox is of a later version ({found}; this program knows {})", schema::VERSION)]
    Later { found: i64 },
    #[error("there is no relay `{0}`; `cogni-gateway relay status` lists them")]
    Unknown(String),
    #[error("relay `{id}` has been moved on by another process meanwhile")]
    Moved { id: String },
    #[error("a relay that is {from} cannot become {to}")]
    Skipped { from: Step, to: Step },
    #[error(
        "relay `{id}` is delivered, on its way or of a run that goes on; only what is held, has failed or was left can be thrown away"
    )]
    Wanted { id: String },
    #[error("relay `{id}` belongs to a later holder of the branch")]
    Fenced { id: String },
    #[error("it has to do with a path that is not UTF-8, which the outbox cannot keep")]
    Path(#[source] serde_json::Error),
}

impl Outbox {
    /// Opens the outbox, or makes it, for us alone.
    ///
    /// # Errors
    /// The file cannot be used, or a later version made it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = |source| Error::File { path: path.to_owned(), source };
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
        connection.busy_timeout(BUSY)?;
        schema::prepare(&mut connection)?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    /// Writes down that something came out of a sandbox, in the place of its desk. What is there already stays as it is:
    /// what lies in the same directory is the same work.
    ///
    /// # Errors
    /// As every call.
    pub fn add(&self, order: &Order) -> Result<Job, Error> {
        let artifacts = order.artifacts.display().to_string();
        let mut connection = self.connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let cleared = "DELETE FROM desk WHERE artifacts = ?1 RETURNING id, grant_id";
        let desk = change.query_row(cleared, [&artifacts], |row| Ok((row.get(0)?, row.get(1)?)));
        let (id, grant) = desk.optional()?.unwrap_or_else(|| (fresh_id(), None));
        let job = insert(&change, (&id, grant), order)?;
        change.commit()?;
        Ok(job)
    }

    /// The same, where something stays in the workspace: the work takes the desk's name, and the desk another.
    ///
    /// # Errors
    /// [`Error::Unknown`] where there is no such desk any more; as every call.
    pub fn add_beside(&self, order: &Order, desk: &Desk, why: &str) -> Result<(Job, Desk), Error> {
        let left = fresh_id();
        let job = {
            let mut connection = self.connection();
            let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let renamed = change.execute(
                "UPDATE desk SET id = ?2, remains = ?3, due = NULL WHERE id = ?1",
                params![desk.id, left, short(why)],
            )?;
            if renamed == 0 {
                return Err(Error::Unknown(desk.id.clone()));
            }
            let job = insert(&change, (&desk.id, desk.plan.grant.clone()), order)?;
            change.commit()?;
            job
        };
        self.weigh_desk(&left, &desk.workspace)?;
        Ok((job, self.desk(&left)?))
    }

    /// # Errors
    /// [`Error::Unknown`], or as every call.
    pub fn get(&self, id: &str) -> Result<Job, Error> {
        let found = self.connection().query_row(&select("id = ?1"), [id], read).optional()?;
        found.ok_or_else(|| Error::Unknown(id.chars().take(80).collect()))
    }

    /// All rows, or those that are not at their end; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn list(&self, only_open: bool) -> Result<Vec<Job>, Error> {
        let what = if only_open { OPEN } else { "1" };
        self.select(what, &[])
    }

    /// What came out of a run's sandbox; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn of_run(&self, run: &str) -> Result<Vec<Job>, Error> {
        self.select("run = ?1", &[&run])
    }

    /// What waits to be taken up again, and has waited long enough; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn due(&self, now: SystemTime) -> Result<Vec<Job>, Error> {
        let furthest = millis(now + LONGEST_WAIT);
        self.select_by(
            IN_TURN,
            &format!("{OPEN} AND (due <= ?1 OR due > ?2)"),
            &[&millis(now), &furthest],
        )
    }

    /// What was found to need a review, of the work for a branch; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn reviewed(&self, repository: &Repository, key: &BranchKey) -> Result<Vec<Job>, Error> {
        let what = "verdict = 'review' AND repository = ?1 AND branch_key = ?2";
        self.select(what, &[&repository.key(), &key.as_str()])
    }

    /// What has not been delivered yet to a branch. A run that begins there would not build on it.
    ///
    /// # Errors
    /// As every call.
    pub fn pending(&self, repository: &Repository, key: &BranchKey) -> Result<Vec<Job>, Error> {
        let (repository, key) = (repository.key(), key.as_str());
        let what = format!("{OPEN} AND repository = ?1 AND branch_key = ?2");
        self.select(&what, &[&repository, &key])
    }

    /// Takes a row up for whoever holds the branch now.
    ///
    /// # Errors
    /// [`Error::Fenced`] where a later holder has been at it.
    pub fn claim(&self, job: &Job, fence: u64) -> Result<Job, Error> {
        let claimed = self.connection().execute(
            "UPDATE job SET fence = ?2 WHERE id = ?1 AND fence <= ?2",
            params![job.id, signed(fence)],
        )?;
        if claimed == 0 {
            return Err(Error::Fenced { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Writes down that a step is done.
    ///
    /// # Errors
    /// [`Error::Skipped`] where this is not the next step; [`Error::Moved`] or [`Error::Fenced`] where the row is not as
    /// `job` says any more.
    pub fn advance(&self, job: &Job, progress: Progress) -> Result<Job, Error> {
        let to = progress.step();
        if !job.step.may_become(to) {
            return Err(Error::Skipped { from: job.step, to });
        }
        let mut next = Job { step: to, error: None, code: None, ..job.clone() };
        progress.apply(&mut next);
        self.write(job, &next)?;
        self.get(&job.id)
    }

    /// Writes down what has become of the statement beside the commit.
    ///
    /// # Errors
    /// As [`Outbox::advance`].
    pub fn vouch(&self, job: &Job, said: &str) -> Result<Job, Error> {
        self.write(job, &Job { statement: Some(short(said)), ..job.clone() })?;
        self.get(&job.id)
    }

    /// Leaves a row for later, with the reason, as its time had come and this was an attempt.
    ///
    /// # Errors
    /// As [`Outbox::advance`].
    pub fn postpone(&self, job: &Job, after: Duration, why: &str) -> Result<Job, Error> {
        let next = Job { attempts: job.attempts + 1, ..job.clone() };
        self.put_off(&next, after, why)
    }

    /// The same where it was none. The row is never due sooner than before.
    ///
    /// # Errors
    /// As [`Outbox::advance`].
    pub fn put_off(&self, job: &Job, after: Duration, why: &str) -> Result<Job, Error> {
        let due = put_off(job.due, after);
        self.write(job, &Job { due, error: Some(short(why)), ..job.clone() })?;
        self.get(&job.id)
    }

    /// Begins again with what came out of the sandbox, because somebody asks for it.
    ///
    /// # Errors
    /// [`Error::Skipped`] where it has been delivered already.
    pub fn revive(&self, job: &Job) -> Result<Job, Error> {
        if job.step == Step::Done {
            return Err(Error::Skipped { from: job.step, to: Step::Extracted });
        }
        // What has been pushed stays so; only what comes after it is done again.
        let step = if job.is_pushed { Step::Pushed } else { Step::Extracted };
        let (due, attempts) = (SystemTime::now(), 0);
        let next = Job { step, due, attempts, error: None, code: None, ..job.clone() };
        self.write(job, &next)?;
        self.get(&job.id)
    }

    /// Has a row judged by other rules, and beside other credentials of this host, than its own, from now on. Who asks for
    /// it has the branch, so that nobody else is judging.
    ///
    /// # Errors
    /// [`Error::Skipped`] where it is at its branch; as [`Outbox::advance`].
    pub fn judge_by(&self, job: &Job, rules: Rules, host: Host) -> Result<Job, Error> {
        if job.is_pushed {
            return Err(Error::Skipped { from: job.step, to: Step::Judged });
        }
        let order = Order { rules: Some(rules), host: Some(host), ..job.order.clone() };
        let order = written(&order)?;
        let written = self.connection().execute(
            "UPDATE job SET \"order\" = ?1 WHERE id = ?2 AND step = ?3 AND fence = ?4",
            params![order, job.id, job.step.as_str(), signed(job.fence)],
        )?;
        if written == 0 {
            return Err(Error::Moved { id: job.id.clone() });
        }
        self.get(&job.id)
    }

    /// Removes the rows that were delivered before `before`, and says how many. Others are never removed: their work is
    /// kept.
    ///
    /// # Errors
    /// As every call.
    pub fn forget(&self, before: SystemTime) -> Result<usize, Error> {
        let delivered = "DELETE FROM job WHERE step = 'done' AND updated < ?1";
        Ok(self.connection().execute(delivered, [millis(before)])?)
    }

    /// Throws away what nobody wants: a row that was held or has failed, or a workspace that was kept. It is the row that
    /// goes first: what is left of a directory then is swept.
    ///
    /// # Errors
    /// [`Error::Wanted`] where it may come to something by itself; [`Error::Unknown`].
    pub fn discard(&self, id: &str) -> Result<(), Error> {
        let artifacts = match self.desk(id) {
            Ok(desk) => desk.plan.artifacts,
            Err(_) => self.get(id)?.order.artifacts,
        };
        let gone = {
            let connection = self.connection();
            let job = "DELETE FROM job WHERE id = ?1 AND step IN ('held', 'failed')";
            let desk = "DELETE FROM desk WHERE id = ?1 AND remains IS NOT NULL";
            connection.execute(job, [id])? + connection.execute(desk, [id])?
        };
        if gone == 0 {
            return Err(Error::Wanted { id: id.to_owned() });
        }
        tree::remove(&artifacts).map_err(|source| Error::File { path: artifacts, source })
    }

    /// One statement, so that nobody can see half of it.
    fn write(&self, old: &Job, new: &Job) -> Result<(), Error> {
        let is_kept = matches!(new.step, Step::Held | Step::Failed);
        let bytes = if is_kept { kept::measured(&new.order.artifacts) } else { 0 };
        let mut connection = self.connection();
        let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let written = change.execute(
            "UPDATE job SET step = :step, verdict = :verdict, reasons = :reasons, head = :head, is_pushed = :is_pushed,
                 pull_number = :number, pull_url = :url, attempts = :attempts, due = :due, error = :error, updated = :now,
                 code = :code, statement = :statement, mode = :mode, bytes = :bytes
             WHERE id = :id AND step = :old AND fence = :fence",
            named_params! {
                ":step": new.step.as_str(),
                ":verdict": new.verdict.map(Verdict::as_str),
                ":reasons": serde_json::to_string(&new.reasons).expect("reasons are text"),
                ":head": new.head.map(|head| head.to_string()),
                ":is_pushed": new.is_pushed,
                ":number": new.pull.as_ref().map(|pull| signed(pull.number)),
                ":url": new.pull.as_ref().map(|pull| &pull.url),
                ":attempts": new.attempts,
                ":due": millis(new.due),
                ":error": new.error,
                ":code": new.code,
                ":statement": new.statement,
                ":mode": new.mode,
                ":bytes": bytes,
                ":now": millis(SystemTime::now()),
                ":id": old.id,
                ":old": old.step.as_str(),
                ":fence": signed(old.fence),
            },
        )?;
        if written == 1 {
            return Ok(change.commit()?);
        }
        let fence = change.query_row("SELECT fence FROM job WHERE id = ?1", [&old.id], |row| {
            row.get::<_, i64>(0)
        });
        match fence.optional()? {
            Some(fence) if fence > signed(old.fence) => Err(Error::Fenced { id: old.id.clone() }),
            Some(_) => Err(Error::Moved { id: old.id.clone() }),
            None => Err(Error::Unknown(old.id.clone())),
        }
    }

    fn select(&self, what: &str, given: &[&dyn rusqlite::ToSql]) -> Result<Vec<Job>, Error> {
        self.select_by("created, id", what, given)
    }

    fn select_by(
        &self,
        order: &str,
        what: &str,
        given: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<Job>, Error> {
        let connection = self.connection();
        let mut statement = connection.prepare(&format!("{} ORDER BY {order}", select(what)))?;
        let rows = statement.query_map(given, read)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What lies in the same directory is the same work.
fn insert(
    change: &Connection,
    (id, grant): (&str, Option<String>),
    order: &Order,
) -> Result<Job, Error> {
    let artifacts = order.artifacts.display().to_string();
    change.execute(
        "INSERT INTO job (id, repository, branch_key, run, \"order\", artifacts, step, due, created, updated, grant_id)
         SELECT :id, :repository, :key, :run, :order, :artifacts, 'extracted', :now, :now, :now, :grant
         WHERE NOT EXISTS (SELECT 1 FROM job WHERE artifacts = :artifacts)",
        named_params! {
            ":id": id,
            ":repository": order.repository.key(),
            ":key": order.branch().key().as_str(),
            ":run": order.facts.run,
            ":order": written(order)?,
            ":artifacts": artifacts,
            ":now": millis(SystemTime::now()),
            ":grant": grant,
        },
    )?;
    Ok(change.query_row(&select("artifacts = ?1"), [&artifacts], read)?)
}

/// All of it is text, and fails only where a path is none.
fn written(what: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string(what).map_err(Error::Path)
}

fn fresh_id() -> String {
    Uuid::now_v7().simple().to_string()
}

fn select(what: &str) -> String {
    format!("SELECT {COLUMNS} FROM job WHERE {what}")
}

/// SQLite's integers are signed.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// What stands in a row is short, and has no lines.
fn short(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(printable).take(MAX_ERROR).collect()
}

/// Returns whether the time of a row has come. A time that is further away than any wait was written while the clock was
/// ahead of now.
fn is_due(due: SystemTime, now: SystemTime) -> bool {
    due <= now || due > now + LONGEST_WAIT
}

/// Returns when a row is due that was due at a time, and is put off. It is never due sooner than before.
fn put_off(due: SystemTime, after: Duration) -> SystemTime {
    let now = SystemTime::now();
    let next = now + after.min(LONGEST_WAIT);
    if is_due(due, now) { next } else { next.max(due) }
}

/// The oldest of each grant, then the second of each: nobody's rows are all before another's.
const IN_TURN: &str = "row_number() OVER (PARTITION BY grant_id ORDER BY created, id), created, id";

const OPEN: &str = "step NOT IN ('done', 'held', 'failed')";

const MAX_ERROR: usize = 500;

/// Longer than our own waits; a forge that asks for more is asked once a day.
const LONGEST_WAIT: Duration = Duration::from_hours(24);

/// Other processes hold the file for one statement at a time.
const BUSY: Duration = Duration::from_secs(30);
