//! The audit log: an append-only record of the actions of each run, chained so that every change is found.
//!
//! Each run has one file, and each record is one line. A record holds its own hash and the hash of the record before
//! it. A flipped byte, a lost line or a moved line therefore breaks the chain at a place that
//! [`verify`](verify::verify_file) reports. Checkpoints are signed: a forger who computes the chain anew does not have
//! the key.
//!
//! The modules: [`records`] defines the content of the records, [`chain`] turns a record into a line, [`log`] writes,
//! [`recover`] continues the file of an earlier process, [`verify`] checks a file, and [`seal`] checks that a file is
//! the one that was closed.
//!
//! **Invariant:** an admission is in the file before its call goes upstream. A settlement follows each admission; if
//! the process crashes, the next process writes it.
//!
//! **Invariant:** records in the file never change. New records are only appended.
//!
//! A chain alone does not show that records are missing at the *end*, or that a forger has appended some. The orderly
//! end of a run is therefore a record of its own, which is signed at once. A report says whether that record is present
//! and [how far signatures cover the log](verify::AuditVerifyReport::coverage). The seal holds the position of the end.

pub mod approval_records;
pub mod chain;
pub mod connect_records;
pub mod delivery_records;
mod fields;
mod flood_limiter;
mod fsync;
mod key;
pub mod log;
mod log_file;
mod peers;
pub mod read;
pub mod records;
pub mod recover;
mod refusal_counter;
pub mod seal;
pub mod tool_records;
pub mod verify;
pub mod writer_process;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::secret::SecretString;

pub use key::{AuditPublicKey, AuditSigningKey, KEY_FILE_NAME, load_or_create_seed};
pub use log::{AuditLag, AuditLog, RecoveredRun};

/// The settings of the audit log: its file, its durability and its signatures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuditConfig {
    /// The file, which belongs to one run. Without a file, no audit log is written.
    #[serde(skip_serializing)]
    pub path: Option<PathBuf>,
    pub durability: AuditDurability,
    /// The shortest time between two syncs under [`AuditDurability::Group`].
    #[serde(with = "humantime_serde")]
    pub sync_every: Duration,
    /// The ed25519 seed of the key that signs checkpoints: 32 bytes as hexadecimal or base64. Without a seed, the
    /// process uses a new key, which is lost when the process ends.
    #[serde(skip)]
    pub signing_key: Option<SecretString>,
    /// The longest time between a record and the next signed checkpoint; 0 means no limit.
    #[serde(with = "humantime_serde")]
    pub checkpoint_interval: Duration,
    /// The largest number of records without a signed checkpoint; 0 means no limit. Without both limits, only the end
    /// of the log is signed.
    pub checkpoint_every: u64,
    /// The largest size of one run's log, in bytes. At the limit no further call of that run is admitted.
    pub max_bytes: u64,
    /// True if a run may have a budget without an audit log. The budget then starts anew after a restart.
    pub allow_budget_reset: bool,
}

/// The failures that a recorded admission survives once its call goes upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditDurability {
    /// The end of this process, even a sudden one: the record is in the kernel.
    #[default]
    Os,
    /// The end of this process, and a power cut that comes later than [`AuditConfig::sync_every`] and one sync.
    Group,
    /// A power cut at any time: the call waits until the record is on disk.
    Fsync,
}

/// An error for a log that cannot be opened, written or verified.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("cannot use audit log `{}`", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("audit log `{}` is not a regular file; name a file on a disk", path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "audit log `{}` is being written by another process; stop that one, or use another file",
        path.display()
    )]
    Locked { path: PathBuf },
    #[error(
        "audit log `{}` belongs to run `{theirs}`, this is run `{ours}`; give each run its own file",
        path.display()
    )]
    OtherRun { path: PathBuf, theirs: String, ours: String },
    #[error(
        "audit log `{}` fails verification at {broken}; keep the file for an investigation, move it away, and start with a new one",
        path.display()
    )]
    ChainBroken { path: PathBuf, broken: read::ChainBreakError },
    #[error(
        "the {what} has {characters} characters; it must be 32 bytes as 64 hexadecimal digits or as \
         base64 (`openssl rand -hex 32` makes a signing key)"
    )]
    InvalidKey { what: &'static str, characters: usize },
    #[error("cannot use the signing key `{}`", path.display())]
    KeyFile { path: PathBuf, source: io::Error },
    #[error("the system has no random bytes for a signing key; configure one")]
    NoRandomBytes,
    #[error("no checkpoint was signed by `{key}`, so nothing proves who wrote this log")]
    Unsigned { key: AuditPublicKey },
    #[error("the audit log cannot be written")]
    Write(#[source] io::Error),
    #[error(
        "the audit log of the run is as large as it may be, {limit} bytes; the run is at its end"
    )]
    Full { limit: u64 },
    #[error("the audit log cannot be synced to disk; nothing is admitted until a restart")]
    SyncFailed,
    #[error(
        "{} calls are waiting for their end already; let some end first",
        chain::MAX_UNSETTLED_CALLS
    )]
    TooManyUnsettled,
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self {
            path: None,
            durability: AuditDurability::default(),
            sync_every: Duration::from_millis(50),
            signing_key: None,
            // Our choice: a signature costs as much as two calls, and a thousand busy runs make a hundred signatures a
            // second.
            checkpoint_interval: Duration::from_secs(10),
            checkpoint_every: 4096,
            // Our choice: enough for a million calls; an agent makes a thousand.
            max_bytes: 1024 * 1024 * 1024,
            allow_budget_reset: false,
        }
    }
}

impl AuditError {
    /// Adds the path to an error of reading.
    fn from_read_error(path: &Path, error: read::AuditReadError) -> Self {
        match error {
            read::AuditReadError::Io(source) => Self::File { path: path.into(), source },
            read::AuditReadError::Broken(broken) => Self::ChainBroken { path: path.into(), broken },
        }
    }
}
