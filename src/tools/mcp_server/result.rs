//! The results of a server.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::error::McpServerError;
use super::request::{LEGACY_VERSIONS, MODERN_VERSION};

/// The result of a call, whose parts stay as the server wrote them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CallResult<'a> {
    result_type: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    structured_content: Option<&'a RawValue>,
    /// The task that a server of 2025-11-25 begins in place of a result.
    task: Option<IgnoredAny>,
    #[serde(default)]
    is_error: bool,
}

/// A block of a result's content. Only its kind and its text are read.
#[derive(Deserialize)]
struct ContentBlock<'a> {
    #[serde(rename = "type", borrow)]
    _kind: Cow<'a, str>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Discovery {
    #[serde(default)]
    supported_versions: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Initialization {
    protocol_version: String,
}

/// Returns the parts of a call's result that the agent receives.
///
/// # Errors
/// Returns an error if the call has failed, the server wants more than one answer, or the result has not the form that the
/// client of the call expects.
pub(super) fn read_call_result(answer: &RawValue) -> Result<String, McpServerError> {
    let result: CallResult<'_> = serde_json::from_str(answer.get())
        .map_err(|_| McpServerError::Malformed("the result of a call"))?;
    let is_task = result.task.is_some() && result.content.is_none();
    if is_task || result.result_type.is_some_and(|kind| kind != "complete") {
        return Err(McpServerError::AsksForInput);
    }
    let content = result.content.map_or("[]", RawValue::get);
    let blocks: Vec<ContentBlock<'_>> = serde_json::from_str(content)
        .map_err(|_| McpServerError::Malformed("the content of a result"))?;
    if result.is_error {
        return Err(McpServerError::ToolFailed(joined_text(blocks)));
    }
    let structured =
        result.structured_content.map(|part| format!(r#","structuredContent":{part}"#));
    Ok(format!(r#"{{"content":{content}{}}}"#, structured.unwrap_or_default()))
}

/// Returns the texts of a failed call.
fn joined_text(blocks: Vec<ContentBlock<'_>>) -> String {
    let texts: Vec<_> = blocks.into_iter().filter_map(|block| block.text).collect();
    let text = texts.join("\n");
    let end = text.floor_char_boundary(MAX_FAILURE_BYTES);
    text[..end].to_owned()
}

/// Returns true if the answer to `server/discover` names the version of the modern era.
pub(super) fn serves_modern_version(answer: &RawValue) -> bool {
    let discovery = serde_json::from_str::<Discovery>(answer.get());
    discovery.is_ok_and(|found| found.supported_versions.iter().any(|one| one == MODERN_VERSION))
}

/// Returns the version that a legacy server has agreed to.
///
/// # Errors
/// Returns an error if this client does not know the version.
pub(super) fn negotiated_version(answer: &RawValue) -> Result<String, McpServerError> {
    let answer: Initialization = serde_json::from_str(answer.get())
        .map_err(|_| McpServerError::Malformed("the answer to `initialize`"))?;
    if LEGACY_VERSIONS.contains(&answer.protocol_version.as_str()) {
        Ok(answer.protocol_version)
    } else {
        Err(McpServerError::Malformed("a version that this client does not know"))
    }
}

/// The longest text of a failed call that the client sees, in bytes.
const MAX_FAILURE_BYTES: usize = 4096;
