//! The questions about the tool calls of a service's runs: opened with the service, told to the watchers of each run,
//! and closed with the run.

use std::sync::Arc;
use std::time::SystemTime;

use serde_json::json;

use super::{RunService, RunServiceInner};
use crate::base::db::SqliteDatabase;
use crate::gateway::config::GatewayConfig;
use crate::runner::tool_opener::RunToolOpener;
use crate::service::store::{RunEventKind, RunStore};
use crate::tools::approval::store::ApprovalStore;
use crate::tools::approval::{ApprovalRow, ApprovalState, format_unix_millis};

/// Opens the questions of a service. The watchers of a run learn of its questions and of their ends.
pub(super) fn open_approvals(database: SqliteDatabase, run_store: RunStore) -> ApprovalStore {
    ApprovalStore::new(database).with_observer(move |row| publish_row(&run_store, row))
}

/// Publishes a step of a question. The event has no arguments: who reads events is not always who may approve.
fn publish_row(run_store: &RunStore, row: &ApprovalRow) {
    let mut data = json!({
        "id": row.id,
        "tool": row.tool,
        "rule": row.rule,
        "digest": row.digest,
        "state": row.state.as_str(),
        "expires_at": format_unix_millis(row.not_after_ms),
    });
    let kind = if row.state == ApprovalState::Pending {
        RunEventKind::ApprovalRequested
    } else {
        data["by"] = json!(row.by);
        RunEventKind::ApprovalResolved
    };
    run_store.publish_event(&row.run, kind, &data);
}

impl RunService {
    /// Returns the questions about tool calls; `None` if no person can answer in this service.
    pub fn approvals(&self) -> Option<ApprovalStore> {
        self.0.approvals.clone()
    }

    /// Withdraws the open questions of an earlier process. Their calls have ended with that process, so an answer that
    /// came before must not start anything now.
    pub(super) async fn withdraw_earlier_questions(&self) -> anyhow::Result<()> {
        if let Some(approvals) = &self.0.approvals {
            let withdrawn = approvals.withdraw_all(SystemTime::now()).await?;
            if withdrawn > 0 {
                tracing::info!(withdrawn, "an earlier process left questions about tool calls");
            }
        }
        Ok(())
    }
}

impl RunServiceInner {
    /// Withdraws the questions of a run that is about to end. The run's own calls have closed theirs already; this step
    /// is for a run whose gateway has failed.
    pub(super) async fn withdraw_questions(&self, run: &str) -> anyhow::Result<()> {
        if let Some(approvals) = &self.approvals {
            approvals.withdraw_run(run, SystemTime::now()).await?;
        }
        Ok(())
    }
}

/// Puts the place where people answer into the configuration of runs.
pub(super) fn add_approvals(config: &mut GatewayConfig, approvals: Option<&ApprovalStore>) {
    let opener = RunToolOpener { jobs: None, approvals: approvals.cloned() };
    config.tools.opener = Some(Arc::new(opener));
}
