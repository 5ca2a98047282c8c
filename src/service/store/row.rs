//! One run as the journal has it.

use rusqlite::types::{ToSqlOutput, Type};
use rusqlite::{Connection, Row as Columns, ToSql, params_from_iter};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::RunEventKind;
use super::spending::SpendingCaps;
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::seal::AuditLogSeal;

/// A run that somebody asks for.
#[derive(Clone, Debug)]
pub struct NewRunRow {
    /// Made by the service.
    pub id: String,
    /// Whose it is.
    pub grant: String,
    /// Asked again with the same one, it is the same run.
    pub idempotency_key: Option<String>,
    /// How many runs its grant may have that have not ended, this one included.
    pub most: Option<u32>,
    /// The money that its grant's runs may cost together.
    pub caps: SpendingCaps,
    /// The run's own limit of money.
    pub max_cost_usd: Option<Nanodollars>,
    /// Of what is asked, to tell whether that is the same.
    pub digest: String,
    pub agent: String,
    /// Who pays.
    pub account: String,
    pub model: String,
    /// All that is needed to begin it, in the words of whoever will.
    pub wanted: String,
}

/// How a run has ended.
#[derive(Clone, Debug, Default)]
pub struct RunEnd {
    /// None where it was ok.
    pub error_code: Option<String>,
    /// A JSON object.
    pub result: Option<String>,
    pub stdout: String,
    pub stderr: String,
    /// The cost of its calls; all that was reserved for it, where that is not known.
    pub charged: Option<Nanodollars>,
    /// What its audit log is held against from now on; none where it has none, or none that is whole.
    pub log: Option<AuditLogSeal>,
    /// What its watchers are told when all of this is written down, and nothing after.
    pub words: Vec<(RunEventKind, Value)>,
}

/// A run, without what was asked and what came of it, which may be long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRow {
    pub id: String,
    pub grant: String,
    pub idempotency_key: Option<String>,
    pub digest: String,
    pub agent: String,
    pub account: String,
    pub model: String,
    pub state: RunPhase,
    /// Milliseconds since 1970, as the other times.
    pub created_ms: i64,
    pub started_ms: Option<i64>,
    pub ended_ms: Option<i64>,
    pub error_code: Option<String>,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunPhase {
    /// It was accepted, and has not begun.
    Queued,
    Running,
    Ended,
}

/// Which runs to list.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// Only those of a grant.
    pub grant: Option<String>,
    pub agent: Option<String>,
    pub state: Option<RunPhase>,
    /// Only those that are older than this one.
    pub before: Option<String>,
    /// How many at most.
    pub limit: u32,
}

impl RunPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Ended => "ended",
        }
    }
}

impl ToSql for RunPhase {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.as_str().into())
    }
}

impl RunFilter {
    pub(super) fn query_rows(&self, view: &Connection) -> rusqlite::Result<Vec<RunRow>> {
        let (query, given) = self.build_statement();
        view.prepare_cached(&query)?.query_map(params_from_iter(given), read_row)?.collect()
    }

    /// The statement has a condition for each filter that is given, and no other: SQLite uses no index for a condition
    /// that may not hold for a parameter.
    pub(super) fn build_statement(&self) -> (String, Vec<&dyn ToSql>) {
        let mut conditions = String::from("1");
        let mut given: Vec<&dyn ToSql> = vec![];
        let mut add = |condition: &str, value| {
            conditions.push_str(condition);
            given.push(value);
        };
        if let Some(grant) = &self.grant {
            add(" AND grant_id = ?", grant);
        }
        if let Some(agent) = &self.agent {
            add(" AND agent = ?", agent);
        }
        if let Some(state) = &self.state {
            add(" AND state = ?", state);
        }
        if let Some(before) = &self.before {
            add(" AND (created, id) < (SELECT created, id FROM run WHERE id = ?)", before);
        }
        let query = format!("{} ORDER BY created DESC, id DESC LIMIT ?", select_sql(&conditions));
        given.push(&self.limit);
        (query, given)
    }
}

pub(super) fn select_sql(conditions: &str) -> String {
    format!(
        "SELECT id, grant_id, idempotency_key, digest, agent, account, model, state, created, started, ended, error_code
         FROM run WHERE {conditions}"
    )
}

/// A row of [`select_sql`].
pub(super) fn read_row(row: &Columns<'_>) -> rusqlite::Result<RunRow> {
    let state: String = row.get(7)?;
    let odd = || rusqlite::Error::FromSqlConversionFailure(7, Type::Text, "no state".into());
    Ok(RunRow {
        id: row.get(0)?,
        grant: row.get(1)?,
        idempotency_key: row.get(2)?,
        digest: row.get(3)?,
        agent: row.get(4)?,
        account: row.get(5)?,
        model: row.get(6)?,
        state: match &*state {
            "queued" => RunPhase::Queued,
            "running" => RunPhase::Running,
            "ended" => RunPhase::Ended,
            _ => return Err(odd()),
        },
        created_ms: row.get(8)?,
        started_ms: row.get(9)?,
        ended_ms: row.get(10)?,
        error_code: row.get(11)?,
    })
}
