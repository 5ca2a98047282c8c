//! How a run has ended, in the last words to its watchers and in its row.

use serde_json::{Value, json};

use super::conduct::Failed;
use crate::journal::{Ended, Feed, Kind};
use crate::runner::RunResult;

/// Tells the watchers, and returns what is written down.
pub(super) fn of(done: Result<RunResult, Failed>, feed: &Feed) -> Ended {
    match done {
        Ok(result) => of_result(result, feed),
        Err(error) => failed(error.code(), &error.to_string(), feed),
    }
}

/// A run that has no result.
pub(super) fn failed(code: &str, message: &str, feed: &Feed) -> Ended {
    let result = json!({"run_id": feed.run(), "ok": false, "error_code": code, "error": message});
    feed.tell(Kind::Error, &json!({"code": code, "message": message}));
    feed.tell(Kind::Done, &json!({}));
    feed.tell(Kind::Final, &result);
    Ended {
        error_code: Some(code.to_owned()),
        result: Some(result.to_string()),
        ..Ended::default()
    }
}

fn of_result(mut result: RunResult, feed: &Feed) -> Ended {
    let (stdout, stderr) = (std::mem::take(&mut result.stdout), std::mem::take(&mut result.stderr));
    if let Some(envelope) = &result.agent {
        let text = json!({"text": envelope.text(), "payloads": envelope.payloads});
        feed.tell(Kind::AssistantFinal, &text);
    }
    let code = result.error_code.map(|code| code.to_string());
    if let Some(code) = &code {
        let message = result.error.as_deref().unwrap_or("the run was not ok");
        feed.tell(Kind::Error, &json!({"code": code, "message": message}));
    }
    feed.tell(Kind::Done, &json!({"exit_code": result.exit_code}));
    let mut whole = serde_json::to_value(&result).expect("a result has texts as keys");
    if let Value::Object(fields) = &mut whole {
        fields.remove("stdout");
        fields.remove("stderr");
    }
    if feed.dropped() > 0 {
        whole["events_dropped"] = feed.dropped().into();
    }
    feed.tell(Kind::Final, &whole);
    Ended { error_code: code, result: Some(whole.to_string()), stdout, stderr }
}
