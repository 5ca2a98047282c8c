//! Taking in a report of costs: a large body, from a caller that is trusted to report and with nothing else.
//!
//! **Invariant:** a body is read by a thread that may block, and its notices are written some hundred at a time. So neither
//! the runtime nor other writers wait for the whole of it.

use std::sync::Arc;

use bytes::Bytes;
use tokio::task::spawn_blocking;

use super::{Books, Fate, taking};
use crate::base::db;
use crate::billing::Error;
use crate::billing::ingest::{self, Ingested, Malformed, Rest};

/// Why a body was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Books(#[from] Error),
}

impl Books {
    /// Takes in what LiteLLM's callback has sent. A body is read by a thread that may block, and few are at a time.
    ///
    /// # Errors
    /// The body is not JSON, or as every call; in the second case some of its notices may be in the books.
    pub async fn ingest(&self, body: impl Into<Bytes>) -> Result<Ingested, Refused> {
        let reader = Arc::clone(&self.readers).acquire_owned().await;
        let reader = reader.map_err(|_| Error::from(db::Error::Closed))?;
        let (books, body) = (self.clone(), body.into());
        let read = spawn_blocking(move || {
            // The thread goes on when the caller has left, and counts until its end.
            let _reader = reader;
            books.ingest_blocking(&body)
        });
        read.await.map_err(|_| Error::from(db::Error::Closed))?
    }

    fn ingest_blocking(&self, body: &[u8]) -> Result<Ingested, Refused> {
        let (mut ingested, mut failed) = (Ingested::default(), None);
        let rest = ingest::read(body, |notices| {
            if failed.is_none() {
                match self.database.write_blocking(taking(notices)) {
                    Ok(fates) => fates.into_iter().for_each(|fate| ingested.count(fate)),
                    Err(error) => failed = Some(error),
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(Error::from(error).into());
        }
        let Rest { foreign, invalid, complaints } = rest;
        let foreign = ingested.foreign + foreign;
        Ok(Ingested { foreign, invalid, complaints, ..ingested })
    }
}

impl Ingested {
    fn count(&mut self, fate: Fate) {
        let counter = match fate {
            Fate::New => &mut self.new,
            Fate::Known => &mut self.known,
            Fate::Waits | Fate::Crowded => &mut self.unknown,
            Fate::Conflicting => &mut self.conflicting,
            Fate::Unpaid => &mut self.unpaid,
            Fate::Foreign => &mut self.foreign,
        };
        *counter += 1;
    }
}

/// Ours: one thread reads 100 MiB of notices in a second.
pub(super) const READERS: usize = 2;
