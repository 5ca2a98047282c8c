//! The claim of a run on a [warm slot](super::warm_slot).

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::SandboxError;

/// A claim that is to be sent to a slot.
pub(super) struct SlotClaim {
    pub(super) host: UnixStream,
    pub(super) run: String,
    pub(super) text: Vec<u8>,
}

impl SlotClaim {
    /// Returns the id of the run that claims the slot.
    pub(super) fn run_id(&self) -> &str {
        &self.run
    }

    /// Sends the claim, and returns when the first process has acknowledged it.
    pub(super) async fn send_claim(mut self) -> Result<(), SandboxError> {
        let answer = timeout(CLAIM_TIMEOUT, async {
            self.host.write_all(&self.text).await?;
            self.host.read_u8().await
        });
        match answer.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(SandboxError::SlotFailed(format!(
                "the first process did not accept the claim: {error}"
            ))),
            Err(_) => Err(SandboxError::SlotFailed("the first process does not answer".to_owned())),
        }
    }
}

/// The time for an answer of a first process that only waits for claims.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
