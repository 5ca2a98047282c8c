//! Workspace rows: the workspaces of agents whose work has not been collected.
//!
//! A row is written before the agent starts, so that a killed process leaves a trace. The row is removed when the work
//! is collected, or when there was no work. If something undelivered remains in the workspace, the row stays and names
//! it.

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

/// The facts about a run's work that are known before the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryPlan {
    #[serde(flatten)]
    pub repository: RepositoryUrl,
    pub state: BranchState,
    /// The facts of the run, except its cost, which is not known yet.
    pub facts: RunFacts,
    pub rules: ReviewRules,
    pub host: HostContext,
    /// The directory that the extracted work will be stored in.
    pub artifacts: PathBuf,
    /// The directory of run directories of this installation.
    pub run_dir: PathBuf,
    /// The socket of the Docker engine that runs the sandbox, if an engine runs it.
    pub docker_socket: PathBuf,
    /// The ID of the grant that allows the run, if the run was requested under a grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

/// One workspace row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspaceRow {
    /// The row's ID. The job's row inherits the ID when the work is collected.
    pub id: String,
    pub plan: DeliveryPlan,
    pub workspace: PathBuf,
    /// The reason why something remains in the workspace. `None` until the workspace has been inspected.
    pub left: Option<String>,
    /// The time of the next automatic attempt to collect the work, if this host was why the last attempt failed. `None`
    /// if the row waits for a person.
    pub due: Option<SystemTime>,
    /// The number of attempts that were due and failed.
    pub attempts: u32,
    pub created: SystemTime,
}

impl WorkspaceRow {
    /// Returns true if the workspace belongs to this run only: its directory is inside the run's artifacts directory.
    pub fn is_exclusive(&self) -> bool {
        self.workspace.starts_with(&self.plan.artifacts)
    }

    /// Returns true if the workspace must still be inspected, or be archived before the next run uses it.
    pub fn needs_collection(&self) -> bool {
        self.left.is_none() || self.due.is_some() || !self.is_exclusive()
    }

    /// Returns true if the workspace was inspected, and must only be archived before the next run uses it.
    pub fn needs_archiving(&self) -> bool {
        self.left.is_some() && self.due.is_none() && !self.is_exclusive()
    }

    /// Returns true if the row is due, or has no due time.
    pub fn is_due(&self) -> bool {
        self.due.is_none_or(|due| super::is_due(due, SystemTime::now()))
    }
}

impl DeliveryOutbox {
    /// Adds a row for a workspace, before an agent starts in it.
    ///
    /// # Errors
    /// Returns an error if the database does not work, or if a path is not UTF-8.
    pub fn register_workspace(
        &self,
        plan: &DeliveryPlan,
        workspace: &Path,
    ) -> Result<WorkspaceRow, OutboxError> {
        // The row is committed before the agent starts. From then on a sweep leaves the workspace alone.
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
                ":now": to_millis(self.clock.read_time()),
                ":grant": plan.grant,
            },
        )?;
        self.workspace(&id)
    }

    /// Returns a row by its ID.
    ///
    /// # Errors
    /// Returns [`OutboxError::NoSuchDelivery`] if there is no such row, or an error if the database does not work.
    pub fn workspace(&self, id: &str) -> Result<WorkspaceRow, OutboxError> {
        let select = select_sql("id = ?1");
        let found =
            self.lock_connection().query_row(&select, [id], read_workspace_row).optional()?;
        found.ok_or_else(|| OutboxError::NoSuchDelivery(id.chars().take(80).collect()))
    }

    /// Returns all workspace rows. The oldest comes first.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn workspaces(&self) -> Result<Vec<WorkspaceRow>, OutboxError> {
        let connection = self.lock_connection();
        let mut statement = connection.prepare(&select_sql("1"))?;
        let rows = statement.query_map([], read_workspace_row)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Returns the rows of a branch that [need collection](WorkspaceRow::needs_collection). A caller that holds the
    /// branch knows that no run is in progress in these workspaces.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
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
        // A row that cannot be parsed is kept in the list, so that the caller gets its error.
        let open = |row: &Result<WorkspaceRow, _>| {
            row.as_ref().map_or(true, WorkspaceRow::needs_collection)
        };
        Ok(rows.filter(open).collect::<Result<_, _>>()?)
    }

    /// Stores the reason why something remains in a workspace, and the workspace's new path.
    ///
    /// # Errors
    /// Returns [`OutboxError::NoSuchDelivery`] if an operator has discarded the row, or an error if the database does
    /// not work.
    pub fn retain_workspace(
        &self,
        row: &WorkspaceRow,
        workspace: &Path,
        why: &str,
    ) -> Result<WorkspaceRow, OutboxError> {
        self.lock_connection().execute(
            "UPDATE desk SET remains = ?2, workspace = ?3, due = NULL WHERE id = ?1",
            params![row.id, super::one_line(why), workspace.display().to_string()],
        )?;
        // The size is measured after the row is safe, because measuring many files takes long.
        self.record_workspace_size(&row.id, workspace)?;
        self.workspace(&row.id)
    }

    /// Stores the reason why the work could not be collected now, and the time of the next attempt. An attempt before
    /// the due time is not counted.
    ///
    /// # Errors
    /// Returns the errors of [`DeliveryOutbox::retain_workspace`].
    pub fn reschedule_workspace(
        &self,
        row: &WorkspaceRow,
        after: Duration,
        why: &str,
    ) -> Result<WorkspaceRow, OutboxError> {
        // Only an attempt that was due counts, so that an operator's early attempts do not use up the retries.
        let attempts = row.attempts + u32::from(row.is_due());
        // A row without a due time counts as long due.
        let due = super::rescheduled_time(row.due.unwrap_or(SystemTime::UNIX_EPOCH), after);
        self.lock_connection().execute(
            "UPDATE desk SET remains = ?2, due = ?3, attempts = ?4 WHERE id = ?1",
            params![row.id, super::one_line(why), to_millis(due), attempts],
        )?;
        self.workspace(&row.id)
    }

    /// Removes a row whose workspace has nothing that is not stored elsewhere.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn remove_workspace(&self, row: &WorkspaceRow) -> Result<(), OutboxError> {
        self.lock_connection().execute("DELETE FROM desk WHERE id = ?1", [&row.id])?;
        Ok(())
    }
}

fn select_sql(condition: &str) -> String {
    format!(
        "SELECT id, plan, workspace, remains, due, attempts, created FROM desk WHERE {condition} ORDER BY created, id"
    )
}

fn read_workspace_row(row: &Row<'_>) -> rusqlite::Result<WorkspaceRow> {
    let plan: String = row.get(1)?;
    // An unreadable plan is an error of its column, as a wrong SQL type is.
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
