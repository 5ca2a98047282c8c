//! The requests under `/tool/`: the list of tools, a call, and the end of an earlier call.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method, StatusCode};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::approval::{ApprovalMode, format_unix_millis};
use super::call_table::{ToolCall, ToolCallEnd};
use super::exec_request::{ToolExecRequest, parse_wait};
use super::origin::is_origin_local;
use super::refusal::ToolRefusal;
use super::run_tools::{RunTools, ToolRequestFacts, applied_rules};
use crate::base::local_endpoint::{LocalReply, LocalRequest, RetryAdvice};

/// Checks that a request comes from no page of another machine.
///
/// # Errors
/// Returns [`ToolRefusal::ForeignOrigin`].
pub fn check_origin(headers: &HeaderMap) -> Result<(), ToolRefusal> {
    if is_origin_local(headers) { Ok(()) } else { Err(ToolRefusal::ForeignOrigin) }
}

/// The thing that a request under `/tool/` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecRoute<'a> {
    List,
    Call,
    /// The result of the call with this id, and the longest time to wait for it.
    Result(&'a str, Duration),
}

impl<'a> ExecRoute<'a> {
    /// Reads the method and the target of a request under `/tool/`. The function has no side effect, so `explain` gives
    /// the result of a real request.
    ///
    /// # Errors
    /// Returns [`ToolRefusal::NotServed`], or [`ToolRefusal::InvalidRequest`] if the query is not valid.
    pub fn match_request(
        method: &Method,
        path: &'a str,
        query: Option<&str>,
    ) -> Result<Self, ToolRefusal> {
        match (method, path) {
            (&Method::GET, LIST_PATH) => return Ok(Self::List),
            (&Method::POST, EXEC_PATH) => return Ok(Self::Call),
            (&Method::GET, _) => {}
            _ => return Err(ToolRefusal::NotServed),
        }
        let id = path.strip_prefix(RESULT_PREFIX).ok_or(ToolRefusal::NotServed)?;
        let wait = match query.map(|query| query.split_once('=')) {
            None => Duration::ZERO,
            Some(Some(("wait", wait))) => parse_wait(Some(wait))?,
            Some(_) => {
                let problem = "the query has only `wait`, as in `?wait=30s`";
                return Err(ToolRefusal::InvalidRequest(problem.to_owned()));
            }
        };
        Ok(Self::Result(id, wait))
    }
}

impl RunTools {
    /// Answers a request under `/tool/`.
    pub(super) async fn handle_exec(&self, request: LocalRequest<'_>) -> LocalReply {
        if let Err(refusal) = check_origin(request.headers) {
            return refusal.to_reply();
        }
        match ExecRoute::match_request(request.method, request.path, request.query) {
            Ok(ExecRoute::List) => self.list_tools().await,
            Ok(ExecRoute::Call) => {
                let mut facts = ToolRequestFacts::new(request.pid);
                let reply = self.execute_call(&request, &mut facts).await;
                reply.unwrap_or_else(|refusal| {
                    self.parts().record_refusal(&refusal, &facts);
                    refusal.to_reply()
                })
            }
            Ok(ExecRoute::Result(id, wait)) => {
                let reply = self.await_result(id, wait).await;
                reply.unwrap_or_else(|refusal| refusal.to_reply())
            }
            Err(refusal) => refusal.to_reply(),
        }
    }

    async fn execute_call(
        &self,
        request: &LocalRequest<'_>,
        facts: &mut ToolRequestFacts,
    ) -> Result<LocalReply, ToolRefusal> {
        let share = request.share;
        let request = ToolExecRequest::parse_body(request.body, &self.parts().run.id)?;
        let request = ToolExecRequest { arguments: request.arguments.with_share(share), ..request };
        let wait = request.wait;
        let call = self.start_call(request, facts).await?;
        Ok(call_reply(&call, self.wait_for_end(&call, wait).await))
    }

    async fn await_result(&self, id: &str, wait: Duration) -> Result<LocalReply, ToolRefusal> {
        let call = self.find_call(id).ok_or(ToolRefusal::UnknownCall)?;
        // A client that asks for a result has said how long it waits, also for a person.
        Ok(call_reply(&call, self.wait_within(&call, wait, wait).await))
    }

    async fn list_tools(&self) -> LocalReply {
        let spent = self.parts().ledger.tool_spending();
        let offered = self.parts().offered_tools().await.into_iter();
        let tools: Vec<_> = offered
            .map(|(tool, is_asking)| {
                let name = &tool.definition.name;
                let spent = spent.get(name).copied().unwrap_or_default();
                let left = json!({
                    "calls": tool.limits.calls.map(|limit| limit.saturating_sub(spent.calls)),
                    "cost_usd":
                        tool.limits.cost_usd.map(|limit| limit.saturating_sub(spent.cost)),
                });
                let mut listed = json!({
                    "name": name,
                    "description": tool.definition.description,
                    "parameters": tool.definition.parameters_json(),
                    "rules": applied_rules(tool),
                    "price_usd": tool.price,
                    "limits": tool.limits,
                    "left": left,
                });
                if is_asking {
                    listed["approve"] = json!(ApprovalMode::Ask);
                }
                listed
            })
            .collect();
        success(StatusCode::OK, &json!({ "tools": tools }))
    }
}

/// Returns the response about a call: its end, or that it is still open.
fn call_reply(call: &ToolCall, end: Option<Arc<ToolCallEnd>>) -> LocalReply {
    end.map_or_else(|| pending_reply(call), |end| end_reply(call, &end))
}

/// Returns the response about a call that is open: it runs, or it waits for a person.
fn pending_reply(call: &ToolCall) -> LocalReply {
    let mut answer = json!({"id": call.id, "tool": call.tool, "status": "pending"});
    if let Some(question) = call.open_question() {
        let until = format_unix_millis(question.not_after_ms);
        answer["approval"] = json!({"id": question.id, "until": until});
    }
    success(StatusCode::ACCEPTED, &answer)
}

fn end_reply(call: &ToolCall, end: &ToolCallEnd) -> LocalReply {
    let mut answer = json!({
        "id": call.id,
        "tool": call.tool,
        "status": if end.error.is_none() { "completed" } else { "failed" },
        "cost_usd": end.charged,
        "duration_ms": u64::try_from(end.duration.as_millis()).unwrap_or(u64::MAX),
    });
    if let Some((code, message)) = &end.error {
        answer["error"] = json!({"type": "tool_error", "code": code, "message": message});
    }
    let mut reply = success(StatusCode::OK, &answer);
    // The result is JSON already, and may be large: it is spliced in as it is.
    if let Ok(result) = serde_json::from_str::<&RawValue>(&end.result) {
        reply.body.truncate(reply.body.len() - 1);
        reply.body.push_str(",\"result\":");
        reply.body.push_str(result.get());
        reply.body.push('}');
    }
    reply
}

fn success(status: StatusCode, answer: &Value) -> LocalReply {
    LocalReply {
        status,
        body: answer.to_string(),
        allow: None,
        code: None,
        retry: RetryAdvice::None,
    }
}

/// The path of the list of tools.
pub const LIST_PATH: &str = "/tool/list";

/// The path of a new call.
pub const EXEC_PATH: &str = "/tool/exec";

/// The path of a call's result, without the call's id.
const RESULT_PREFIX: &str = "/tool/exec/";
