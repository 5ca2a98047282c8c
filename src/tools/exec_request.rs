//! The request of a tool call, read strictly.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::definition::is_tool_name;
use super::refusal::ToolRefusal;
use crate::base::json::check_document;
use crate::base::serde_words::{self, JsonInputError};

/// A valid request of a tool call. Nothing is known yet about the tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolExecRequest {
    pub tool: String,
    pub arguments: Map<String, Value>,
    /// The longest time for which the response may wait for the result.
    pub wait: Duration,
    pub idempotency_key: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolExecBody {
    tool: String,
    #[serde(default)]
    arguments: Map<String, Value>,
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
        check_document(body).map_err(ToolRefusal::Json)?;
        let body: ToolExecBody = serde_words::from_slice(body).map_err(|error| match error {
            JsonInputError::Syntax(problem) | JsonInputError::Data(problem) => {
                ToolRefusal::InvalidRequest(problem)
            }
        })?;
        // The socket decides which run calls. A request that names another run is a mistake or an attack.
        if body.run_id.is_some_and(|named| named != run) {
            return Err(ToolRefusal::OtherRun);
        }
        if !is_tool_name(&body.tool) {
            return Err(ToolRefusal::InvalidToolName);
        }
        let key = body.idempotency_key;
        if key.as_ref().is_some_and(|key| !(1..=MAX_KEY_BYTES).contains(&key.len())) {
            return Err(ToolRefusal::InvalidRequest(format!(
                "`idempotency_key` must have 1 to {MAX_KEY_BYTES} bytes"
            )));
        }
        let wait = parse_wait(body.wait.as_deref())?;
        Ok(Self { tool: body.tool, arguments: body.arguments, wait, idempotency_key: key })
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

/// The wait of a request that names none: shorter than the timeout of every measured client.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// The longest wait. A client that waits longer polls.
pub const MAX_WAIT: Duration = Duration::from_mins(10);

/// The longest idempotency key, in bytes.
const MAX_KEY_BYTES: usize = 128;
