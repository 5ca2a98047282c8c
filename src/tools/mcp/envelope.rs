//! The era of a message, and the comparison of its headers with its body.
//!
//! A modern message has its version in `_meta`, and repeats its version, its method and the name of its tool in headers,
//! so that a proxy can decide without reading the body. A contradiction between the two would let a call pass a proxy as
//! another one, so the message is refused. The headers are compared in both eras, wherever they are.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;

use super::error::McpError;
use super::message::McpMessage;
use super::version::{MODERN_VERSION, McpEra, SERVED_VERSIONS};
use crate::tools::refusal::ToolRefusal;

/// Checks a message's version and headers, and returns its era.
///
/// # Errors
/// Returns the first error: headers and body contradict each other, the version is not served, or a part is missing.
pub(super) fn check_envelope(
    message: &McpMessage<'_>,
    headers: &HeaderMap,
) -> Result<McpEra, McpError> {
    let header = single_header(headers, VERSION_HEADER)?;
    let era = match message.meta.text(VERSION_KEY).map_err(McpError::InvalidParams)? {
        Some(version) => check_modern_version(message, &version, header)?,
        None => check_legacy_version(message, header)?,
    };
    check_mirrored_headers(message, headers, era)?;
    Ok(era)
}

/// Checks a message that has its version in its body.
fn check_modern_version(
    message: &McpMessage<'_>,
    version: &str,
    header: Option<&str>,
) -> Result<McpEra, McpError> {
    compare_header(VERSION_HEADER, header, Some(version), McpEra::Modern)?;
    if version != MODERN_VERSION {
        return Err(McpError::UnsupportedVersion { requested: version.to_owned() });
    }
    if message.meta.raw(CAPABILITIES_KEY).is_none() {
        return Err(McpError::InvalidParams(format!("`_meta` has no `{CAPABILITIES_KEY}`")));
    }
    message.meta.object(CAPABILITIES_KEY).map_err(McpError::InvalidParams)?;
    Ok(McpEra::Modern)
}

/// Checks a message without a version in its body. Only messages of the legacy era have none.
fn check_legacy_version(
    message: &McpMessage<'_>,
    header: Option<&str>,
) -> Result<McpEra, McpError> {
    // The first message of a legacy client. Its version is a parameter, and is negotiated.
    if message.method == INITIALIZE {
        return Ok(McpEra::Legacy);
    }
    match header {
        Some(version) if !SERVED_VERSIONS.contains(&version) => {
            Err(McpError::UnsupportedVersion { requested: version.to_owned() })
        }
        // The modern era defines no notification for this endpoint, so there is nothing to demand from one.
        Some(MODERN_VERSION) if message.id.is_none() => Ok(McpEra::Modern),
        Some(MODERN_VERSION) => Err(missing_version()),
        _ if message.method == DISCOVER => Err(missing_version()),
        // A client of 2025-03-26 or earlier sends no header.
        _ => Ok(McpEra::Legacy),
    }
}

fn missing_version() -> McpError {
    McpError::InvalidParams(format!("`_meta` has no `{VERSION_KEY}`"))
}

/// Compares the headers that repeat the method and the name with the body.
fn check_mirrored_headers(
    message: &McpMessage<'_>,
    headers: &HeaderMap,
    era: McpEra,
) -> Result<(), McpError> {
    // A notification needs no headers in either era.
    let era = if message.id.is_some() { era } else { McpEra::Legacy };
    let method = single_header(headers, METHOD_HEADER)?;
    compare_header(METHOD_HEADER, method, Some(&message.method), era)?;
    let Some((_, member)) = NAMED_METHODS.iter().find(|(method, _)| *method == message.method)
    else {
        return Ok(());
    };
    let name = message.params.text(member).map_err(McpError::InvalidParams)?;
    let header = single_header(headers, NAME_HEADER)?.map(decode_name).transpose()?;
    compare_header(NAME_HEADER, header.as_deref(), name.as_deref(), era)
}

/// Compares a header with its place in the body. A modern message must have the header.
fn compare_header(
    name: &str,
    header: Option<&str>,
    body: Option<&str>,
    era: McpEra,
) -> Result<(), McpError> {
    match (header, body) {
        (Some(header), Some(body)) if header == body => Ok(()),
        (Some(_), _) => Err(mismatch(format!("`{name}` has another value"))),
        (None, Some(_)) if era == McpEra::Modern => Err(mismatch(format!("`{name}` is missing"))),
        (None, _) => Ok(()),
    }
}

/// Returns the value of a header that may stand once.
fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, McpError> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().map(http::HeaderValue::to_str).transpose();
    let value = value.map_err(|_| mismatch(format!("`{name}` is not plain ASCII")))?;
    match values.next() {
        Some(_) => Err(mismatch(format!("`{name}` is there twice"))),
        None => Ok(value),
    }
}

/// Decodes a name that may not be plain ASCII, which stands as `=?base64?…?=`.
fn decode_name(header: &str) -> Result<String, McpError> {
    let encoded = header.strip_prefix("=?base64?").and_then(|rest| rest.strip_suffix("?="));
    let Some(encoded) = encoded else { return Ok(header.to_owned()) };
    let decoded = STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    decoded.ok_or_else(|| mismatch(format!("`{NAME_HEADER}` is not valid Base64")))
}

fn mismatch(problem: String) -> McpError {
    ToolRefusal::HeaderMismatch(problem).into()
}

pub(super) const INITIALIZE: &str = "initialize";
pub(super) const DISCOVER: &str = "server/discover";
pub(super) const CALL: &str = "tools/call";

/// The methods whose name or address is repeated in a header, with the parameter that has it.
const NAMED_METHODS: [(&str, &str); 3] =
    [(CALL, "name"), ("prompts/get", "name"), ("resources/read", "uri")];

const VERSION_HEADER: &str = "mcp-protocol-version";
const METHOD_HEADER: &str = "mcp-method";
const NAME_HEADER: &str = "mcp-name";
const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES_KEY: &str = "io.modelcontextprotocol/clientCapabilities";
