//! The time of standing approvals, over the ends of processes: a wall clock that is set back makes none live longer.
//!
//! 1. Each step of a standing approval notes its time in the database. A service also notes the time while one is open.
//! 2. The clock of the next process begins at the noted time at the earliest.
//! 3. A reader that finds an approval whose time is over closes it, so that no clock opens it again.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction};

use super::standing::StandingApproval;
use super::standing_rows::expire_due;
use super::store::ApprovalStore;
use super::to_unix_millis;
use crate::base::db::DatabaseError;
use crate::base::wall_clock::StampClock;

impl ApprovalStore {
    /// Sets a clock that is behind neither `trusted`, at which an earlier process has trusted the wall clock, nor the last
    /// step of a standing approval.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn resume_clock(self, trusted: Option<SystemTime>) -> Result<Self, DatabaseError> {
        let now = trusted.unwrap_or(UNIX_EPOCH).max(SystemTime::now());
        let read = |view: &Connection| {
            view.query_row("SELECT latest FROM approval_clock", [], |row| row.get::<_, i64>(0))
        };
        let latest = self.database.read_committed(read).await?;
        let latest = UNIX_EPOCH + Duration::from_millis(latest.max(0).cast_unsigned());
        if latest.duration_since(now).is_ok_and(|ahead| ahead > MAX_AHEAD) {
            self.close_all(now).await?;
            return Ok(self.with_clock(StampClock::not_before(now)));
        }
        Ok(self.with_clock(StampClock::not_before(now.max(latest))))
    }

    /// Notes the time while a standing approval or a proposal is open, and closes those whose time is over.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn note_time(&self) -> Result<(), DatabaseError> {
        let open = "SELECT 1 FROM standing_approval WHERE state IN ('proposed', 'granted') LIMIT 1";
        let has_open = move |view: &Connection| view.prepare_cached(open)?.exists([]);
        if !self.database.read_committed(has_open).await? {
            return Ok(());
        }
        let now = self.now_ms();
        self.database.write_in_transaction(move |change| expire_due(change, now)).await
    }

    /// Closes what a reader has found open at a time at which it is over.
    pub(super) async fn close_overdue(
        &self,
        rows: &[StandingApproval],
        now: i64,
    ) -> Result<(), DatabaseError> {
        if rows.iter().all(|row| row.state_at(now) == row.state) {
            return Ok(());
        }
        self.database.write_in_transaction(move |change| expire_due(change, now)).await
    }

    /// Closes every open standing approval, because the clock was so far ahead that the age of none is known.
    async fn close_all(&self, now: SystemTime) -> Result<(), DatabaseError> {
        let now = to_unix_millis(now);
        let close = move |change: &Transaction<'_>| {
            change.execute("UPDATE approval_clock SET latest = ?1", [now])?;
            change.execute(CLOSE_ALL, [])
        };
        let closed = self.database.write_in_transaction(close).await?;
        tracing::warn!(
            closed,
            "the clock is more than a day behind the last step of a standing approval; all of them are closed, because their age is not known"
        );
        Ok(())
    }
}

const CLOSE_ALL: &str = "UPDATE standing_approval SET state = 'expired', arguments = NULL WHERE state IN ('proposed', 'granted')";

/// The longest time by which the clock of a new process may be behind the last step. Our choice: the approvals' own time
/// would differ for good from that of a machine whose clock was wrong once.
const MAX_AHEAD: Duration = Duration::from_hours(24);
