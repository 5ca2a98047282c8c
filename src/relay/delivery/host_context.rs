//! The host settings that a row depends on. A later attempt comes to the same result with them, or stops.

use uuid::Uuid;

use super::outbox::{DeliveryRequest, HostContext, SecretDigest};
use super::{DeliveryError, DeliveryService, KnownSecret};
use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

impl DeliveryService {
    /// Returns the present settings of this host, with a new salt.
    pub fn host_context(&self) -> HostContext {
        // Only digests are stored: the outbox must not become a second place of the secrets.
        let salt = Uuid::now_v7().simple().to_string();
        let mark = |known: &KnownSecret| SecretDigest {
            name: known.name.to_owned(),
            digest: secret_digest(&salt, &known.secret),
        };
        let known = self.settings.known_secrets.iter().map(mark).collect();
        HostContext { committer: self.settings.committer.clone(), salt, known }
    }

    /// Returns the secrets that a row's work must not contain: the present ones, which include all that the row names.
    pub(super) fn secrets_for(
        &self,
        request: &DeliveryRequest,
    ) -> Result<Vec<SecretString>, DeliveryError> {
        self.check_secrets_known(request)?;
        Ok(self.settings.known_secrets.iter().map(|known| known.secret.clone()).collect())
    }

    /// Checks that this host still has every secret that was registered when the work came out.
    ///
    /// # Errors
    /// Returns [`DeliveryError::UnknownSecret`] if this host lacks one of these secrets.
    pub(super) fn check_secrets_known(
        &self,
        request: &DeliveryRequest,
    ) -> Result<(), DeliveryError> {
        let Some(host) = &request.host else { return Ok(()) };
        let known = self.settings.known_secrets.iter();
        let digests: Vec<_> = known.map(|known| secret_digest(&host.salt, &known.secret)).collect();
        match host.known.iter().find(|mark| !digests.contains(&mark.digest)) {
            // The name tells the operator which variable to set. The value is not known here.
            Some(SecretDigest { name, .. }) => {
                Err(DeliveryError::UnknownSecret { name: name.clone() })
            }
            None => Ok(()),
        }
    }

    /// Returns the committer of a row's commits: the row's own, or the present one for rows of earlier versions.
    pub(super) fn committer_for<'a>(&'a self, request: &'a DeliveryRequest) -> &'a str {
        request.host.as_ref().map_or(&self.settings.committer, |host| &host.committer)
    }
}

/// Returns the SHA-256 of the salt, a zero byte and the secret, in hex.
fn secret_digest(salt: &str, secret: &SecretString) -> String {
    sha256_hex(format!("{salt}\0{}", secret.expose_secret()).as_bytes())
}
