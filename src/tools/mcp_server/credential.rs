//! The headers that authorize the host to a server, and the search for their secrets in the server's answer.

use http::HeaderValue;

use super::error::McpServerError;
use crate::base::secret::SecretString;
use crate::base::secret_redactor::SecretRedactor;
use crate::tools::header_secrets::list_header_secrets;

/// A search for the credentials of one request in its answer.
#[derive(Default)]
pub(super) struct CredentialGuard(Vec<SecretRedactor>);

impl CredentialGuard {
    /// Adds a credential that is sent with the request, so that the guard knows the value even if it is replaced now.
    pub(super) fn add_value(&mut self, value: &SecretString) {
        self.0.extend(list_header_secrets(value).iter().map(SecretRedactor::new));
    }

    /// Checks that a text has none of the secrets, in any spelling that the redactor knows: at any depth of JSON in JSON,
    /// and in Base64 at any offset.
    ///
    /// # Errors
    /// Returns [`McpServerError::RepeatsCredential`].
    pub(super) fn check_text(&self, text: &str) -> Result<(), McpServerError> {
        if self.0.iter().any(|secret| secret.contains_secret(text.as_bytes())) {
            Err(McpServerError::RepeatsCredential)
        } else {
            Ok(())
        }
    }
}

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
