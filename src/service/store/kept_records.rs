//! The bound on the records that the ended runs of one grant keep: their outputs, results and events.
//!
//! A run's agent chooses how much the run prints, and the runs of 30 days have no bound together. So each grant has a
//! number of bytes, and above it the oldest ended runs lose their records. The database counts the bytes by triggers
//! (see [`schema`](super::schema)), so that no deletion can forget to. The freed pages stay in the file, for later runs.
//!
//! **Invariant:** only outputs, results and events are removed. A run's row, with its state, its error code and the seal
//! of its audit log, stays for the whole retention time, and so does the money of its grant.

use rusqlite::{Transaction, params};

use super::RunStore;
use crate::base::db;

impl RunStore {
    /// Removes the records of the oldest ended runs of each grant that keeps more than `max_bytes`. Returns the number
    /// of these runs. The newest ended run of a grant keeps its records in any case.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn remove_records_beyond(&self, max_bytes: u64) -> Result<usize, db::DatabaseError> {
        let max = i64::try_from(max_bytes).unwrap_or(i64::MAX);
        let over = "SELECT grant_id FROM grant_kept WHERE bytes > ?1";
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(over)?.query_map([max], |row| row.get(0))?.collect()
        };
        let grants: Vec<String> = self.database.read_committed(read).await?;
        let mut removed = 0;
        for grant in grants {
            loop {
                let grant = grant.clone();
                let batch = move |change: &Transaction<'_>| remove_batch(change, &grant, max);
                match self.database.write_in_transaction(batch).await? {
                    0 => break,
                    some => removed += some,
                }
            }
        }
        Ok(removed)
    }

    /// Returns true if the records of an ended run were removed.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn has_lost_records(&self, run: &str) -> Result<bool, db::DatabaseError> {
        let run = run.to_owned();
        // The transaction that ends a run writes its outcome, so only a removal leaves an ended run without one.
        let find = "SELECT 1 FROM run WHERE id = ?1 AND state = 'ended'
                    AND NOT EXISTS (SELECT 1 FROM outcome WHERE run = ?1)";
        self.database.read_committed(move |view| view.prepare_cached(find)?.exists([run])).await
    }
}

/// Counts the bytes of a run that ends, after all its records are written.
pub(super) fn count_records(change: &Transaction<'_>, run: &str) -> rusqlite::Result<()> {
    let count = format!("UPDATE run SET kept = {} WHERE id = ?1", super::schema::KEPT_BYTES);
    change.prepare_cached(&count)?.execute([run])?;
    Ok(())
}

/// Removes the records of a grant's oldest ended runs, until the grant keeps `max` bytes or the transaction has removed
/// enough. Returns the number of these runs.
fn remove_batch(change: &Transaction<'_>, grant: &str, max: i64) -> rusqlite::Result<usize> {
    let oldest = "SELECT id FROM run WHERE grant_id = ?1 AND kept > 0 AND id <>
                  (SELECT id FROM run WHERE grant_id = ?1 AND kept > 0 ORDER BY ended DESC, id DESC LIMIT 1)
                  ORDER BY ended, id LIMIT ?2";
    let mut oldest = change.prepare_cached(oldest)?;
    // The ids are collected first: the statements below change the table that the query reads.
    let oldest =
        oldest.query_map(params![grant, MAX_RUNS_PER_TX], |row| row.get::<_, String>(0))?;
    let oldest: Vec<_> = oldest.collect::<Result<_, _>>()?;
    let (mut runs, mut rows) = (0, 0);
    for run in oldest {
        let kept = "SELECT 1 FROM grant_kept WHERE grant_id = ?1 AND bytes > ?2";
        if rows >= MAX_EVENTS_PER_TX || !change.prepare_cached(kept)?.exists(params![grant, max])? {
            break;
        }
        rows += change.prepare_cached("DELETE FROM event WHERE run = ?1")?.execute([&run])?;
        change.prepare_cached("DELETE FROM outcome WHERE run = ?1")?.execute([&run])?;
        change.prepare_cached("UPDATE run SET kept = 0 WHERE id = ?1")?.execute([&run])?;
        runs += 1;
    }
    Ok(runs)
}

/// The maximum number of runs whose records one transaction removes. Our choice.
const MAX_RUNS_PER_TX: i64 = 64;

/// The number of removed events after which a transaction removes no further records. Our choice.
const MAX_EVENTS_PER_TX: usize = 2000;
