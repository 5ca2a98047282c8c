//! Append-only record of what each run did, chained so that any change is found.
//!
//! One file per run, one record a line. A record holds the hash of the record before it and its own,
//! so a flipped byte, a lost line or a moved one breaks the chain at a place that
//! [`verify`](verify::verify_file) names. Checkpoints are signed: a forger who computes the chain anew
//! lacks the key.
//!
//! What stands where: [`records`] is what is written, [`chain`] is how a record becomes a line,
//! [`log`] writes, [`recover`] takes up the file of an earlier process, [`verify`] proves it, and [`seal`] that it is
//! the file it was.
//!
//! **Invariant:** an admission is in the file before its call goes upstream, and a settlement
//! follows for each, if only by the next process.
//!
//! **Invariant:** what is in the file never changes; records are only added at its end.
//!
//! What a chain cannot tell: that records are missing at the *end*, or that a forger has appended some.
//! The orderly end is therefore a record of its own, which is signed at once; a report says whether it
//! is there and [how far signatures cover the log](verify::AuditVerifyReport::coverage); where it was is in the seal.

pub mod chain;
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
pub mod verify;
pub mod writer_process;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::secret::SecretString;

pub use key::{AuditPublicKey, AuditSigningKey, KEY_FILE_NAME, load_or_create_seed};
pub use log::{AuditLag, AuditLog, RecoveredRun};

/// Where the log is, and how much it must survive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuditConfig {
    /// The file; without one, nothing is recorded. It belongs to one run.
    #[serde(skip_serializing)]
    pub path: Option<PathBuf>,
    pub durability: AuditDurability,
    /// The shortest time between two syncs under [`AuditDurability::Group`].
    #[serde(with = "humantime_serde")]
    pub sync_every: Duration,
    /// The ed25519 seed that checkpoints are signed with: 32 bytes as hexadecimal or base64.
    /// Without one, a key is made that lives as long as the process.
    #[serde(skip)]
    pub signing_key: Option<SecretString>,
    /// The longest time that a record goes without a signed checkpoint after it; 0 sets no such limit.
    #[serde(with = "humantime_serde")]
    pub checkpoint_interval: Duration,
    /// The most records without one; 0 sets no such limit. Without both limits, only the end is signed.
    pub checkpoint_every: u64,
    /// Bytes of one run's log. At the limit nothing more of that run is admitted.
    pub max_bytes: u64,
    /// Whether a run's budget may go without a log, by which it outlasts a restart.
    pub allow_budget_reset: bool,
}

/// What an admission survives once its call goes upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditDurability {
    /// The end of this process, however sudden: the record is in the kernel.
    #[default]
    Os,
    /// That, and a power cut that comes later than [`AuditConfig::sync_every`] and one sync.
    Group,
    /// A power cut: the call waits until the record is on disk.
    Fsync,
}

/// Why a log cannot be opened, written or proved.
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
        "audit log `{}` is broken at {broken}; it is evidence now, so move it away and start anew",
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
            // Ours: a signature costs as much as two calls, and a thousand busy runs make a hundred a second.
            checkpoint_interval: Duration::from_secs(10),
            checkpoint_every: 4096,
            // A million calls. Ours: an agent makes a thousand.
            max_bytes: 1024 * 1024 * 1024,
            allow_budget_reset: false,
        }
    }
}

impl AuditError {
    /// Says which file could not be read.
    fn from_read_error(path: &Path, error: read::AuditReadError) -> Self {
        match error {
            read::AuditReadError::Io(source) => Self::File { path: path.into(), source },
            read::AuditReadError::Broken(broken) => Self::ChainBroken { path: path.into(), broken },
        }
    }
}
