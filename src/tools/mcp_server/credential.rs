//! The headers that authorize the host to a server, and the search for their values.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use http::HeaderValue;

use super::error::McpServerError;
use crate::base::secret::SecretString;

/// Returns the header of a value.
///
/// # Errors
/// Returns an error if the value could end the header's line.
pub(super) fn to_header(value: &SecretString) -> Result<HeaderValue, McpServerError> {
    let mut header = HeaderValue::from_str(value.expose_secret()).map_err(|_| {
        McpServerError::Credential("it has a character that a header cannot have".to_owned())
    })?;
    header.set_sensitive(true);
    Ok(header)
}

/// Returns true if a text contains a value, or its secret part behind `Bearer `, plain or in Base64.
pub(super) fn contains_value(text: &str, value: &SecretString) -> bool {
    let secret = value.expose_secret();
    let secret = secret.rsplit(' ').next().unwrap_or(secret);
    let is_found = |part: &str| part.len() >= MIN_SECRET_BYTES && text.contains(part);
    let encoded = |engine: &dyn Fn(&str) -> String| {
        // The last characters depend on the bytes that follow the secret.
        let encoded = engine(secret);
        let end = encoded.trim_end_matches('=').len().saturating_sub(1);
        encoded[..end].to_owned()
    };
    is_found(secret)
        || is_found(&encoded(&|text| STANDARD.encode(text)))
        || is_found(&encoded(&|text| URL_SAFE.encode(text)))
}

/// The shortest value that is searched for. A shorter one stands in many texts by chance.
const MIN_SECRET_BYTES: usize = 8;
