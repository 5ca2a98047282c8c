//! What of this host a row depends on, so that whoever takes it up comes to the same, or to nothing.

use uuid::Uuid;

use super::outbox::{Host, Mark, Order};
use super::{Error, Known, Relay};
use crate::base::hex;
use crate::base::secret::Secret;

impl Relay {
    /// As it is now.
    pub fn host(&self) -> Host {
        let salt = Uuid::now_v7().simple().to_string();
        let mark = |known: &Known| Mark {
            name: known.name.to_owned(),
            digest: digest(&salt, &known.secret),
        };
        let known = self.settings.known.iter().map(mark).collect();
        Host { committer: self.settings.committer.clone(), salt, known }
    }

    /// What must not be in a row's work: all that was known when it came out, and all that is known now.
    pub(super) fn known_of(&self, order: &Order) -> Result<Vec<Secret>, Error> {
        self.check_known(order)?;
        Ok(self.settings.known.iter().map(|known| known.secret.clone()).collect())
    }

    /// # Errors
    /// [`Error::Ignorant`] where something is not known here that was known then.
    pub(super) fn check_known(&self, order: &Order) -> Result<(), Error> {
        let Some(host) = &order.host else { return Ok(()) };
        let known = self.settings.known.iter();
        let digests: Vec<_> = known.map(|known| digest(&host.salt, &known.secret)).collect();
        match host.known.iter().find(|mark| !digests.contains(&mark.digest)) {
            Some(Mark { name, .. }) => Err(Error::Ignorant { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Who a row's commits are by.
    pub(super) fn committer_of<'a>(&'a self, order: &'a Order) -> &'a str {
        order.host.as_ref().map_or(&self.settings.committer, |host| &host.committer)
    }
}

fn digest(salt: &str, secret: &Secret) -> String {
    hex::sha256(format!("{salt}\0{}", secret.expose()).as_bytes())
}
