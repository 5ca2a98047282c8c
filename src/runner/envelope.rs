//! What an agent of the catalog prints: its answer, and what it says about it.
//!
//! The envelope is the last thing on standard output. Before it there may be lines of others, such as the warnings of a
//! program that the agent is made with. Where it is not plain which one is the answer, there is none.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An agent's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentEnvelope {
    pub payloads: Vec<Value>,
    pub meta: Map<String, Value>,
}

/// Why there is no answer on an agent's standard output.
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
    #[error("the agent has printed {0} answers, and nobody can tell which one it means")]
    Several(usize),
    #[error(
        "the agent has printed more than {MAX_DOCUMENTS} JSON objects on standard output; an agent prints its answer there, and what it logs on standard error"
    )]
    TooMany,
}

impl AgentEnvelope {
    /// Reads all of an agent's standard output.
    ///
    /// # Errors
    /// It ends in something else, or in more than one answer.
    pub fn parse(stdout: &str) -> Result<Self, AgentEnvelopeError> {
        if stdout.trim().is_empty() {
            return Err(AgentEnvelopeError::Empty);
        }
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
                        return Err(AgentEnvelopeError::TooMany);
                    }
                    rest = &text[reader.byte_offset()..];
                    let read = Self::from_document(document);
                    answers += usize::from(read.is_ok());
                    last = Some((read, rest));
                }
                // What is no object is the noise of others, up to the line that says so.
                Some(Err(error)) => rest = text_from_line(text, error.line().max(2)),
                None => break,
            }
        }
        // Looked at once: behind each of many objects it would be the same blanks again.
        let last = last.filter(|(_, after)| after.trim_start().is_empty()).map(|(read, _)| read);
        match last {
            Some(Ok(_)) if answers > 1 => Err(AgentEnvelopeError::Several(answers)),
            Some(Ok(envelope)) => Ok(envelope),
            Some(Err(error)) => Err(AgentEnvelopeError::NotEnvelope(error.to_string())),
            None => Err(AgentEnvelopeError::NotJson(describe_last_line(stdout))),
        }
    }

    /// An answer, or what `OpenClaw` prints in place of one: `{"ok": false, "error": {"type": …, "message": …}}`.
    fn from_document(document: Value) -> Result<Self, serde_json::Error> {
        let error = &document["error"];
        if document["ok"] != false || error.is_null() {
            return serde_json::from_value(document);
        }
        let mut error = error.clone();
        if let Some(kind) = error.get("type").filter(|kind| kind.is_string()).cloned() {
            error["kind"] = kind;
        }
        Ok(Self { payloads: vec![], meta: Map::from_iter([("error".to_owned(), error)]) })
    }

    /// What was answered. Of an answer without a text it is told where it is.
    pub fn text(&self) -> String {
        let texts = self.payloads.iter().filter_map(|payload| {
            let text = payload["text"].as_str().filter(|text| !text.is_empty());
            text.or_else(|| payload["mediaUrl"].as_str())
        });
        texts.collect::<Vec<_>>().join("\n\n")
    }

    /// What went wrong, as the agent tells it.
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

    /// An agent may say in other words that it is not done: `OpenClaw` marks an answer that is only an error, and a run
    /// that it has broken off.
    fn incomplete_reason(&self) -> Option<String> {
        let is_error = |payload: &Value| payload["isError"] == true;
        if !self.payloads.is_empty() && self.payloads.iter().all(is_error) {
            return Some(self.text());
        }
        let is_aborted = self.meta.get("aborted") == Some(&Value::Bool(true));
        is_aborted.then(|| match self.text() {
            text if text.is_empty() => "the agent has broken off".to_owned(),
            text => format!("the agent has broken off: {text}"),
        })
    }
}

/// Where the next line begins that may be an object. No line's end is looked for before what begins the line is known: many
/// objects may stand on one.
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

/// From a line on; the first is 1.
fn text_from_line(text: &str, line: usize) -> &str {
    let mut ends = text.match_indices('\n').map(|(at, _)| at + 1);
    ends.nth(line - 2).map_or("", |at| &text[at..])
}

/// What is wrong with the last line, for whoever has made the agent.
fn describe_last_line(stdout: &str) -> String {
    let last = stdout.trim_end().lines().next_back().unwrap_or_default();
    match serde_json::from_str::<Value>(last) {
        Ok(_) => "its last line is another kind of JSON".to_owned(),
        Err(error) => {
            let shown: String =
                last.chars().filter(|c| !c.is_control()).take(MAX_EXCERPT_CHARS).collect();
            format!("{error} of its last line, `{shown}`")
        }
    }
}

/// JSON objects on one standard output. Each costs some memory and time, however short it is.
const MAX_DOCUMENTS: usize = 100_000;

/// Enough of a line to recognise it.
const MAX_EXCERPT_CHARS: usize = 80;
