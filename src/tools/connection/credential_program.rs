//! A program of this machine that prints a credential.
//!
//! An agent decides how many requests it makes at once, so it would decide how many programs run. Requests over one
//! connection share a run of the program that has not ended, and the runs of a process are bounded.

use std::fmt;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Shared, WeakShared};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::base::keyed_permits::KeyedPermits;
use crate::base::secret::SecretString;

/// A program, with the run of it that has not ended.
pub(super) struct CredentialProgram {
    command: Vec<String>,
    permits: Arc<KeyedPermits>,
    running: Mutex<Option<WeakShared<ProgramRun>>>,
}

/// The reason why a credential cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CredentialFault {
    /// The text names the place and never the value.
    Unavailable(String),
    /// Too many programs run at this time.
    Busy,
}

type ProgramRun = Pin<Box<dyn Future<Output = Result<SecretString, CredentialFault>> + Send>>;

impl CredentialProgram {
    pub(super) fn new(command: Vec<String>, permits: Arc<KeyedPermits>) -> Self {
        Self { command, permits, running: Mutex::default() }
    }

    /// Returns the value that the program prints. Callers at the same time share one run.
    pub(super) async fn read_value(&self) -> Result<SecretString, CredentialFault> {
        let run = self.join_or_start()?;
        run.await
    }

    fn join_or_start(&self) -> Result<Shared<ProgramRun>, CredentialFault> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // A run that has ended is not used again: the value may have been replaced since.
        let open =
            running.as_ref().and_then(WeakShared::upgrade).filter(|run| run.peek().is_none());
        if let Some(run) = open {
            return Ok(run);
        }
        let permit =
            self.permits.try_take(Some(&self.command.join("\0"))).ok_or(CredentialFault::Busy)?;
        let command = self.command.clone();
        let run: ProgramRun = Box::pin(async move {
            let printed = run_program(&command).await;
            drop(permit);
            printed.map_err(CredentialFault::Unavailable)
        });
        let run = run.shared();
        *running = run.downgrade();
        Ok(run)
    }
}

/// Runs a program without a shell and returns the line that it prints. Its environment has `PATH` and `HOME` only.
async fn run_program(command: &[String]) -> Result<SecretString, String> {
    let [program, arguments @ ..] = command else { return Err("it has no program".to_owned()) };
    let kept =
        ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    let child = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(kept)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let mut child =
        child.map_err(|error| format!("`{program}` cannot be started: {}", error.kind()))?;
    let Some(stdout) = child.stdout.take() else { return Err("it has no output".to_owned()) };
    let read = async {
        let mut text = String::new();
        let limit = MAX_SECRET_BYTES + 1;
        let read = stdout.take(limit).read_to_string(&mut text).await;
        read.map_err(|error| format!("`{program}` prints no text: {}", error.kind()))?;
        if text.len() as u64 == limit {
            return Err(format!("`{program}` prints more than {MAX_SECRET_BYTES} bytes"));
        }
        let status =
            child.wait().await.map_err(|error| format!("`{program}`: {}", error.kind()))?;
        if !status.success() {
            return Err(format!("`{program}` fails: {status}"));
        }
        Ok(text)
    };
    let text = tokio::time::timeout(PROGRAM_TIMEOUT, read).await;
    let text = text.unwrap_or_else(|_| Err(format!("`{program}` takes more than 10 s")))?;
    let value = text.trim_end_matches(['\r', '\n']);
    if value.is_empty() {
        return Err(format!("`{program}` prints nothing"));
    }
    Ok(SecretString::new(value))
}

impl fmt::Debug for CredentialProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialProgram")
    }
}

/// The longest output of a program. Our choice: a token has at most some kilobytes.
const MAX_SECRET_BYTES: u64 = 16 * 1024;

/// The longest time of a program. Our choice.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);
