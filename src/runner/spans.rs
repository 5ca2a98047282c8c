//! The spans and attributes that a run's trace receives about the agent, the sandbox and the delivery.

use std::time::SystemTime;

use crate::gateway::run::AgentRun;
use crate::runner::branch_delivery::DeliveryReport;
use crate::sandbox::{self, SandboxExit, StopReason};
use crate::telemetry::trace::{FinishedSpan, RunTrace};

/// Adds the agent's name to the run's trace.
pub(super) fn record_agent(run: &AgentRun, name: &str) {
    if let Some(trace) = &run.trace {
        trace.set_attribute("gen_ai.operation.name", "invoke_agent");
        trace.set_attribute("gen_ai.agent.name", name);
    }
}

/// Records the span of a sandbox that was requested at `start_time` and has ended, and the span of the sandbox's start.
pub(super) fn record_sandbox_span(
    trace: &RunTrace,
    driver: &'static str,
    start_time: SystemTime,
    ended: &Result<SandboxExit, sandbox::SandboxError>,
) {
    if let Some(start) = ended.as_ref().ok().and_then(|ended| ended.start) {
        let attributes = vec![("cogni.sandbox.driver", driver.into())];
        let span = trace.span_since("sandbox start", start_time);
        trace.record_span(FinishedSpan { ended: start_time + start, attributes, ..span });
    }
    // The second span covers the whole life of the sandbox, also of a sandbox that never started.
    let mut attributes = vec![("cogni.sandbox.driver", driver.into())];
    let exit_code = ended.as_ref().ok().and_then(|ended| ended.exit_code);
    attributes.extend(exit_code.map(|code| ("process.exit.code", code.unsigned_abs().into())));
    let error = error_code(ended);
    trace.record_span(FinishedSpan {
        attributes,
        error: error.map(Into::into),
        ..trace.span_since("sandbox", start_time)
    });
    if let Some(error) = error {
        trace.mark_failed(error);
    }
}

/// Records the span of a delivery that began at `start_time`.
pub(super) fn record_delivery_span(
    trace: &RunTrace,
    start_time: SystemTime,
    relayed: &DeliveryReport,
) {
    let mut attributes = vec![];
    let mut error = None;
    match relayed {
        DeliveryReport::Delivered(delivered) => {
            attributes.push(("cogni.relay.step", delivered.step.into()));
            attributes
                .extend(delivered.verdict.map(|verdict| ("cogni.relay.verdict", verdict.into())));
            attributes.push(("cogni.relay.is_pushed", delivered.is_pushed.into()));
        }
        DeliveryReport::Skipped { .. } | DeliveryReport::NotDelivered { is_well: true, .. } => (),
        DeliveryReport::NotDelivered { .. } => error = Some("not_delivered".into()),
    }
    trace.record_span(FinishedSpan { attributes, error, ..trace.span_since("relay", start_time) });
}

fn error_code(ended: &Result<SandboxExit, sandbox::SandboxError>) -> Option<&'static str> {
    match ended {
        Err(_) => Some("no_sandbox"),
        Ok(SandboxExit { cause: Some(StopReason::Deadline), .. }) => Some("timeout"),
        Ok(SandboxExit { cause: Some(StopReason::BudgetExhausted), .. }) => {
            Some("budget_exhausted")
        }
        Ok(SandboxExit { cause: Some(StopReason::Cancelled), .. }) => Some("cancelled"),
        Ok(SandboxExit { cause: Some(StopReason::WorkspaceFull), .. }) => Some("workspace_full"),
        Ok(SandboxExit { oom_killed: true, .. }) => Some("oom_killed"),
        Ok(SandboxExit { exit_code: Some(0), .. }) => None,
        Ok(_) => Some("container_failed"),
    }
}
