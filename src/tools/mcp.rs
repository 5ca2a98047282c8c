//! The endpoint for clients of the Model Context Protocol (MCP): `/mcp` has every tool of the run, and `/mcp/SERVER` the
//! tools of one server, by their own names.
//!
//! Each POST request holds one message and is complete in itself. The endpoint has no sessions and keeps no state, so a
//! message says which era of the protocol it is written in:
//!
//! - The modern era (2026-07-28) gives its version in each message, and repeats parts of the message in headers.
//! - The legacy era (2025-11-25 and earlier) begins with `initialize`.
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
mod reply;
mod version;

use http::Method;

use self::envelope::check_envelope;
use self::error::McpError;
use self::message::McpMessage;
use self::reply::{accepted_reply, error_reply, method_not_allowed_reply};
use super::definition::is_tool_name;
use super::origin::is_origin_local;
use super::refusal::ToolRefusal;
use super::run_tools::{RunTools, ToolRequestFacts};
use crate::base::local_endpoint::{LocalReply, LocalRequest};

impl RunTools {
    /// Answers a request to `/mcp`, or to the path of one server below it.
    pub(super) async fn handle_mcp(
        &self,
        server: Option<&str>,
        request: LocalRequest<'_>,
    ) -> LocalReply {
        // A server without any granted tool answers like one that does not exist: its list is empty.
        if server.is_some_and(|server| !is_tool_name(server)) {
            return ToolRefusal::NotServed.to_reply();
        }
        if !is_origin_local(request.headers) {
            return error_reply(None, &McpError::ForeignOrigin);
        }
        if *request.method != Method::POST {
            return method_not_allowed_reply();
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
            error_reply(id, &error)
        })
    }

    async fn answer_message(
        &self,
        server: Option<&str>,
        message: &McpMessage<'_>,
        request: &LocalRequest<'_>,
        facts: &mut ToolRequestFacts,
    ) -> Result<LocalReply, McpError> {
        let era = check_envelope(message, request.headers)?;
        match message.id {
            Some(id) => self.run_method((server, era), (message, id), (facts, request.share)).await,
            // The endpoint keeps no state, so no notification changes anything.
            None => Ok(accepted_reply()),
        }
    }
}
