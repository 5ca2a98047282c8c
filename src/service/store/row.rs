//! One run as a row of the run store.

use rusqlite::types::{ToSqlOutput, Type};
use rusqlite::{Connection, Row as Columns, ToSql, params_from_iter};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::RunEventKind;
use super::spending::SpendingCaps;
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::seal::AuditLogSeal;

/// A new run for the run store.
#[derive(Clone, Debug)]
pub struct NewRunRow {
    /// The run's id, which the service generates.
    pub id: String,
    /// The id of the grant that owns the run.
    pub grant: String,
    /// The idempotency key. A repeated request with the same key returns the same run.
    pub idempotency_key: Option<String>,
    /// The caps on the money that the grant's runs may cost together.
    pub caps: SpendingCaps,
    /// The run's own limit of money.
    pub max_cost_usd: Option<Nanodollars>,
    /// The digest of the request, by which the service recognises a repeated request.
    pub digest: String,
    pub agent: String,
    /// The account that pays.
    pub account: String,
    pub model: String,
    /// The request as JSON, from which any process can begin the run.
    pub submission: String,
}

/// The end of a run.
#[derive(Clone, Debug, Default)]
pub struct RunEnd {
    /// The error code; `None` if the run succeeded.
    pub error_code: Option<String>,
    /// The result as a JSON object.
    pub result: Option<String>,
    pub stdout: String,
    pub stderr: String,
    /// The cost of the run's calls. `None` if the cost is unknown; then the whole reservation is charged.
    pub charged: Option<Nanodollars>,
    /// The seal that later checks compare the audit log with; `None` if the run has no log or a damaged one.
    pub log: Option<AuditLogSeal>,
    /// The last events, which watchers receive after the end is stored.
    pub last_events: Vec<(RunEventKind, Value)>,
}

/// A run without its request and its result, which may be long.
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
    /// The time of the acceptance, in milliseconds since 1970. The other times have the same form.
    pub created_ms: i64,
    pub started_ms: Option<i64>,
    pub ended_ms: Option<i64>,
    /// The time of a client's request to cancel the run.
    pub cancelled_ms: Option<i64>,
    pub error_code: Option<String>,
}

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunPhase {
    /// The run was accepted and has not begun.
    Queued,
    Running,
    Ended,
}

/// A filter for lists of runs.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// The grant whose runs are listed.
    pub grant: Option<String>,
    pub agent: Option<String>,
    pub state: Option<RunPhase>,
    /// The id of a run; only older runs are listed.
    pub before: Option<String>,
    /// The maximum number of runs.
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

    /// Builds a statement that has conditions only for the filters that are set. SQLite uses no index for a condition
    /// that a parameter may switch off.
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
            // A cursor by value: the page after a run stays the same when newer runs arrive.
            add(" AND (created, id) < (SELECT created, id FROM run WHERE id = ?)", before);
        }
        let query = format!("{} ORDER BY created DESC, id DESC LIMIT ?", select_sql(&conditions));
        given.push(&self.limit);
        (query, given)
    }
}

pub(super) fn select_sql(conditions: &str) -> String {
    format!(
        "SELECT id, grant_id, idempotency_key, digest, agent, account, model, state, created, started, ended, cancelled, error_code
         FROM run WHERE {conditions}"
    )
}

/// Reads a row of [`select_sql`].
pub(super) fn read_row(row: &Columns<'_>) -> rusqlite::Result<RunRow> {
    let state: String = row.get(7)?;
    // The table's CHECK allows only these three phases.
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
        cancelled_ms: row.get(11)?,
        error_code: row.get(12)?,
    })
}
