//! One message of a client, read strictly.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::McpError;
use crate::base::json::{JsonError, check_small_document};
use crate::base::serde_words;
use crate::tools::exec_request::{MAX_EXEC_BODY_BYTES, MAX_REQUEST_VALUES};
use crate::tools::refusal::ToolRefusal;

/// A request, or a notification if it has no id. Values stay as the client wrote them until they are needed.
#[derive(Clone, Debug)]
pub(super) struct McpMessage<'a> {
    pub(super) id: Option<&'a RawValue>,
    pub(super) method: String,
    pub(super) params: McpMembers<'a>,
    /// The member `_meta` of the parameters.
    pub(super) meta: McpMembers<'a>,
}

/// The members of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct McpMembers<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> McpMessage<'a> {
    /// Parses the body of a request. Returns the id that the response to the body has, and the message.
    ///
    /// # Errors
    /// Returns an error if the body is not acceptable JSON, or is not one request or notification.
    pub(super) fn parse(body: &'a [u8]) -> (Option<&'a RawValue>, Result<Self, McpError>) {
        match McpMembers::parse_body(body) {
            Ok(members) => {
                let id = members.raw("id").filter(|id| is_id(id));
                (id, Self::from_members(&members))
            }
            Err(error) => (None, Err(error)),
        }
    }

    fn from_members(members: &McpMembers<'a>) -> Result<Self, McpError> {
        if let Some(name) = members.0.keys().find(|name| !MEMBERS.contains(&name.as_str())) {
            let name = name.escape_debug();
            return Err(invalid(format!("a request has no member `{name}`")));
        }
        if members.text("jsonrpc").map_err(invalid)?.as_deref() != Some("2.0") {
            return Err(invalid("`jsonrpc` must be \"2.0\""));
        }
        let id = members.raw("id");
        if id.is_some_and(|id| !is_id(id)) {
            return Err(invalid("`id` must be a string or a whole number"));
        }
        let method = members.text("method").map_err(invalid)?;
        let method = method.ok_or_else(|| invalid("`method` is missing; give it"))?;
        // Such a message would run, and its client would never learn that.
        if id.is_none() && !method.starts_with(NOTIFICATION_PREFIX) {
            return Err(invalid("`id` is missing, and the method is not a notification"));
        }
        let params = members.object("params").map_err(invalid)?;
        let meta = params.object("_meta").map_err(McpError::InvalidParams)?;
        Ok(Self { id, method, params, meta })
    }
}

impl<'a> McpMembers<'a> {
    fn parse_body(body: &'a [u8]) -> Result<Self, McpError> {
        if body.len() > MAX_EXEC_BODY_BYTES {
            return Err(ToolRefusal::TooLarge { limit: MAX_EXEC_BODY_BYTES }.into());
        }
        // The scanner finds what serde does not: a key that is there twice, at any depth, and text in two encodings.
        check_small_document(body, MAX_REQUEST_VALUES).map_err(refuse_json)?;
        Self::from_slice(body).map_err(invalid)
    }

    fn from_slice(object: &'a [u8]) -> Result<Self, String> {
        serde_json::from_slice(object)
            .map(Self)
            .map_err(|error| serde_words::in_words("", &error.to_string()))
    }

    /// Returns a member as the client wrote it.
    pub(super) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied()
    }

    /// Returns a member that is a string.
    ///
    /// # Errors
    /// Returns an error if the member is something else.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, String> {
        let text = self.raw(name).map(String::deserialize);
        text.transpose().map_err(|_| format!("`{name}` must be a string"))
    }

    /// Returns a member that is an object; without the member, an empty one.
    ///
    /// # Errors
    /// Returns an error if the member is something else.
    pub(super) fn object(&self, name: &str) -> Result<Self, String> {
        self.raw(name).map_or_else(
            || Ok(Self::default()),
            |raw| {
                Self::from_slice(raw.get().as_bytes())
                    .map_err(|_| format!("`{name}` must be an object"))
            },
        )
    }
}

/// Returns true for a string, and for a number without a fraction and an exponent.
pub(super) fn is_id(raw: &RawValue) -> bool {
    let text = raw.get();
    let digits = text.strip_prefix('-').unwrap_or(text);
    text.starts_with('"')
        || (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn refuse_json(error: JsonError) -> McpError {
    match error {
        // The revision 2025-03-26 had batches, which later ones have removed.
        JsonError::NotAnObject { .. } => invalid("send one message, which is an object"),
        error => ToolRefusal::Json(error).into(),
    }
}

fn invalid(problem: impl Into<String>) -> McpError {
    ToolRefusal::InvalidRequest(problem.into()).into()
}

/// The members of a request or notification.
const MEMBERS: [&str; 4] = ["jsonrpc", "id", "method", "params"];

/// The beginning of the methods that have no response.
const NOTIFICATION_PREFIX: &str = "notifications/";
