//! The audit log of a row: what is done to it when its run is over, and that log closed.
//!
//! It is a log like a run's, chained and signed, which `audit verify` proves; its run is the one whose work it is. The
//! run's own log names the row where the work came out, and so this file: nothing has to be written twice.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::outbox::Job;
use crate::audit::record::{Finished, Started};
use crate::audit::relay as event;
use crate::audit::{Config, Error, Log};
use crate::base::secret::Secret;
use crate::budget::Amount;

/// A row's log, while somebody is at it.
pub struct Record(Log);

impl Record {
    /// Opens a row's log below the relay's directory. Blocks.
    ///
    /// # Errors
    /// It cannot be used, or is not as it was written: then nothing more is done to the row.
    pub fn open(state: &Path, job: &Job, signing_key: Option<Secret>) -> Result<Self, Error> {
        let path = path(state, &job.id);
        let directory = path.with_file_name("");
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(|source| Error::File { path: directory, source })?;
        let facts = &job.order.facts;
        let started = Started {
            run: facts.run.clone(),
            attempt: format!("relay {}", job.id),
            account: "-".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            policy: facts.policy.clone(),
            prices: "-".to_owned(),
            trace: None,
            upstream: "-",
        };
        let config = Config { path: Some(path), signing_key, ..Config::default() };
        Log::open(&config, &started).map(|(log, _)| Self(log))
    }

    pub fn log(&self) -> &Log {
        &self.0
    }

    /// Somebody has brought the work into a clone.
    pub fn applied(&self, job: &Job) {
        let Job { id, head, order, .. } = job;
        let head = head.unwrap_or(order.announced.tip).to_string();
        self.0.relayed(&event::Applied { relay: id, head: &head });
    }

    /// The row is let go of: what is in the log is signed, and on the disk. Blocks.
    ///
    /// # Errors
    /// The disk does not take it.
    pub fn finish(self) -> Result<(), Error> {
        self.0.finish(&Finished { spent: Amount::default(), admitted: 0, refused: 0 })
    }
}

/// Where a row's log is, if it has one.
pub fn path(state: &Path, id: &str) -> PathBuf {
    state.join("audit").join(format!("{id}.jsonl"))
}
