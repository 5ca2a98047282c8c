//! The headers that authorize the host to a server.

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
