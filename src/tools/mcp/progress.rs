//! The progress of a call that takes long: events that tell the client that its call is alive, and the response as the last
//! event.
//!
//! A client gives a silent call up after some time, and most clients set that time anew at each notification. So a client
//! that has asked for progress waits for a person as long as for a tool, and no `hold` ends its wait.
//!
//! 1. The call is accepted, and runs on in the future of its reply.
//! 2. A reply that comes at once is answered as a reply. No event was sent, and no timer has ended.
//! 3. A reply that takes longer is answered by events. The future of the reply goes on while the events are asked for.
//!
//! **Invariant:** an event is made when the connection has room for it, so events do not pile up. A client that leaves ends
//! its events, and not its call.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::stream;
use http::HeaderMap;
use http::header::ACCEPT;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::error::McpError;
use super::message::{McpMessage, is_id};
use super::reply::{call_reply, error_reply, refusal_reply};
use super::version::McpEra;
use crate::base::local_endpoint::{EndpointAnswer, LocalEvents, LocalReply};
use crate::tools::approval::format_unix_millis;
use crate::tools::call_table::ToolCall;
use crate::tools::definition::ToolProgramKind;
use crate::tools::exec_request::ToolExecRequest;
use crate::tools::refusal::ToolRefusal;
use crate::tools::run_tools::{RunTools, ToolRequestFacts};

/// The token by which a client knows the notifications about its call.
pub(super) struct ProgressToken(Box<RawValue>);

/// A call whose message was accepted.
pub(super) struct AcceptedCall {
    request: ToolExecRequest,
    facts: ToolRequestFacts,
    id: Box<RawValue>,
    era: McpEra,
    /// The call, once it has begun or waits for a person.
    started: Arc<OnceLock<Arc<ToolCall>>>,
}

/// A call whose client is told of its progress.
struct WatchedCall {
    reply: Pin<Box<dyn Future<Output = LocalReply> + Send>>,
    token: ProgressToken,
    started: Arc<OnceLock<Arc<ToolCall>>>,
    /// The text about a call that has not begun.
    unstarted: &'static str,
    notifications: u64,
}

/// A message about the progress of a call. The token is the client's own text.
#[derive(Serialize)]
struct ProgressNotification<'a> {
    jsonrpc: &'static str,
    method: &'static str,
    params: ProgressParams<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ProgressParams<'a> {
    progress_token: &'a RawValue,
    /// A number that grows from one notification to the next.
    progress: u64,
    message: String,
}

impl ProgressToken {
    /// Reads the token of a call; `None` if the client has no token, or takes no events.
    ///
    /// # Errors
    /// Returns an error if the token is neither a string nor a whole number, or is too long.
    pub(super) fn read(
        message: &McpMessage<'_>,
        headers: &HeaderMap,
    ) -> Result<Option<Self>, McpError> {
        let Some(token) = message.meta.raw("progressToken") else { return Ok(None) };
        if !is_id(token) || token.get().len() > MAX_TOKEN_BYTES {
            return Err(McpError::InvalidParams(format!(
                "`progressToken` must be a string or a whole number of at most {MAX_TOKEN_BYTES} bytes"
            )));
        }
        let takes_events = headers.get_all(ACCEPT).iter().any(|value| {
            value.to_str().is_ok_and(|types| types.to_ascii_lowercase().contains(EVENT_STREAM))
        });
        Ok(takes_events.then(|| Self(token.to_owned())))
    }
}

impl AcceptedCall {
    pub(super) fn new(
        request: ToolExecRequest,
        (id, era): (&RawValue, McpEra),
        facts: ToolRequestFacts,
    ) -> Self {
        Self { request, facts, id: id.to_owned(), era, started: Arc::default() }
    }

    /// Starts the call and waits for its end.
    pub(super) async fn run_to_reply(self, tools: RunTools) -> LocalReply {
        let Self { request, mut facts, id, era, started } = self;
        let (asked, wait, has_progress) = (Instant::now(), request.wait, request.has_progress);
        let call = match tools.start_call(request, &mut facts).await {
            Ok(call) => started.get_or_init(|| call),
            Err(refusal) => {
                tools.parts().record_refusal(&refusal, &facts);
                return match refusal {
                    ToolRefusal::NotGranted(_) => error_reply(Some(&id), &refusal.into()),
                    // The tool exists, and the model can act on the reason.
                    refusal => refusal_reply(&id, era, &refusal),
                };
            }
        };
        let end = if has_progress {
            let left = wait.saturating_sub(asked.elapsed());
            tools.wait_within(call, left, left).await
        } else {
            tools.wait_for_end(call, wait).await
        };
        let tool = tools.parts().policy.find_tool(&call.tool);
        let is_mcp =
            tool.is_ok_and(|tool| matches!(tool.definition.program, ToolProgramKind::Mcp(_)));
        call_reply((&id, era), call, end.as_deref(), is_mcp)
    }
}

/// Answers a call by a reply that comes at once, or by events.
pub(super) async fn answer_with_progress(
    tools: RunTools,
    accepted: AcceptedCall,
    token: ProgressToken,
) -> EndpointAnswer {
    let started = Arc::clone(&accepted.started);
    let unstarted = match tools.parts().budget_asker {
        Some(_) => "waiting: a person may raise the run's budget",
        None => "waiting for the call to begin",
    };
    let mut reply: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(accepted.run_to_reply(tools));
    if let Ok(reply) = timeout(FIRST_PROGRESS_DELAY, &mut reply).await {
        return EndpointAnswer::Reply(reply);
    }
    let watched = WatchedCall { reply, token, started, unstarted, notifications: 0 };
    EndpointAnswer::Events(watched.into_events())
}

impl WatchedCall {
    fn into_events(self) -> LocalEvents {
        Box::pin(stream::unfold(Some(self), |watched| async move {
            let mut watched = watched?;
            Some(match watched.wait_for_reply().await {
                Some(reply) => (format_event(&reply.body), None),
                None => (watched.next_notification(), Some(watched)),
            })
        }))
    }

    /// Waits for the reply until the next notification is due. The first one is due at once.
    async fn wait_for_reply(&mut self) -> Option<LocalReply> {
        let is_first = self.notifications == 0;
        let wait = if is_first { Duration::ZERO } else { PROGRESS_INTERVAL };
        timeout(wait, &mut self.reply).await.ok()
    }

    fn next_notification(&mut self) -> String {
        self.notifications += 1;
        let notification = ProgressNotification {
            jsonrpc: "2.0",
            method: "notifications/progress",
            params: ProgressParams {
                progress_token: &self.token.0,
                progress: self.notifications,
                message: self.describe_state(),
            },
        };
        // The token is JSON that has been parsed before.
        format_event(&serde_json::to_string(&notification).unwrap_or_default())
    }

    fn describe_state(&self) -> String {
        let Some(call) = self.started.get() else { return self.unstarted.to_owned() };
        match (call.open_question(), &call.question) {
            (Some(question), _) => {
                let until = format_unix_millis(question.not_after_ms);
                format!("waiting for a person to allow the call: {} until {until}", question.id)
            }
            (None, Some(_)) => "a person has answered".to_owned(),
            (None, None) => "the tool runs".to_owned(),
        }
    }
}

/// Returns JSON as an event. JSON has line breaks between its values only, where any space means the same.
fn format_event(json: &str) -> String {
    let mut event = String::with_capacity(json.len() + EVENT_BYTES);
    event.push_str("event: message\n");
    for line in json.split(['\n', '\r']) {
        event.push_str("data: ");
        event.push_str(line);
        event.push('\n');
    }
    event.push('\n');
    event
}

const EVENT_STREAM: &str = "text/event-stream";

/// The bytes of an event around its JSON, if the JSON has one line.
const EVENT_BYTES: usize = 32;

/// The time after which a call takes long. Our choice: most calls end earlier, and need no events.
const FIRST_PROGRESS_DELAY: Duration = Duration::from_secs(1);

/// The time between two notifications. Our choice: a twelfth of the shortest timeout that was measured.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The longest token, in bytes. Our choice: each notification repeats it, and clients use numbers or UUIDs.
const MAX_TOKEN_BYTES: usize = 256;
