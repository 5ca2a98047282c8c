//! The start and the end of a run's audit log.

use anyhow::Context;

use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::policy::GatewayPolicy;
use crate::gateway::run::AgentRun;
use crate::telemetry::audit::records::RunStartedRecord;
use crate::telemetry::audit::{self, RecoveredRun};
use crate::telemetry::trace::RunTrace;

/// Opens the audit log of a run, and continues the log of an earlier process if there is one.
pub(super) fn open_audit_log(
    config: &GatewayConfig,
    policy: &GatewayPolicy,
    trace: Option<&RunTrace>,
) -> anyhow::Result<(audit::AuditLog, RecoveredRun)> {
    let started = RunStartedRecord {
        run: config.identity.run.clone(),
        attempt: config.identity.attempt.clone(),
        account: config.identity.account.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy: config.digest(),
        prices: policy.prices.digest().to_owned(),
        trace: trace.map(|trace| trace.trace_id().to_string()),
        upstream: config.upstream.kind.name(),
    };
    // Opening a log also recovers it: a torn end is cut, and calls that were open are settled.
    let (log, recovered) = audit::AuditLog::open_log(&config.audit, &started)?;
    if recovered.resumed {
        tracing::info!(run = started.run, spent = ?recovered.spent, crashed = recovered.crashed, torn_bytes = recovered.torn_bytes, "resumed the audit log");
    }
    Ok((log, recovered))
}

/// Writes the end of a run to its audit log.
pub(super) fn finish_run(run: &AgentRun) -> anyhow::Result<()> {
    let name = &run.identity.run;
    run.finish_run().with_context(|| format!("the audit log of run `{name}` could not be closed"))
}
