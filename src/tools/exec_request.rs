//! The request of a tool call, read strictly.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::argument_schema::ArgumentError;
use super::definition::is_tool_name;
use super::refusal::ToolRefusal;
use crate::base::json::check_small_document;
use crate::base::local_endpoint::BodyShare;
use crate::base::serde_words::{self, JsonInputError};

/// A valid request of a tool call. Nothing is known yet about the tool.
#[derive(Clone, Debug)]
pub struct ToolExecRequest {
    pub tool: String,
    pub arguments: ToolArguments,
    /// The longest time for which the response may wait for the result.
    pub wait: Duration,
    /// True if the client is told of the progress, so that it waits for a person as long as for the result.
    pub has_progress: bool,
    pub idempotency_key: Option<String>,
}

/// The arguments of a call. A tool outside of this process receives the client's own text, byte for byte.
///
/// Parsed arguments take up to a hundred times the memory of their text, and a call may wait for a person. So only the
/// text is kept, and is parsed anew for each use.
#[derive(Clone, Debug)]
pub struct ToolArguments {
    text: Arc<str>,
    /// The share of the request's body that the text was counted in.
    #[expect(dead_code, reason = "the share is given back when its last clone is dropped")]
    share: Option<BodyShare>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolExecBody {
    tool: String,
    arguments: Option<Box<RawValue>>,
    wait: Option<String>,
    idempotency_key: Option<String>,
    #[serde(alias = "runId")]
    run_id: Option<String>,
}

impl ToolExecRequest {
    /// Parses a request of the run `run`.
    ///
    /// # Errors
    /// Returns an error if the body is not acceptable JSON, has an unknown field, or names another run.
    pub fn parse_body(body: &[u8], run: &str) -> Result<Self, ToolRefusal> {
        if body.len() > MAX_EXEC_BODY_BYTES {
            return Err(ToolRefusal::TooLarge { limit: MAX_EXEC_BODY_BYTES });
        }
        // The scanner finds what serde does not: a key that is there twice, at any depth, and text in two encodings.
        check_small_document(body, MAX_REQUEST_VALUES).map_err(ToolRefusal::Json)?;
        let body: ToolExecBody = serde_words::from_slice(body).map_err(|error| match error {
            JsonInputError::Syntax(problem) | JsonInputError::Data(problem) => {
                ToolRefusal::InvalidRequest(problem)
            }
        })?;
        // The socket decides which run calls. A request that names another run is a mistake or an attack.
        if body.run_id.is_some_and(|named| named != run) {
            return Err(ToolRefusal::OtherRun);
        }
        let arguments = ToolArguments::parse(body.arguments.as_deref())
            .map_err(|error| ToolRefusal::InvalidRequest(error.to_string()))?;
        let call = Self::new_call(body.tool, arguments)?;
        let key = body.idempotency_key;
        if key.as_ref().is_some_and(|key| !(1..=MAX_KEY_BYTES).contains(&key.len())) {
            return Err(ToolRefusal::InvalidRequest(format!(
                "`idempotency_key` must have 1 to {MAX_KEY_BYTES} bytes"
            )));
        }
        let wait = parse_wait(body.wait.as_deref())?;
        Ok(Self { wait, idempotency_key: key, ..call })
    }

    /// Creates the request of a call without a key, whose response waits as long as a response may.
    ///
    /// # Errors
    /// Returns an error if `tool` does not have the form of a tool's name.
    pub fn new_call(tool: String, arguments: ToolArguments) -> Result<Self, ToolRefusal> {
        if !is_tool_name(&tool) {
            return Err(ToolRefusal::InvalidToolName);
        }
        Ok(Self { tool, arguments, wait: MAX_WAIT, has_progress: false, idempotency_key: None })
    }
}

impl ToolArguments {
    /// Parses the arguments of a document that [`check_small_document`] has accepted. Without arguments, the object is empty.
    ///
    /// # Errors
    /// Returns an error if the arguments are not an object, or a number is too large.
    pub fn parse(raw: Option<&RawValue>) -> Result<Self, ArgumentError> {
        let text = raw.map_or("{}", RawValue::get);
        let parsed: Result<Map<String, Value>, _> = serde_words::from_slice(text.as_bytes());
        parsed.map_err(|error| ArgumentError {
            path: "arguments".to_owned(),
            problem: format!("cannot be read: {error}"),
        })?;
        Ok(Self { text: text.into(), share: None })
    }

    /// Keeps the share of the body for as long as the text.
    #[must_use]
    pub fn with_share(self, share: &BodyShare) -> Self {
        Self { share: Some(Arc::clone(share)), ..self }
    }

    /// Parses the members of the object. A caller drops them before it waits.
    pub fn members(&self) -> Map<String, Value> {
        serde_json::from_str(&self.text).expect("the same text was parsed as an object before")
    }

    /// Returns the object as the client wrote it.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Parses the time for which a client is ready to wait.
///
/// # Errors
/// Returns an error if the text is not a duration, or is longer than [`MAX_WAIT`].
pub fn parse_wait(wait: Option<&str>) -> Result<Duration, ToolRefusal> {
    let Some(wait) = wait else { return Ok(DEFAULT_WAIT) };
    let parsed = humantime::parse_duration(wait).ok().filter(|wait| *wait <= MAX_WAIT);
    parsed.ok_or_else(|| {
        let most = humantime::format_duration(MAX_WAIT);
        ToolRefusal::InvalidRequest(format!("`wait` must be a time such as `30s`, at most {most}"))
    })
}

/// The largest body of a request, in bytes. Our choice: the arguments of known tools have a few KiB.
pub const MAX_EXEC_BODY_BYTES: usize = 256 * 1024;

/// The most values in a request. Our choice: the arguments of known tools have some hundreds. Parsed, so many values
/// take at most 6 MiB.
pub const MAX_REQUEST_VALUES: u32 = 8192;

/// The wait of a request that names none: shorter than the timeout of every measured client.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// The longest wait. A client that waits longer polls.
pub const MAX_WAIT: Duration = Duration::from_mins(10);

/// The longest idempotency key, in bytes.
const MAX_KEY_BYTES: usize = 128;
