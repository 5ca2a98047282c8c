//! Builds the end of a run for the run store, with the last events for its watchers.

use serde_json::{Value, json};

use crate::relay::delivery::DeliveryStatus;
use crate::runner::{AgentEnvelope, RunResult};
use crate::service::store::{EventFeed, RunEnd, RunEventKind};

/// Returns the end of a run that has no result.
pub(super) fn failed_end(code: &str, message: &str, feed: &EventFeed) -> RunEnd {
    let result = json!({"status": STATUS_INCOMPLETE, "run_id": feed.run_id(), "ok": false, "error_code": code, "error": message});
    end_without_result(code, message, result)
}

/// Returns the end of a run whose process ended first. `relay` is the state of the run's delivery.
pub(super) fn interrupted_end(relay: Option<&DeliveryStatus>, feed: &EventFeed) -> RunEnd {
    let message = "the service was ended while the run was under way";
    let mut result = json!({
        "status": STATUS_INCOMPLETE,
        "run_id": feed.run_id(),
        "ok": false,
        "error_code": CODE_INTERRUPTED,
        "error": message,
    });
    if let Some(relay) = relay {
        result["relay"] = serde_json::to_value(relay).expect("a delivery has texts as keys");
    }
    end_without_result(CODE_INTERRUPTED, message, result)
}

/// Returns the agent's answer as event data, or `None` if the envelope has only an error.
pub(super) fn answer_event(envelope: &AgentEnvelope) -> Option<Value> {
    let has_answered = !envelope.payloads.is_empty() || envelope.error_message().is_none();
    has_answered.then(|| json!({"text": envelope.text(), "payloads": envelope.payloads}))
}

fn end_without_result(code: &str, message: &str, result: Value) -> RunEnd {
    RunEnd {
        error_code: Some(code.to_owned()),
        result: Some(result.to_string()),
        last_events: vec![
            (RunEventKind::Error, json!({"code": code, "message": message})),
            (RunEventKind::Done, json!({})),
            (RunEventKind::Final, result),
        ],
        ..RunEnd::default()
    }
}

pub(super) fn from_run_result(result: &mut RunResult, feed: &EventFeed) -> RunEnd {
    // The output is stored in columns of its own, not in the result's JSON.
    let (stdout, stderr) = (std::mem::take(&mut result.stdout), std::mem::take(&mut result.stderr));
    let mut last_events = vec![];
    if let Some(answer) = result.agent.as_ref().and_then(answer_event)
        // The answer may be published already, while the delivery of the work went on.
        && !feed.has_published(RunEventKind::AssistantFinal)
    {
        last_events.push((RunEventKind::AssistantFinal, answer));
    }
    if let Some(code) = result.error_code {
        let message = result.error.as_deref().unwrap_or(code.default_message());
        last_events.push((RunEventKind::Error, json!({"code": code, "message": message})));
    }
    last_events.push((RunEventKind::Done, json!({"exit_code": result.exit_code})));
    let mut whole = serde_json::to_value(&*result).expect("a result has texts as keys");
    if let Value::Object(fields) = &mut whole {
        fields.remove("stdout");
        fields.remove("stderr");
        let status = if result.ok { "succeeded" } else { "failed" };
        fields.insert("status".to_owned(), status.into());
    }
    if feed.dropped_count() > 0 {
        whole["events_dropped"] = feed.dropped_count().into();
    }
    let code = result.error_code.map(|code| code.to_string());
    let result = Some(whole.to_string());
    last_events.push((RunEventKind::Final, whole));
    RunEnd { error_code: code, result, stdout, stderr, last_events, ..RunEnd::default() }
}

/// The `status` of a result that has no report of a sandbox. The other values are `succeeded` and `failed`; the API's
/// description has a schema for each.
const STATUS_INCOMPLETE: &str = "incomplete";

/// The error code of a run whose process ended first.
const CODE_INTERRUPTED: &str = "interrupted";
