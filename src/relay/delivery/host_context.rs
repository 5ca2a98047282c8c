//! What of this host a row depends on, so that whoever takes it up comes to the same, or to nothing.

use uuid::Uuid;

use super::outbox::{DeliveryRequest, HostContext, SecretDigest};
use super::{DeliveryError, DeliveryService, KnownSecret};
use crate::base::hex;
use crate::base::secret::SecretString;

impl DeliveryService {
    /// As it is now.
    pub fn host_context(&self) -> HostContext {
        let salt = Uuid::now_v7().simple().to_string();
        let mark = |known: &KnownSecret| SecretDigest {
            name: known.name.to_owned(),
            digest: secret_digest(&salt, &known.secret),
        };
        let known = self.settings.known.iter().map(mark).collect();
        HostContext { committer: self.settings.committer.clone(), salt, known }
    }

    /// What must not be in a row's work: all that was known when it came out, and all that is known now.
    pub(super) fn secrets_for(
        &self,
        order: &DeliveryRequest,
    ) -> Result<Vec<SecretString>, DeliveryError> {
        self.check_secrets_known(order)?;
        Ok(self.settings.known.iter().map(|known| known.secret.clone()).collect())
    }

    /// # Errors
    /// [`DeliveryError::Ignorant`] where something is not known here that was known then.
    pub(super) fn check_secrets_known(&self, order: &DeliveryRequest) -> Result<(), DeliveryError> {
        let Some(host) = &order.host else { return Ok(()) };
        let known = self.settings.known.iter();
        let digests: Vec<_> = known.map(|known| secret_digest(&host.salt, &known.secret)).collect();
        match host.known.iter().find(|mark| !digests.contains(&mark.digest)) {
            Some(SecretDigest { name, .. }) => Err(DeliveryError::Ignorant { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Who a row's commits are by.
    pub(super) fn committer_for<'a>(&'a self, order: &'a DeliveryRequest) -> &'a str {
        order.host.as_ref().map_or(&self.settings.committer, |host| &host.committer)
    }
}

fn secret_digest(salt: &str, secret: &SecretString) -> String {
    hex::sha256_hex(format!("{salt}\0{}", secret.expose_secret()).as_bytes())
}
