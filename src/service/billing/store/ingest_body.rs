//! Ingests a report of costs: a large body from a caller that is trusted to report costs and with nothing else.
//!
//! **Invariant:** a blocking thread reads the body, and its notices are written some hundred at a time. So neither the
//! runtime nor other writers wait for the whole body.

use std::sync::Arc;

use bytes::Bytes;
use tokio::task::spawn_blocking;

use super::{BillingStore, IngestOutcome, ingest_in_transaction};
use crate::base::db;
use crate::service::billing::BillingError;
use crate::service::billing::ingest::{self, IngestReport, MalformedBodyError, SkippedItems};

/// The reason for which a body was not ingested.
#[derive(Debug, thiserror::Error)]
pub enum IngestError {
    #[error(transparent)]
    Malformed(#[from] MalformedBodyError),
    #[error(transparent)]
    Billing(#[from] BillingError),
}

impl BillingStore {
    /// Ingests a body of LiteLLM's callback. A blocking thread reads the body, and at most two bodies are read at a
    /// time.
    ///
    /// # Errors
    /// Returns an error if the body is not JSON, or if the database cannot be written. In the second case, some of the
    /// notices may be in the billing store.
    pub async fn ingest(&self, body: impl Into<Bytes>) -> Result<IngestReport, IngestError> {
        // The permit is taken before the thread, so that many large bodies wait as tasks and not as threads.
        let reader = Arc::clone(&self.readers).acquire_owned().await;
        let reader = reader.map_err(|_| BillingError::from(db::DatabaseError::Closed))?;
        let (books, body) = (self.clone(), body.into());
        let read = spawn_blocking(move || {
            // The thread continues after the caller has disconnected, so the thread itself holds the permit until its
            // end.
            let _reader = reader;
            books.ingest_blocking(&body)
        });
        read.await.map_err(|_| BillingError::from(db::DatabaseError::Closed))?
    }

    fn ingest_blocking(&self, body: &[u8]) -> Result<IngestReport, IngestError> {
        let (mut ingested, mut failed) = (IngestReport::default(), None);
        let rest = ingest::parse_body(body, |notices| {
            // The parser cannot be stopped from here, so the batches after a failed one are skipped.
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
            IngestOutcome::WaitsForCall | IngestOutcome::TooManyWaiting => &mut self.unknown,
            IngestOutcome::Conflicting => &mut self.conflicting,
            IngestOutcome::Unpaid => &mut self.unpaid,
            IngestOutcome::OtherDeployment => &mut self.foreign,
        };
        *counter += 1;
    }
}

/// The maximum number of bodies that are read at a time. Our choice: one thread reads 100 MiB of notices in a second.
pub(super) const MAX_CONCURRENT_READERS: usize = 2;
