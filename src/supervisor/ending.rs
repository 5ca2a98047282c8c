//! How a run has ended: what is written down of it, with the last words to its watchers.

use serde_json::{Value, json};

use crate::delivery::Delivered;
use crate::journal::{Ended, Feed, Kind};
use crate::runner::{Envelope, RunResult};

/// A run that has no result.
pub(super) fn failed(code: &str, message: &str, feed: &Feed) -> Ended {
    let result = json!({"run_id": feed.run(), "ok": false, "error_code": code, "error": message});
    without_result(code, message, result)
}

/// A run whose process has ended before it. Its work may have come further.
pub(super) fn interrupted(relay: Option<&Delivered>, feed: &Feed) -> Ended {
    let message = "the service was ended while the run was under way";
    let mut result = json!({
        "run_id": feed.run(),
        "ok": false,
        "error_code": INTERRUPTED,
        "error": message,
    });
    if let Some(relay) = relay {
        result["relay"] = serde_json::to_value(relay).expect("a delivery has texts as keys");
    }
    without_result(INTERRUPTED, message, result)
}

/// What an agent has answered, as its watchers are told; none where it says nothing but that it cannot.
pub(super) fn answer(envelope: &Envelope) -> Option<Value> {
    let has_answered = !envelope.payloads.is_empty() || envelope.error().is_none();
    has_answered.then(|| json!({"text": envelope.text(), "payloads": envelope.payloads}))
}

fn without_result(code: &str, message: &str, result: Value) -> Ended {
    Ended {
        error_code: Some(code.to_owned()),
        result: Some(result.to_string()),
        words: vec![
            (Kind::Error, json!({"code": code, "message": message})),
            (Kind::Done, json!({})),
            (Kind::Final, result),
        ],
        ..Ended::default()
    }
}

pub(super) fn of_result(result: &mut RunResult, feed: &Feed) -> Ended {
    let (stdout, stderr) = (std::mem::take(&mut result.stdout), std::mem::take(&mut result.stderr));
    let mut words = vec![];
    if let Some(answer) = result.agent.as_ref().and_then(answer)
        && !feed.has_told(Kind::AssistantFinal)
    {
        words.push((Kind::AssistantFinal, answer));
    }
    if let Some(code) = result.error_code {
        let message = result.error.as_deref().unwrap_or(code.reason());
        words.push((Kind::Error, json!({"code": code, "message": message})));
    }
    words.push((Kind::Done, json!({"exit_code": result.exit_code})));
    let mut whole = serde_json::to_value(&*result).expect("a result has texts as keys");
    if let Value::Object(fields) = &mut whole {
        fields.remove("stdout");
        fields.remove("stderr");
    }
    if feed.dropped() > 0 {
        whole["events_dropped"] = feed.dropped().into();
    }
    let code = result.error_code.map(|code| code.to_string());
    let result = Some(whole.to_string());
    words.push((Kind::Final, whole));
    Ended { error_code: code, result, stdout, stderr, words, ..Ended::default() }
}

const INTERRUPTED: &str = "interrupted";
