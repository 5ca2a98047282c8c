//! The responses to messages.

use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::error::McpError;
use super::version::McpEra;
use crate::base::local_endpoint::{LocalReply, RetryAdvice};
use crate::tools::approval::format_unix_millis;
use crate::tools::call_table::{ToolCall, ToolCallEnd};
use crate::tools::exec_request::MAX_WAIT;
use crate::tools::refusal::ToolRefusal;

/// A response of JSON-RPC. The id is the client's own text.
#[derive(Serialize)]
struct McpResponse<'a, R = Value> {
    jsonrpc: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<R>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
}

/// The result of a server's tool. Its parts stay as the server wrote them: parsed, they could take a hundred times the
/// memory.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServerToolResult<'a> {
    #[serde(borrow)]
    content: &'a RawValue,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    structured_content: Option<&'a RawValue>,
    #[serde(skip_deserializing)]
    is_error: bool,
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    result_type: Option<&'static str>,
    #[serde(skip_deserializing, rename = "_meta")]
    meta: Value,
}

/// Returns the response with an error. Without a readable id, the response has none.
pub(super) fn error_reply(id: Option<&RawValue>, error: &McpError) -> LocalReply {
    let body: McpResponse<'_> =
        McpResponse { jsonrpc: "2.0", id, result: None, error: Some(error.to_object()) };
    LocalReply { status: error.status(), code: Some(error.code()), ..reply(&body) }
}

/// Returns the response with a result, in the form of the era.
pub(super) fn result_reply(id: &RawValue, era: McpEra, mut result: Value) -> LocalReply {
    if era == McpEra::Modern {
        result["resultType"] = COMPLETE.into();
        result["_meta"][SERVER_INFO_KEY] = server_info();
    }
    reply(&McpResponse { jsonrpc: "2.0", id: Some(id), result: Some(result), error: None })
}

/// Returns the response about a call that was started: its end, or that it goes on.
/// The result of a tool of a server of MCP has the form of the protocol already.
pub(super) fn call_reply(
    (id, era): (&RawValue, McpEra),
    call: &ToolCall,
    end: Option<&ToolCallEnd>,
    is_mcp: bool,
) -> LocalReply {
    if let (None, Some(question)) = (end, call.open_question()) {
        let until = format_unix_millis(question.not_after_ms);
        let text = format!(
            "waiting for approval: a person must allow this call. Call again with the same arguments to wait for the answer; id {}, until {until}",
            question.id
        );
        let facts = json!({"id": call.id, "approval": {"id": question.id, "until": until}});
        return result_reply(id, era, tool_result(&text, true, &facts));
    }
    let Some(end) = end else {
        let waited = humantime::format_duration(MAX_WAIT);
        let text = format!(
            "the call goes on after {waited}; `GET /tool/exec/{}` on this socket returns its end",
            call.id
        );
        return result_reply(id, era, tool_result(&text, true, &json!({"id": call.id})));
    };
    let mut facts = json!({
        "id": call.id,
        "cost_usd": end.charged,
        "duration_ms": u64::try_from(end.duration.as_millis()).unwrap_or(u64::MAX),
    });
    let text = match &end.error {
        Some((code, message)) => {
            facts["code"] = (*code).into();
            format!("{code}: {message}")
        }
        // A result is JSON. A model reads a plain text better without its quotes.
        None if is_mcp => {
            return server_result_reply((id, era), &end.result, &facts);
        }
        None => serde_json::from_str(&end.result).unwrap_or_else(|_| end.result.clone()),
    };
    result_reply(id, era, tool_result(&text, end.error.is_some(), &facts))
}

/// Returns the response with the result of a server's tool.
fn server_result_reply((id, era): (&RawValue, McpEra), result: &str, facts: &Value) -> LocalReply {
    let mut meta = json!({CALL_KEY: facts});
    let Ok(mut result) = serde_json::from_str::<ServerToolResult<'_>>(result) else {
        return result_reply(id, era, json!({"content": [], "isError": false, "_meta": meta}));
    };
    if era == McpEra::Modern {
        result.result_type = Some(COMPLETE);
        meta[SERVER_INFO_KEY] = server_info();
    }
    result.meta = meta;
    reply(&McpResponse { jsonrpc: "2.0", id: Some(id), result: Some(result), error: None })
}

/// Returns the response about a call that was refused. It is a result, so that the model reads the reason.
pub(super) fn refusal_reply(id: &RawValue, era: McpEra, refusal: &ToolRefusal) -> LocalReply {
    let mut facts = json!({"code": refusal.code()});
    if let Some((layer, rule)) = refusal.public_decision() {
        facts["layer"] = layer.into();
        facts["rule"] = rule.into();
    }
    if let Some(proposal) = refusal.proposal() {
        facts["proposal"] = proposal.into();
    }
    let text = format!("{}: {refusal}", refusal.code());
    let reply = result_reply(id, era, tool_result(&text, true, &facts));
    LocalReply { code: Some(refusal.code()), ..reply }
}

/// Returns the response to a notification.
pub(super) fn accepted_reply() -> LocalReply {
    LocalReply { status: StatusCode::ACCEPTED, body: String::new(), ..reply(&Value::Null) }
}

/// Returns the response to a method of HTTP other than POST: there are no streams and no sessions.
pub(super) fn method_not_allowed_reply() -> LocalReply {
    let error = json!({
        "type": "tool_error",
        "code": "method_not_allowed",
        "message": "this path has only POST: there are no streams and no sessions",
    });
    LocalReply {
        status: StatusCode::METHOD_NOT_ALLOWED,
        allow: Some("POST"),
        code: Some("method_not_allowed"),
        ..reply(&json!({ "error": error }))
    }
}

/// Returns the name of this program, which clients show and do not rely on.
pub(super) fn server_info() -> Value {
    json!({"name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION")})
}

fn tool_result(text: &str, is_error: bool, facts: &Value) -> Value {
    json!({
        "content": [{"type": "text", "text": text}],
        "isError": is_error,
        "_meta": {CALL_KEY: facts},
    })
}

fn reply(body: &impl Serialize) -> LocalReply {
    // The values are strings, numbers and JSON that has been parsed before.
    let body = serde_json::to_string(body).unwrap_or_default();
    LocalReply { status: StatusCode::OK, body, allow: None, code: None, retry: RetryAdvice::None }
}

const COMPLETE: &str = "complete";
const SERVER_INFO_KEY: &str = "io.modelcontextprotocol/serverInfo";

/// The key of the facts about a call in the `_meta` of its result.
const CALL_KEY: &str = "cogni-gateway/call";
