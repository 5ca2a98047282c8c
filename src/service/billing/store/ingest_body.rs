//! Taking in a report of costs: a large body, from a caller that is trusted to report and with nothing else.
//!
//! **Invariant:** a body is read by a thread that may block, and its notices are written some hundred at a time. So neither
//! the runtime nor other writers wait for the whole of it.

use std::sync::Arc;

use bytes::Bytes;
use tokio::task::spawn_blocking;

use super::{BillingStore, IngestOutcome, ingest_in_transaction};
use crate::base::db;
use crate::service::billing::BillingError;
use crate::service::billing::ingest::{self, IngestReport, MalformedBodyError, SkippedItems};

/// Why a body was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum IngestError {
    #[error(transparent)]
    Malformed(#[from] MalformedBodyError),
    #[error(transparent)]
    Books(#[from] BillingError),
}

impl BillingStore {
    /// Takes in what LiteLLM's callback has sent. A body is read by a thread that may block, and few are at a time.
    ///
    /// # Errors
    /// The body is not JSON, or as every call; in the second case some of its notices may be in the books.
    pub async fn ingest(&self, body: impl Into<Bytes>) -> Result<IngestReport, IngestError> {
        let reader = Arc::clone(&self.readers).acquire_owned().await;
        let reader = reader.map_err(|_| BillingError::from(db::DatabaseError::Closed))?;
        let (books, body) = (self.clone(), body.into());
        let read = spawn_blocking(move || {
            // The thread goes on when the caller has left, and counts until its end.
            let _reader = reader;
            books.ingest_blocking(&body)
        });
        read.await.map_err(|_| BillingError::from(db::DatabaseError::Closed))?
    }

    fn ingest_blocking(&self, body: &[u8]) -> Result<IngestReport, IngestError> {
        let (mut ingested, mut failed) = (IngestReport::default(), None);
        let rest = ingest::parse_body(body, |notices| {
            if failed.is_none() {
                match self.database.write_in_transaction_blocking(ingest_in_transaction(notices)) {
                    Ok(fates) => fates.into_iter().for_each(|fate| ingested.count_outcome(fate)),
                    Err(error) => failed = Some(error),
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(BillingError::from(error).into());
        }
        let SkippedItems { foreign, invalid, complaints } = rest;
        let foreign = ingested.foreign + foreign;
        Ok(IngestReport { foreign, invalid, complaints, ..ingested })
    }
}

impl IngestReport {
    fn count_outcome(&mut self, fate: IngestOutcome) {
        let counter = match fate {
            IngestOutcome::New => &mut self.new,
            IngestOutcome::Known => &mut self.known,
            IngestOutcome::Waits | IngestOutcome::Crowded => &mut self.unknown,
            IngestOutcome::Conflicting => &mut self.conflicting,
            IngestOutcome::Unpaid => &mut self.unpaid,
            IngestOutcome::Foreign => &mut self.foreign,
        };
        *counter += 1;
    }
}

/// Ours: one thread reads 100 MiB of notices in a second.
pub(super) const MAX_CONCURRENT_READERS: usize = 2;
