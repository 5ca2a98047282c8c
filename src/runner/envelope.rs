//! The envelope that an agent of the catalog prints: its answer, and metadata about the answer.
//!
//! The envelope is the last thing on standard output. Other lines may precede the envelope, such as the warnings of a
//! library that the agent uses. If several envelopes could be the answer, the output has no answer.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An agent's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentEnvelope {
    pub payloads: Vec<Value>,
    pub meta: Map<String, Value>,
}

/// An error of an agent whose standard output has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentEnvelopeError {
    #[error("the agent has printed nothing on standard output, where its answer should be")]
    Empty,
    #[error(
        "the agent's standard output ends in no JSON object: {0}; an agent prints its answer last, as `{{\"payloads\":[…],\"meta\":{{…}}}}`"
    )]
    NotJson(String),
    #[error(
        "the agent's standard output ends in JSON that is no answer: {0}; an agent prints `{{\"payloads\":[…],\"meta\":{{…}}}}`"
    )]
    NotEnvelope(String),
    #[error("the agent has printed {0} answers; an agent has to print a single answer")]
    MultipleAnswers(usize),
    #[error(
        "the agent has printed more than {MAX_DOCUMENTS} JSON objects on standard output; an agent prints its answer there, and what it logs on standard error"
    )]
    TooManyObjects,
}

impl AgentEnvelope {
    /// Reads the answer from the whole of an agent's standard output.
    ///
    /// # Errors
    /// Returns an error if the output does not end in an answer, or if the output holds several answers.
    pub fn parse(stdout: &str) -> Result<Self, AgentEnvelopeError> {
        if stdout.trim().is_empty() {
            return Err(AgentEnvelopeError::Empty);
        }
        // Every JSON object of the output is read, not only the last: a second answer further up makes the output
        // ambiguous. `last` holds the last object and the text behind it.
        let (mut answers, mut documents) = (0, 0);
        let mut last = None;
        let mut rest = stdout;
        while let Some(at) = find_next_object(rest) {
            let text = &rest[at..];
            let mut reader = serde_json::Deserializer::from_str(text).into_iter::<Value>();
            match reader.next() {
                Some(Ok(document)) => {
                    documents += 1;
                    if documents > MAX_DOCUMENTS {
                        return Err(AgentEnvelopeError::TooManyObjects);
                    }
                    rest = &text[reader.byte_offset()..];
                    let read = Self::from_document(document);
                    answers += usize::from(read.is_ok());
                    last = Some((read, rest));
                }
                // The text is no JSON, so it is another program's output. The scan goes on at the line with the syntax
                // error, or at the next line if that is the first line, so every step moves forward.
                Some(Err(error)) => rest = text_from_line(text, error.line().max(2)),
                None => break,
            }
        }
        // Only the last object's rest is trimmed. Trimming behind every object could scan the same blanks many times.
        let last = last.filter(|(_, after)| after.trim_start().is_empty()).map(|(read, _)| read);
        // The last object has to be the answer. An answer followed by another object, or by text, is an error.
        match last {
            Some(Ok(_)) if answers > 1 => Err(AgentEnvelopeError::MultipleAnswers(answers)),
            Some(Ok(envelope)) => Ok(envelope),
            Some(Err(error)) => Err(AgentEnvelopeError::NotEnvelope(error.to_string())),
            None => Err(AgentEnvelopeError::NotJson(describe_last_line(stdout))),
        }
    }

    /// Returns the answer in a JSON object. Converts the error object that `OpenClaw` prints in place of an answer:
    /// `{"ok": false, "error": {"type": …, "message": …}}`.
    fn from_document(document: Value) -> Result<Self, serde_json::Error> {
        let error = &document["error"];
        if document["ok"] != false || error.is_null() {
            return serde_json::from_value(document);
        }
        // `error_message` reads the field `kind`.
        let mut error = error.clone();
        if let Some(kind) = error.get("type").filter(|kind| kind.is_string()).cloned() {
            error["kind"] = kind;
        }
        Ok(Self { payloads: vec![], meta: Map::from_iter([("error".to_owned(), error)]) })
    }

    /// Returns the texts of the answer. A payload without a text contributes its media URL.
    pub fn text(&self) -> String {
        let texts = self.payloads.iter().filter_map(|payload| {
            let text = payload["text"].as_str().filter(|text| !text.is_empty());
            text.or_else(|| payload["mediaUrl"].as_str())
        });
        texts.collect::<Vec<_>>().join("\n\n")
    }

    /// Returns the agent's error message, if the agent reports an error.
    pub fn error_message(&self) -> Option<String> {
        match self.meta.get("error") {
            None | Some(Value::Null) => self.incomplete_reason(),
            Some(Value::String(message)) => Some(message.clone()),
            Some(error) => {
                let text = |key: &str| error[key].as_str();
                let message = text("message").map_or_else(|| error.to_string(), str::to_owned);
                Some(match text("kind") {
                    Some(kind) => format!("{kind}: {message}"),
                    None => message,
                })
            }
        }
    }

    /// Returns the reason of an answer that has no error but is incomplete. `OpenClaw` marks an answer that consists
    /// of errors only, and a run that `OpenClaw` has aborted.
    fn incomplete_reason(&self) -> Option<String> {
        let is_error = |payload: &Value| payload["isError"] == true;
        if !self.payloads.is_empty() && self.payloads.iter().all(is_error) {
            return Some(self.text());
        }
        let is_aborted = self.meta.get("aborted") == Some(&Value::Bool(true));
        is_aborted.then(|| match self.text() {
            text if text.is_empty() => "the agent has aborted".to_owned(),
            text => format!("the agent has aborted: {text}"),
        })
    }
}

/// Returns the position of the next `{` that begins a line, or that begins the text. The function searches for a line's
/// end only if the line begins with another character, because one long line may hold many objects.
fn find_next_object(text: &str) -> Option<usize> {
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        if rest.starts_with('{') {
            return Some(text.len() - rest.len());
        }
        rest = &rest[rest.find('\n')?..];
    }
}

/// Returns the text from a line on. The first line has the number 1; `line` is at least 2.
fn text_from_line(text: &str, line: usize) -> &str {
    let mut ends = text.match_indices('\n').map(|(at, _)| at + 1);
    ends.nth(line - 2).map_or("", |at| &text[at..])
}

/// Describes the error in the last line, for the agent's developer.
fn describe_last_line(stdout: &str) -> String {
    let last = stdout.trim_end().lines().next_back().unwrap_or_default();
    match serde_json::from_str::<Value>(last) {
        Ok(_) => "its last line is another kind of JSON".to_owned(),
        Err(error) => {
            // The agent chose the bytes, so control characters must not reach a terminal.
            let shown: String =
                last.chars().filter(|c| !c.is_control()).take(MAX_EXCERPT_CHARS).collect();
            format!("{error} of its last line, `{shown}`")
        }
    }
}

/// The maximum number of JSON objects on one standard output (our choice). Every object costs some memory and time,
/// however short the object is.
const MAX_DOCUMENTS: usize = 100_000;

/// The maximum number of characters of a line in an error message (our choice). 80 characters identify a line.
const MAX_EXCERPT_CHARS: usize = 80;
