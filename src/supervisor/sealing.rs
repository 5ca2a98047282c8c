//! What the service vouches for when a run has ended: its audit log, as it was then.

use std::io;

use super::Shared;
use crate::audit::seal::{Seal, Unproved};

impl Shared {
    /// What is remembered of a run's log. Of a run that never had a gateway there is none; of a log that is not whole and
    /// closed nothing is remembered, so that nobody is told later that it is as it should be.
    pub(super) async fn seal(&self, run: &str) -> Option<Seal> {
        match self.try_seal(run).await {
            Ok(seal) => seal,
            Err(why) => {
                tracing::error!(run, %why, "the audit log of a run that has ended is not as it should be");
                None
            }
        }
    }

    /// Whether somebody may be about to close it.
    pub(super) async fn has_open_log(&self, run: &str) -> bool {
        self.try_seal(run).await.is_err()
    }

    async fn try_seal(&self, run: &str) -> Result<Option<Seal>, Unproved> {
        let (path, id, key) = (self.settings.audit_log(run), run.to_owned(), self.public_key);
        let sealed = tokio::task::spawn_blocking(move || Seal::of(&path, &id, &key)).await;
        match sealed.unwrap_or_else(|error| Err(Unproved::Io(io::Error::other(error)))) {
            Err(Unproved::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            sealed => sealed.map(Some),
        }
    }
}
