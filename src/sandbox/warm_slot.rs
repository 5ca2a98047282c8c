//! A sandbox that is started ahead, for a run that nobody knows yet, and waits to be claimed.
//!
//! Its first process connects to a socket of ours and reads there what it is for. It has no variable and no label of any
//! run before; and there is no way back: with the claim it becomes that run's sandbox, and ends as one.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::driver::SandboxStartOutcome;
use super::spec::CLAIM_SOCKET;
use super::{SandboxDriver, SandboxError, SandboxHandle, SandboxRequest, SandboxSpec};

/// A sandbox that runs and waits. Dropped, it ends; what is left of it then is for [`WarmSlot::remove`] or the sweep.
pub struct WarmSlot {
    pub(super) sandbox: SandboxHandle,
    pub(super) host: UnixStream,
}

/// What a slot is to be told.
pub(super) struct SlotClaim {
    host: UnixStream,
    run: String,
    text: Vec<u8>,
}

impl WarmSlot {
    /// Starts one, and returns when it waits, or `stop` has come before. After an error nothing is left of it.
    ///
    /// # Errors
    /// It could not be made, or does not come to wait.
    pub async fn start(
        driver: &SandboxDriver,
        order: SandboxRequest,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, SandboxError> {
        let mut sandbox = SandboxHandle::new(driver, order)?;
        let started = tokio::select! {
            biased;
            () = stop => Err(SandboxError::Slot("it was not needed any more".to_owned())),
            started = timeout(START_TIMEOUT, Box::pin(accept_init(&mut sandbox))) => match started {
                Ok(started) => started,
                Err(_) => Err(SandboxError::Slot("its start takes too long".to_owned())),
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

    /// Whether it has not ended.
    pub fn is_waiting(&self) -> bool {
        // It says nothing of itself; the end of its connection is its own.
        let read = self.host.try_read(&mut [0]);
        matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Makes it this run's sandbox, which is told so when it is [run](SandboxHandle::run).
    pub fn claim(self, spec: &SandboxSpec) -> SandboxHandle {
        let claim = SlotClaim { host: self.host, run: spec.run.clone(), text: spec.encode_claim() };
        self.sandbox.with_claim(claim, spec.grace)
    }

    pub async fn remove(self) {
        drop(self.host);
        Box::pin(self.sandbox.remove()).await;
    }
}

impl SlotClaim {
    /// Whose it is.
    pub(super) fn run_id(&self) -> &str {
        &self.run
    }

    /// Returns when it has been heard.
    pub(super) async fn send_claim(mut self) -> Result<(), SandboxError> {
        let told = timeout(CLAIM_TIMEOUT, async {
            self.host.write_all(&self.text).await?;
            self.host.read_u8().await
        });
        match told.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                Err(SandboxError::Slot(format!("it did not take the claim: {error}")))
            }
            Err(_) => Err(SandboxError::Slot("it does not answer".to_owned())),
        }
    }
}

async fn accept_init(sandbox: &mut SandboxHandle) -> Result<UnixStream, SandboxError> {
    let path = sandbox.request().spec.socket_dir.join(CLAIM_SOCKET);
    let cannot = |error: io::Error| SandboxError::Slot(format!("`{}`: {error}", path.display()));
    let listener = bind_claim_socket(&path).map_err(cannot)?;
    match sandbox.start().await? {
        SandboxStartOutcome::Running => (),
        SandboxStartOutcome::Not { message, .. } => return Err(SandboxError::Slot(message)),
    }
    let (host, _) = listener.accept().await.map_err(cannot)?;
    fs::remove_file(&path).map_err(cannot)?;
    Ok(host)
}

/// For the sandbox's user, behind a directory that only we can enter.
fn bind_claim_socket(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// From nothing to a sandbox that waits, on a busy machine.
const START_TIMEOUT: Duration = Duration::from_mins(2);

/// For a process that does nothing but wait for this.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
