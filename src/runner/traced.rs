//! What a run's trace is told of its sandbox and of what became of its work.

use std::time::SystemTime;

use crate::observe::trace::{Span, Trace};
use crate::run::Run;
use crate::runner::delivery::Relayed;
use crate::sandbox::{self, Cause, Ended};

/// Says which agent the run is of.
pub(super) fn agent(run: &Run, name: &str) {
    if let Some(trace) = &run.trace {
        trace.note("gen_ai.operation.name", "invoke_agent");
        trace.note("gen_ai.agent.name", name);
    }
}

/// Tells of a sandbox that was asked for at `asked` and is gone, and of how long it took to start.
pub(super) fn sandbox(
    trace: &Trace,
    driver: &'static str,
    asked: SystemTime,
    ended: &Result<Ended, sandbox::Error>,
) {
    if let Some(start) = ended.as_ref().ok().and_then(|ended| ended.start) {
        let attributes = vec![("cogni.sandbox.driver", driver.into())];
        let begun = trace.begun("sandbox start", asked);
        trace.tell(Span { ended: asked + start, attributes, ..begun });
    }
    let mut attributes = vec![("cogni.sandbox.driver", driver.into())];
    let exit_code = ended.as_ref().ok().and_then(|ended| ended.exit_code);
    attributes.extend(exit_code.map(|code| ("process.exit.code", code.unsigned_abs().into())));
    let error = error_of(ended);
    trace.tell(Span { attributes, error: error.map(Into::into), ..trace.begun("sandbox", asked) });
    if let Some(error) = error {
        trace.fail(error);
    }
}

/// Tells of a delivery that began at `begun`.
pub(super) fn relay(trace: &Trace, begun: SystemTime, relayed: &Relayed) {
    let mut attributes = vec![];
    let mut error = None;
    match relayed {
        Relayed::Delivered(delivered) => {
            attributes.push(("cogni.relay.step", delivered.step.into()));
            attributes
                .extend(delivered.verdict.map(|verdict| ("cogni.relay.verdict", verdict.into())));
            attributes.push(("cogni.relay.is_pushed", delivered.is_pushed.into()));
        }
        Relayed::Skipped { .. } | Relayed::Not { is_well: true, .. } => (),
        Relayed::Not { .. } => error = Some("not_delivered".into()),
    }
    trace.tell(Span { attributes, error, ..trace.begun("relay", begun) });
}

fn error_of(ended: &Result<Ended, sandbox::Error>) -> Option<&'static str> {
    match ended {
        Err(_) => Some("no_sandbox"),
        Ok(Ended { cause: Some(Cause::Deadline), .. }) => Some("timeout"),
        Ok(Ended { cause: Some(Cause::Budget), .. }) => Some("budget_exhausted"),
        Ok(Ended { cause: Some(Cause::Cancelled), .. }) => Some("cancelled"),
        Ok(Ended { cause: Some(Cause::Workspace), .. }) => Some("workspace_full"),
        Ok(Ended { oom_killed: true, .. }) => Some("oom_killed"),
        Ok(Ended { exit_code: Some(0), .. }) => None,
        Ok(_) => Some("container_failed"),
    }
}
