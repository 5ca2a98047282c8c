//! A sandbox that is started ahead, before its run is known, and waits to be claimed.
//!
//! Its first process connects to the host's claim socket and reads its run there. The sandbox has no variable and no
//! label of an earlier run. A claim cannot be undone: the sandbox becomes that run's sandbox, and ends with the run.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::slot_claim::SlotClaim;
use super::spec::CLAIM_SOCKET;
use super::{
    SandboxDriver, SandboxError, SandboxHandle, SandboxRequest, SandboxSpec, SandboxStartOutcome,
};

/// A sandbox that runs and waits for a claim. A drop ends it; [`WarmSlot::remove`] or the sweep removes its leftovers.
pub struct WarmSlot {
    pub(super) sandbox: SandboxHandle,
    pub(super) host: UnixStream,
}

impl WarmSlot {
    /// Starts a slot, and returns when it waits for a claim or `stop` has completed. After an error the slot is
    /// removed.
    ///
    /// # Errors
    /// Returns an error if the sandbox cannot be made, does not begin to wait in time, or `stop` has completed first.
    pub async fn start(
        driver: &SandboxDriver,
        request: SandboxRequest,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, SandboxError> {
        let mut sandbox = SandboxHandle::new(driver, request)?;
        let started = tokio::select! {
            // The select is biased, so that a slot that is not needed any more is not started.
            biased;
            () = stop => Err(SandboxError::SlotFailed("the slot is not needed any more".to_owned())),
            started = timeout(START_TIMEOUT, Box::pin(accept_init(&mut sandbox))) => match started {
                Ok(started) => started,
                Err(_) => Err(SandboxError::SlotFailed("the start takes too long".to_owned())),
            },
        };
        match started {
            Ok(host) => Ok(Self { sandbox, host }),
            Err(error) => {
                Box::pin(sandbox.remove()).await;
                Err(error)
            }
        }
    }

    /// Returns true if the slot has not ended, and a run in it would lose no output.
    pub fn is_waiting(&self) -> bool {
        self.is_connected() && self.sandbox.is_output_attached()
    }

    /// Returns true if the slot has not ended. Its output may have: a long-running sandbox has other pipes for its runs.
    pub(super) fn is_connected(&self) -> bool {
        // The first process sends nothing on its own, so a readable connection means that the connection has ended.
        let read = self.host.try_read(&mut [0]);
        matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Makes the slot this run's sandbox. The claim itself is sent when the sandbox is [run](SandboxHandle::run).
    pub fn claim(self, spec: &SandboxSpec) -> SandboxHandle {
        let claim = SlotClaim { host: self.host, run: spec.run.clone(), text: spec.encode_claim() };
        self.sandbox.with_claim(claim, spec.grace)
    }

    pub async fn remove(self) {
        drop(self.host);
        Box::pin(self.sandbox.remove()).await;
    }
}

async fn accept_init(sandbox: &mut SandboxHandle) -> Result<UnixStream, SandboxError> {
    let path = sandbox.request().spec.socket_dir.join(CLAIM_SOCKET);
    let cannot =
        |error: io::Error| SandboxError::SlotFailed(format!("`{}`: {error}", path.display()));
    // The socket exists before the sandbox, because the first process connects as soon as it starts.
    let listener = bind_claim_socket(&path).map_err(cannot)?;
    match sandbox.start().await? {
        SandboxStartOutcome::Running => (),
        SandboxStartOutcome::NotStarted { message, .. } => {
            return Err(SandboxError::SlotFailed(message));
        }
    }
    let (host, _) = listener.accept().await.map_err(cannot)?;
    // One connection is enough: without the path, no agent can connect later.
    fs::remove_file(&path).map_err(cannot)?;
    Ok(host)
}

/// Binds the claim socket. The sandbox's user may connect; only this process's user can enter the directory around it.
fn bind_claim_socket(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// The time from the creation of a sandbox until it waits, on a busy machine.
const START_TIMEOUT: Duration = Duration::from_mins(2);
