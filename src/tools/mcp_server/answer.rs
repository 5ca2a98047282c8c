//! The answers of a server, whatever way they have come.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::McpServerError;
use crate::base::json::check_document;
use crate::tools::run_credentials::EchoGuard;

/// The answer to a request.
#[derive(Default)]
pub(super) struct McpAnswer {
    /// The id of the session, if the server has given one.
    pub(super) session: Option<String>,
    /// The number of the program that has answered; 0 for a server that is an address.
    pub(super) program: u64,
    pub(super) message: Option<AnswerMessage>,
    pub(super) guard: Option<EchoGuard>,
}

/// A message of the server. The answer has the id of the request.
#[derive(Deserialize)]
pub(super) struct AnswerMessage {
    id: Option<u64>,
    result: Option<Box<RawValue>>,
    pub(super) error: Option<AnswerError>,
}

/// The members that tell a request of the server, which may have any id.
#[derive(Deserialize)]
struct ServerMessage<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
pub(super) struct AnswerError {
    code: i64,
    #[serde(default)]
    message: String,
}

impl McpAnswer {
    /// Returns the result of the request.
    ///
    /// # Errors
    /// Returns an error if the server has refused the request, or has not answered it, or if the result contains the
    /// credential.
    pub(super) fn into_result(self) -> Result<Box<RawValue>, McpServerError> {
        let (result, guard) = self.split_result()?;
        check_text(guard.as_ref(), result.get())?;
        Ok(result)
    }

    /// Returns the result of a request whose result stays in this process, so it may contain anything.
    ///
    /// # Errors
    /// Returns an error if the server has refused the request, or has not answered it.
    pub(super) fn into_private_result(self) -> Result<Box<RawValue>, McpServerError> {
        self.split_result().map(|(result, _)| result)
    }

    fn split_result(self) -> Result<(Box<RawValue>, Option<EchoGuard>), McpServerError> {
        match self.message {
            Some(AnswerMessage { error: Some(AnswerError { code, message }), .. }) => {
                // The whole message is checked before it is cut: a cut may fall within the credential.
                check_text(self.guard.as_ref(), &message)?;
                Err(McpServerError::refused(code, &message))
            }
            Some(AnswerMessage { result: Some(result), .. }) => Ok((result, self.guard)),
            _ => Err(McpServerError::Malformed("it has no result")),
        }
    }
}

/// Checks that a text has none of the run's credentials, in any spelling that the guard knows.
fn check_text(guard: Option<&EchoGuard>, text: &str) -> Result<(), McpServerError> {
    if guard.is_some_and(|guard| guard.contains_secret(text.as_bytes())) {
        Err(McpServerError::RepeatsCredential)
    } else {
        Ok(())
    }
}

/// Parses the message that answers the request `id`. Messages of the server itself have a method and are not answers.
///
/// # Errors
/// Returns [`McpServerError::AsksForInput`] for a request of the server, such as `elicitation/create`.
pub(super) fn parse_message(text: &[u8], id: u64) -> Result<AnswerMessage, McpServerError> {
    let malformed = || McpServerError::Malformed("it is not acceptable JSON");
    check_document(text).map_err(|_| malformed())?;
    let own: ServerMessage<'_> = serde_json::from_slice(text).map_err(|_| malformed())?;
    // A server that asks whether this client is still there needs no answer to go on.
    if own.id.is_some() && own.method.is_some_and(|method| method != "ping") {
        return Err(McpServerError::AsksForInput);
    }
    let message: AnswerMessage = serde_json::from_slice(text).map_err(|_| malformed())?;
    // An error that came before the id was read has no id.
    let is_answer = message.id == Some(id) || (message.id.is_none() && message.error.is_some());
    let has_outcome = message.result.is_some() != message.error.is_some();
    if is_answer && has_outcome {
        Ok(message)
    } else {
        Err(McpServerError::Malformed("it does not answer the request"))
    }
}

/// Returns the answer to a line in which a server asks whether this client is still there; `None` for any other line.
pub(super) fn answer_ping(line: &[u8]) -> Option<String> {
    let message: ServerMessage<'_> = serde_json::from_slice(line).ok()?;
    let id = message.id.filter(|_| message.method.as_deref() == Some("ping"))?;
    Some(format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{}}}}\n"))
}

/// The bytes of an answer around its result.
pub(super) const MAX_ENVELOPE_BYTES: usize = 16 * 1024;
