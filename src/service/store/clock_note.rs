//! The note of the wall clock that a service trusted last, for the next process and for the ends of runs.
//!
//! **Invariant:** no run ends before the noted time; see [`answer_dedup`](super::answer_dedup).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::OptionalExtension;

use super::{RunStore, to_millis};
use crate::base::db;

impl RunStore {
    /// Stores the current time, which the caller trusts. No later end of a run is before that time.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn note_time(&self, now: SystemTime) -> Result<(), db::DatabaseError> {
        let (note, now) = (
            "INSERT OR REPLACE INTO clock (one, time, is_steady) VALUES (1, ?1, 1)",
            to_millis(now),
        );
        self.database.write_in_transaction(move |change| change.execute(note, [now])).await?;
        Ok(())
    }

    /// Stores that the clock is not trusted, until the next trusted time is stored.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn note_distrust(&self) -> Result<(), db::DatabaseError> {
        let note = "UPDATE clock SET is_steady = 0";
        self.database.write_in_transaction(move |change| change.execute(note, [])).await?;
        Ok(())
    }

    /// Returns true if an earlier process trusted the clock at its last look.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn was_clock_trusted(&self) -> Result<bool, db::DatabaseError> {
        let read = |view: &rusqlite::Connection| {
            view.prepare_cached("SELECT 1 FROM clock WHERE is_steady")?.exists([])
        };
        self.database.read_committed(read).await
    }

    /// Returns the time that was stored last.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn noted_time(&self) -> Result<Option<SystemTime>, db::DatabaseError> {
        let read = |view: &rusqlite::Connection| {
            view.query_row("SELECT time FROM clock", [], |row| row.get::<_, i64>(0)).optional()
        };
        let noted = self.database.read_committed(read).await?;
        Ok(noted.map(|time| UNIX_EPOCH + Duration::from_millis(time.max(0).cast_unsigned())))
    }
}
