//! The work that is still to be delivered, counted for an operator who watches the outbox.

use std::time::{Duration, SystemTime};

use super::job::from_millis;
use super::{DeliveryOutbox, OPEN_CONDITION, OutboxError};

/// The number and age of rows whose delivery goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UndeliveredTotals {
    /// The number of rows whose step is not terminal.
    pub works: u64,
    /// The time at which the work of the oldest such row came out of its sandbox.
    pub oldest: Option<SystemTime>,
}

impl UndeliveredTotals {
    /// Returns the age of the oldest row, or zero if there is no row.
    pub fn oldest_age(&self) -> Duration {
        self.oldest.and_then(|oldest| oldest.elapsed().ok()).unwrap_or_default()
    }
}

impl DeliveryOutbox {
    /// Counts the rows that are still to be delivered.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn undelivered_totals(&self) -> Result<UndeliveredTotals, OutboxError> {
        let count = format!("SELECT count(*), min(created) FROM job WHERE {OPEN_CONDITION}");
        let read = |row: &rusqlite::Row<'_>| {
            let works = row.get::<_, i64>(0)?.cast_unsigned();
            let oldest = row.get::<_, Option<i64>>(1)?.map(from_millis);
            Ok(UndeliveredTotals { works, oldest })
        };
        Ok(self.lock_connection().query_row(&count, [], read)?)
    }
}
