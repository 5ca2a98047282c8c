//! The endpoint for clients of the Model Context Protocol (MCP): `/mcp` has every tool of the run, and `/mcp/SERVER` the
//! tools of one server, by their own names.
//!
//! Each POST request holds one message and is complete in itself. The endpoint has no sessions and keeps no state, so a
//! message says which era of the protocol it is written in:
//!
//! - The modern era (2026-07-28) gives its version in each message, and repeats parts of the message in headers.
//! - The legacy era (2025-11-25 and earlier) begins with `initialize`.
//!
//! A call that takes long is answered by events if its client has asked for its [`progress`].
//!
//! A message takes this way: origin → [`message`] → [`envelope`] (version, headers) → [`method`]. A call then takes the
//! way of every tool call. The endpoint deviates from the protocol in two places: it refuses batches, and a client that
//! closes its connection does not stop its call.
//!
//! **Invariant:** a message that can be read in two ways is refused. Only a message with an id starts a call.

mod envelope;
mod error;
mod message;
mod method;
mod progress;
mod reply;
mod version;

use http::{HeaderMap, Method};
use serde_json::value::RawValue;

use self::envelope::check_envelope;
use self::error::McpError;
use self::message::McpMessage;
use self::method::McpMethod;
use self::reply::{accepted_reply, error_reply, method_not_allowed_reply};
use self::version::McpEra;
use super::definition::is_tool_name;
use super::exec_request::ToolExecRequest;
use super::origin::is_origin_local;
use super::refusal::ToolRefusal;
use super::run_tools::{RunTools, ToolRequestFacts};
use crate::base::local_endpoint::{EndpointAnswer, LocalReply, LocalRequest};

impl RunTools {
    /// Answers a request to `/mcp`, or to the path of one server below it.
    pub(super) async fn handle_mcp(
        &self,
        server: Option<&str>,
        request: LocalRequest<'_>,
    ) -> EndpointAnswer {
        if let Err(reply) = check_head(server, request.method, request.headers) {
            return reply.into();
        }
        let mut facts = ToolRequestFacts::new(request.pid);
        let (id, message) = McpMessage::parse(request.body);
        let answered = match message {
            Ok(message) => self.answer_message(server, &message, &request, &mut facts).await,
            Err(error) => Err(error),
        };
        answered.unwrap_or_else(|error| {
            if let McpError::Refused(refusal) = &error {
                self.parts().record_refusal(refusal, &facts);
            }
            error_reply(id, &error).into()
        })
    }

    async fn answer_message(
        &self,
        server: Option<&str>,
        message: &McpMessage<'_>,
        request: &LocalRequest<'_>,
        facts: &mut ToolRequestFacts,
    ) -> Result<EndpointAnswer, McpError> {
        match read_method(server, message, request.headers)? {
            Some((id, era, method)) => {
                Ok(self.run_method((server, era), (method, id), (facts, request.share)).await)
            }
            // The endpoint keeps no state, so no notification changes anything.
            None => Ok(accepted_reply().into()),
        }
    }
}

/// Reads the call that a request asks for; `None` for a request that is answered without a call. The function has no
/// side effect, so `explain` gives the result of a real request.
///
/// # Errors
/// Returns the reply to a request that is not served or not valid.
pub fn read_call(
    server: Option<&str>,
    (method, headers): (&Method, &HeaderMap),
    body: &[u8],
) -> Result<Option<ToolExecRequest>, LocalReply> {
    check_head(server, method, headers)?;
    let (id, message) = McpMessage::parse(body);
    let read = message.and_then(|message| {
        Ok(match read_method(server, &message, headers)? {
            Some((.., McpMethod::Call(call, _))) => Some(call),
            _ => None,
        })
    });
    read.map_err(|error| error_reply(id, &error))
}

fn check_head(
    server: Option<&str>,
    method: &Method,
    headers: &HeaderMap,
) -> Result<(), LocalReply> {
    // A server without any granted tool answers like one that does not exist: its list is empty.
    if server.is_some_and(|server| !is_tool_name(server)) {
        return Err(ToolRefusal::NotServed.to_reply());
    }
    if !is_origin_local(headers) {
        return Err(error_reply(None, &McpError::ForeignOrigin));
    }
    if *method != Method::POST {
        return Err(method_not_allowed_reply());
    }
    Ok(())
}

/// Reads the id, the era and the method of a message; `None` for a notification.
fn read_method<'a>(
    server: Option<&str>,
    message: &McpMessage<'a>,
    headers: &HeaderMap,
) -> Result<Option<(&'a RawValue, McpEra, McpMethod)>, McpError> {
    let era = check_envelope(message, headers)?;
    let Some(id) = message.id else { return Ok(None) };
    Ok(Some((id, era, McpMethod::from_message(server, era, message, headers)?)))
}
