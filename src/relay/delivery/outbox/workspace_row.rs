//! Where an agent works, or has worked: a workspace whose work is not out of it.
//!
//! It is written down before the agent comes, so that a process that is killed leaves a row. It goes when the work is out,
//! or when there was none; where something is in it that is not delivered, it stays, and says what.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rusqlite::{OptionalExtension, Row, named_params, params};
use serde::{Deserialize, Serialize};

use super::job::{HostContext, from_millis, to_millis};
use super::{DeliveryOutbox, OutboxError};
use crate::relay::delivery::rules::ReviewRules;
use crate::relay::delivery::statement::RunFacts;
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{BranchKey, BranchState};

/// All that is known of a run's work before there is any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryPlan {
    #[serde(flatten)]
    pub repository: RepositoryUrl,
    pub state: BranchState,
    /// What it has spent is not known yet.
    pub facts: RunFacts,
    pub rules: ReviewRules,
    pub host: HostContext,
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
pub struct WorkspaceRow {
    /// That of the row of what comes out.
    pub id: String,
    pub plan: DeliveryPlan,
    pub workspace: PathBuf,
    /// What stays there, and why; none as long as nobody has looked.
    pub left: Option<String>,
    /// When to look again by itself, where this machine was why it did not come out; none where it waits for a person.
    pub due: Option<SystemTime>,
    /// How often it was put off.
    pub attempts: u32,
    pub created: SystemTime,
}

impl WorkspaceRow {
    /// Whether the workspace is the run's alone, and goes with what came out of it.
    pub fn is_exclusive(&self) -> bool {
        self.workspace.starts_with(&self.plan.artifacts)
    }

    /// Whether somebody has yet to look what is in the workspace, or to put it away before the next run comes into it.
    pub fn needs_collection(&self) -> bool {
        self.left.is_none() || self.due.is_some() || !self.is_exclusive()
    }

    /// Whether it was looked at, and only has to be put away before the next run comes into it.
    pub fn needs_archiving(&self) -> bool {
        self.left.is_some() && self.due.is_none() && !self.is_exclusive()
    }

    /// Whether its time has come, if it has one.
    pub fn is_due(&self) -> bool {
        self.due.is_none_or(|due| super::is_due(due, SystemTime::now()))
    }
}

impl DeliveryOutbox {
    /// Writes down that an agent is about to work.
    ///
    /// # Errors
    /// As every call.
    pub fn register_workspace(
        &self,
        plan: &DeliveryPlan,
        workspace: &Path,
    ) -> Result<WorkspaceRow, OutboxError> {
        let id = super::new_id();
        self.lock_connection().execute(
            "INSERT INTO desk (id, repository, branch_key, run, plan, artifacts, workspace, created, grant_id)
             VALUES (:id, :repository, :key, :run, :plan, :artifacts, :workspace, :now, :grant)",
            named_params! {
                ":id": id,
                ":repository": plan.repository.canonical_key(),
                ":key": plan.state.branch.key().as_str(),
                ":run": plan.facts.run,
                ":plan": super::to_json(plan)?,
                ":artifacts": plan.artifacts.display().to_string(),
                ":workspace": workspace.display().to_string(),
                ":now": to_millis(SystemTime::now()),
                ":grant": plan.grant,
            },
        )?;
        self.workspace(&id)
    }

    /// # Errors
    /// [`OutboxError::Unknown`], or as every call.
    pub fn workspace(&self, id: &str) -> Result<WorkspaceRow, OutboxError> {
        let select = select_sql("id = ?1");
        let found =
            self.lock_connection().query_row(&select, [id], read_workspace_row).optional()?;
        found.ok_or_else(|| OutboxError::Unknown(id.chars().take(80).collect()))
    }

    /// All of them; oldest first.
    ///
    /// # Errors
    /// As every call.
    pub fn workspaces(&self) -> Result<Vec<WorkspaceRow>, OutboxError> {
        let connection = self.lock_connection();
        let mut statement = connection.prepare(&select_sql("1"))?;
        let rows = statement.query_map([], read_workspace_row)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Those at a branch that are [open](WorkspaceRow::needs_collection). Whoever holds the branch knows that no run goes on there.
    ///
    /// # Errors
    /// As every call.
    pub fn workspaces_at(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<Vec<WorkspaceRow>, OutboxError> {
        let connection = self.lock_connection();
        let mut statement =
            connection.prepare(&select_sql("repository = ?1 AND branch_key = ?2"))?;
        let rows = statement
            .query_map(params![repository.canonical_key(), key.as_str()], read_workspace_row)?;
        let open = |desk: &Result<WorkspaceRow, _>| {
            desk.as_ref().map_or(true, WorkspaceRow::needs_collection)
        };
        Ok(rows.filter(open).collect::<Result<_, _>>()?)
    }

    /// Writes down what stays in a workspace, and where that is now.
    ///
    /// # Errors
    /// [`OutboxError::Unknown`] where somebody has thrown it away; as every call.
    pub fn retain_workspace(
        &self,
        desk: &WorkspaceRow,
        workspace: &Path,
        why: &str,
    ) -> Result<WorkspaceRow, OutboxError> {
        self.lock_connection().execute(
            "UPDATE desk SET remains = ?2, workspace = ?3, due = NULL WHERE id = ?1",
            params![desk.id, super::one_line(why), workspace.display().to_string()],
        )?;
        self.record_workspace_size(&desk.id, workspace)?;
        self.workspace(&desk.id)
    }

    /// Writes down why the work did not come out now, and when to try again. An attempt before its time does not count.
    ///
    /// # Errors
    /// As [`DeliveryOutbox::retain_workspace`].
    pub fn reschedule_workspace(
        &self,
        desk: &WorkspaceRow,
        after: Duration,
        why: &str,
    ) -> Result<WorkspaceRow, OutboxError> {
        let attempts = desk.attempts + u32::from(desk.is_due());
        let due = super::rescheduled_time(desk.due.unwrap_or(SystemTime::UNIX_EPOCH), after);
        self.lock_connection().execute(
            "UPDATE desk SET remains = ?2, due = ?3, attempts = ?4 WHERE id = ?1",
            params![desk.id, super::one_line(why), to_millis(due), attempts],
        )?;
        self.workspace(&desk.id)
    }

    /// Nothing is there that is not elsewhere.
    ///
    /// # Errors
    /// As every call.
    pub fn remove_workspace(&self, desk: &WorkspaceRow) -> Result<(), OutboxError> {
        self.lock_connection().execute("DELETE FROM desk WHERE id = ?1", [&desk.id])?;
        Ok(())
    }
}

fn select_sql(what: &str) -> String {
    format!(
        "SELECT id, plan, workspace, remains, due, attempts, created FROM desk WHERE {what} ORDER BY created, id"
    )
}

fn read_workspace_row(row: &Row<'_>) -> rusqlite::Result<WorkspaceRow> {
    let plan: String = row.get(1)?;
    let odd = |error: serde_json::Error| {
        rusqlite::Error::FromSqlConversionFailure(1, rusqlite::types::Type::Text, error.into())
    };
    Ok(WorkspaceRow {
        id: row.get(0)?,
        plan: serde_json::from_str(&plan).map_err(odd)?,
        workspace: PathBuf::from(row.get::<_, String>(2)?),
        left: row.get(3)?,
        due: row.get::<_, Option<i64>>(4)?.map(from_millis),
        attempts: row.get(5)?,
        created: from_millis(row.get(6)?),
    })
}
