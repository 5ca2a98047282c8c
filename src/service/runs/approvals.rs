//! The questions about the tool calls of a service's runs: opened with the service, told to the watchers of each run,
//! and closed with the run.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{RunService, RunServiceInner};
use crate::base::db::{DatabaseError, SqliteDatabase};
use crate::gateway::config::GatewayConfig;
use crate::llm::budget::{Nanodollars, RaiseError, SpendingLimits};
use crate::runner::agents::AgentCatalog;
use crate::runner::tool_opener::{CompiledTools, RunToolOpener};
use crate::service::auth::GrantStoreError;
use crate::service::store::{RunEventKind, RunRow, RunStore, SpendingCaps};
use crate::tools::approval::open_questions::RunOwnerFuture;
use crate::tools::approval::present_tools::PresentTools;
use crate::tools::approval::standing::StandingApproval;
use crate::tools::approval::store::ApprovalStore;
use crate::tools::approval::webhook::Webhook;
use crate::tools::approval::{ApprovalRow, ApprovalState, format_unix_millis};
use crate::tools::config::ToolConfig;

/// Opens the questions of a service. The watchers of a run learn of its questions and of their ends.
///
/// # Errors
/// Returns an error if the run store cannot be read.
pub(super) async fn open_approvals(
    database: SqliteDatabase,
    run_store: RunStore,
) -> anyhow::Result<ApprovalStore> {
    // An approval of an earlier process lives no longer because the clock was set back meanwhile.
    let noted = run_store.noted_time().await.context("cannot read the run store")?;
    let owners = run_store.clone();
    let find_grant = move |run: String| -> RunOwnerFuture {
        let owners = owners.clone();
        Box::pin(async move { Some(owners.find_run(&run).await.ok()??.grant) })
    };
    let standing_watchers = run_store.clone();
    let store = ApprovalStore::new(database)
        .with_observer(move |row| publish_row(&run_store, row))
        .with_standing_observer(move |run, row| publish_standing(&standing_watchers, run, row))
        .with_owners(find_grant);
    store.resume_clock(noted).await.context("cannot read or write the approvals' time")
}

/// Publishes a step of a standing approval to the watchers of the run that was denied, or that uses it.
fn publish_standing(run_store: &RunStore, run: &str, row: &StandingApproval) {
    let data = json!({
        "id": row.id,
        "tool": row.tool,
        "rules": row.rules,
        "digest": row.digest,
        "state": row.state.as_str(),
        "scope": row.scope.as_str(),
        "expires_at": format_unix_millis(row.not_after_ms),
        "used": row.used,
        "max_uses": row.max_uses,
        "by": row.by,
    });
    run_store.publish_event(run, RunEventKind::StandingApproval, &data);
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
    if let Some(budget) = &row.budget {
        data["limit"] = json!(budget.limit);
    }
    let kind = if row.state == ApprovalState::Pending {
        RunEventKind::ApprovalRequested
    } else {
        data["by"] = json!(row.by);
        RunEventKind::ApprovalResolved
    };
    run_store.publish_event(&row.run, kind, &data);
}

/// The reason why an answer cannot raise a run's budget.
#[derive(Debug, thiserror::Error)]
pub enum BudgetRaiseError {
    #[error(transparent)]
    Limit(#[from] RaiseError),
    #[error(
        "the caps of the grant that has started the run leave ${left} for a higher `max_cost_usd`; raise it by less"
    )]
    Caps { left: Nanodollars },
    #[error("the grant that has started the run cannot be read: {0}")]
    Grant(#[from] GrantStoreError),
    #[error("the money of the grant cannot be reserved")]
    Store(#[from] DatabaseError),
}

impl RunService {
    /// Checks a raise against the grant that has started the run, and reserves the money for it. If the answer does not
    /// count in the end, the money stays reserved until the run's end.
    ///
    /// # Errors
    /// Returns the reason why the limits cannot be raised.
    pub async fn reserve_budget_raise(
        &self,
        run: &RunRow,
        raise: &SpendingLimits,
    ) -> Result<(), BudgetRaiseError> {
        let terms = self.0.grants.find_grant(&run.grant).await?.terms;
        raise.check_within(&terms.budget.spending_limits())?;
        let caps =
            SpendingCaps { total: terms.max_cost_usd_total, per_day: terms.max_cost_usd_per_day };
        if let Some(limit) = raise.max_cost_usd {
            let run = (&*run.id, &*run.grant);
            if let Some(left) = self.0.run_store.raise_reserved_money(run, caps, limit).await? {
                return Err(BudgetRaiseError::Caps { left });
            }
        }
        Ok(())
    }

    /// Returns the questions about tool calls; `None` if no person can answer in this service.
    pub fn approvals(&self) -> Option<ApprovalStore> {
        self.0.approvals.clone()
    }

    /// Sends messages about questions to the receiver of the configuration, and notes the time of standing approvals,
    /// until `stop`.
    pub(super) async fn maintain_approvals(&self, stop: &CancellationToken) {
        let Some(approvals) = &self.0.approvals else { return };
        let note_times = async {
            while stop.run_until_cancelled(sleep(NOTE_INTERVAL)).await.is_some() {
                if let Err(error) = approvals.note_time().await {
                    tracing::error!(%error, "the time of the standing approvals cannot be noted");
                }
            }
        };
        tokio::join!(approvals.deliver_messages(stop), note_times);
    }

    /// Withdraws the open questions of an earlier process. Their calls have ended with that process, so an answer that
    /// came before must not start anything now.
    pub(super) async fn withdraw_earlier_questions(&self) -> anyhow::Result<()> {
        if let Some(approvals) = &self.0.approvals {
            let withdrawn = approvals.withdraw_all(approvals.read_time()).await?;
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
            approvals.withdraw_run(run, approvals.read_time()).await?;
        }
        Ok(())
    }
}

/// Returns the receiver of messages about questions, as a configuration names it.
///
/// # Errors
/// Returns an error if the receiver cannot be used, or a key cannot be read.
pub fn open_webhook(config: &GatewayConfig) -> anyhow::Result<Option<Arc<Webhook>>> {
    let Some(table) = &config.tools.table else { return Ok(None) };
    let Some(webhook) = ToolConfig::from_table(table)?.approvals.webhook else { return Ok(None) };
    let webhook = Webhook::new(&webhook)?;
    webhook.check_keys()?;
    Ok(Some(Arc::new(webhook)))
}

/// Replaces the receiver of messages by that of a configuration that was read again.
pub(super) fn replace_webhook(config: &GatewayConfig, approvals: Option<&ApprovalStore>) {
    let Some(approvals) = approvals else { return };
    match open_webhook(config) {
        Ok(webhook) => approvals.set_webhook(webhook),
        // The reload has checked it before; a key has changed since.
        Err(error) => {
            tracing::error!("the approvals' webhook stays as it was: {error:#}");
        }
    }
}

/// Tells the questions which tools a configuration has, so that no call of another tool begins.
pub(super) fn replace_present_tools(
    (config, catalog): (&GatewayConfig, &AgentCatalog),
    approvals: Option<&ApprovalStore>,
) {
    let Some(approvals) = approvals else { return };
    // Several agents may share a name in the records, so each has its own list under its own name.
    let to_present = |tools: CompiledTools| {
        let agents = catalog.entries().map(|own| (own.name.clone(), tools.callable_tools(own)));
        tools.to_present_tools(agents.collect())
    };
    // The configuration was checked before. Without its tools, no call that waits may begin.
    let present = CompiledTools::from_settings(&config.tools)
        .inspect_err(|error| tracing::error!("the tools cannot be read: {error:#}"))
        .map_or_else(|_| PresentTools::default(), to_present);
    approvals.set_present_tools(present);
}

/// Puts the place where people answer into the configuration of runs.
pub(super) fn add_approvals(config: &mut GatewayConfig, approvals: Option<&ApprovalStore>) {
    let opener = RunToolOpener { approvals: approvals.cloned(), ..RunToolOpener::default() };
    config.tools.opener = Some(Arc::new(opener));
}

/// The interval between two notes of the time of standing approvals. Our choice: a clock that is set back after a crash
/// lengthens an approval by this time at most.
const NOTE_INTERVAL: Duration = Duration::from_secs(15);
