//! Where an agent works, or has worked: a workspace whose work is not out of it.
//!
//! It is written down before the agent comes, so that a process that is killed leaves a row. It goes when the work is out,
//! or when there was none; where something is in it that is not delivered, it stays, and says what.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rusqlite::{OptionalExtension, Row, named_params, params};
use serde::{Deserialize, Serialize};

use super::job::{Host, instant, millis};
use super::{Error, Outbox};
use crate::delivery::rules::Rules;
use crate::delivery::statement::Facts;
use crate::relay::repository::Repository;
use crate::relay::{BranchKey, BranchState};

/// All that is known of a run's work before there is any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    #[serde(flatten)]
    pub repository: Repository,
    pub state: BranchState,
    /// What it has spent is not known yet.
    pub facts: Facts,
    pub rules: Rules,
    pub host: Host,
    /// Where what comes out is to lie.
    pub artifacts: PathBuf,
    /// Where the runs of its installation have their directories.
    pub run_dir: PathBuf,
    /// The engine that its sandbox is of, if it is of one.
    pub docker_socket: PathBuf,
    /// The grant that allows the run, where one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desk {
    /// That of the row of what comes out.
    pub id: String,
    pub plan: Plan,
    pub workspace: PathBuf,
    /// What stays there, and why; none as long as nobody has looked.
    pub left: Option<String>,
    /// When to look again by itself, where this machine was why it did not come out; none where it waits for a person.
    pub due: Option<SystemTime>,
    /// How often it was put off.
    pub attempts: u32,
    pub created: SystemTime,
}

impl Desk {
    /// Whether the workspace is the run's alone, and goes with what came out of it.
    pub fn is_own(&self) -> bool {
        self.workspace.starts_with(&self.plan.artifacts)
    }

    /// Whether somebody has yet to look what is in the workspace, or to put it away before the next run comes into it.
    pub fn is_open(&self) -> bool {
        self.left.is_none() || self.due.is_some() || !self.is_own()
    }

    /// Whether it was looked at, and only has to be put away before the next run comes into it.
    pub fn is_in_the_way(&self) -> bool {
        self.left.is_some() && self.due.is_none() && !self.is_own()
    }

    /// Whether its time has come, if it has one.
    pub fn is_due(&self) -> bool {
        self.due.is_none_or(|due| super::is_due(due, SystemTime::now()))
    }
}

impl Outbox {
    /// Writes down that an agent is about to work.
    ///
    /// # Errors
    /// As every call.
    pub fn begin(&self, plan: &Plan, workspace: &Path) -> Result<Desk, Error> {
        let id = super::fresh_id();
        self.connection().execute(
            "INSERT INTO desk (id, repository, branch_key, run, plan, artifacts, workspace, created, grant_id)
             VALUES (:id, :repository, :key, :run, :plan, :artifacts, :workspace, :now, :grant)",
            named_params! {
                ":id": id,
                ":repository": plan.repository.key(),
                ":key": plan.state.branch.key().as_str(),
                ":run": plan.facts.run,
                ":plan": super::written(plan)?,
                ":artifacts": plan.artifacts.display().to_string(),
                ":workspace": workspace.display().to_string(),
                ":now": millis(SystemTime::now()),
                ":grant": plan.grant,
            },
        )?;
        self.desk(&id)
    }

    /// # Errors
    /// [`Error::Unknown`], or as every call.
    pub fn desk(&self, id: &str) -> Result<Desk, Error> {
        let select = select("id = ?1");
        let found = self.connection().query_row(&select, [id], read).optional()?;
        found.ok_or_else(|| Error::Unknown(id.chars().take(80).collect()))
    }

    /// All of them; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn desks(&self) -> Result<Vec<Desk>, Error> {
        let connection = self.connection();
        let mut statement = connection.prepare(&select("1"))?;
        let rows = statement.query_map([], read)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Those at a branch that are [open](Desk::is_open). Whoever holds the branch knows that no run goes on there.
    ///
    /// # Errors
    /// As every call.
    pub fn desks_at(&self, repository: &Repository, key: &BranchKey) -> Result<Vec<Desk>, Error> {
        let connection = self.connection();
        let mut statement = connection.prepare(&select("repository = ?1 AND branch_key = ?2"))?;
        let rows = statement.query_map(params![repository.key(), key.as_str()], read)?;
        let open = |desk: &Result<Desk, _>| desk.as_ref().map_or(true, Desk::is_open);
        Ok(rows.filter(open).collect::<Result<_, _>>()?)
    }

    /// Writes down what stays in a workspace, and where that is now.
    ///
    /// # Errors
    /// [`Error::Unknown`] where somebody has thrown it away; as every call.
    pub fn leave(&self, desk: &Desk, workspace: &Path, why: &str) -> Result<Desk, Error> {
        self.connection().execute(
            "UPDATE desk SET remains = ?2, workspace = ?3, due = NULL WHERE id = ?1",
            params![desk.id, super::short(why), workspace.display().to_string()],
        )?;
        self.weigh_desk(&desk.id, workspace)?;
        self.desk(&desk.id)
    }

    /// Writes down why the work did not come out now, and when to try again. An attempt before its time does not count.
    ///
    /// # Errors
    /// As [`Outbox::leave`].
    pub fn put_desk_off(&self, desk: &Desk, after: Duration, why: &str) -> Result<Desk, Error> {
        let attempts = desk.attempts + u32::from(desk.is_due());
        let due = super::put_off(desk.due.unwrap_or(SystemTime::UNIX_EPOCH), after);
        self.connection().execute(
            "UPDATE desk SET remains = ?2, due = ?3, attempts = ?4 WHERE id = ?1",
            params![desk.id, super::short(why), millis(due), attempts],
        )?;
        self.desk(&desk.id)
    }

    /// Nothing is there that is not elsewhere.
    ///
    /// # Errors
    /// As every call.
    pub fn clear(&self, desk: &Desk) -> Result<(), Error> {
        self.connection().execute("DELETE FROM desk WHERE id = ?1", [&desk.id])?;
        Ok(())
    }
}

fn select(what: &str) -> String {
    format!(
        "SELECT id, plan, workspace, remains, due, attempts, created FROM desk WHERE {what} ORDER BY created, id"
    )
}

fn read(row: &Row<'_>) -> rusqlite::Result<Desk> {
    let plan: String = row.get(1)?;
    let odd = |error: serde_json::Error| {
        rusqlite::Error::FromSqlConversionFailure(1, rusqlite::types::Type::Text, error.into())
    };
    Ok(Desk {
        id: row.get(0)?,
        plan: serde_json::from_str(&plan).map_err(odd)?,
        workspace: PathBuf::from(row.get::<_, String>(2)?),
        left: row.get(3)?,
        due: row.get::<_, Option<i64>>(4)?.map(instant),
        attempts: row.get(5)?,
        created: instant(row.get(6)?),
    })
}
