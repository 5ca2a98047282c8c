//! Retained items: work that is held or has failed, and workspaces in which something remains.
//!
//! Agents decide how much such work there is. So the items are counted for each grant and in all, and they expire.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rusqlite::params;

use super::job::{from_millis, to_millis};
use super::{DeliveryOutbox, OutboxError};
use crate::base::dir_tree;

/// The number and size of retained items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetainedTotals {
    /// The number of held rows, failed rows and retained workspaces.
    pub works: u64,
    /// The disk space of the items in bytes, measured when each item was retained.
    pub bytes: u64,
    /// The time at which the oldest item was retained.
    pub oldest: Option<SystemTime>,
}

impl RetainedTotals {
    /// Returns the age of the oldest retained item.
    pub fn oldest_age(&self) -> Option<Duration> {
        self.oldest.map(|oldest| oldest.elapsed().unwrap_or_default())
    }
}

impl DeliveryOutbox {
    /// Counts the retained items of a grant's runs, or of all runs if `grant` is `None`.
    ///
    /// # Errors
    /// Returns an error if the database does not work.
    pub fn retained_totals(&self, grant: Option<&str>) -> Result<RetainedTotals, OutboxError> {
        let sum = "SELECT count(*), coalesce(sum(bytes), 0), min(since) FROM (
                 SELECT grant_id, bytes, updated AS since FROM job WHERE step IN ('held', 'failed')
                 UNION ALL SELECT grant_id, bytes, created FROM desk WHERE remains IS NOT NULL
             ) WHERE ?1 IS NULL OR grant_id = ?1";
        let read = |row: &rusqlite::Row<'_>| {
            let (works, bytes) = (row.get::<_, i64>(0)?, row.get::<_, i64>(1)?);
            let oldest = row.get::<_, Option<i64>>(2)?.map(from_millis);
            Ok(RetainedTotals {
                works: works.cast_unsigned(),
                bytes: bytes.cast_unsigned(),
                oldest,
            })
        };
        Ok(self.lock_connection().query_row(sum, [grant], read)?)
    }

    /// Removes items that have been retained since before `before`, and returns their number. A workspace that still
    /// has to be collected or archived stays. An item that cannot be removed stops no other one.
    ///
    /// # Errors
    /// Returns the first error if the database does not work or a directory cannot be removed. A later call tries again.
    pub fn expire_retained(&self, before: SystemTime) -> Result<usize, OutboxError> {
        // The IDs are collected first: `discard_item` takes the same lock for each of them.
        let old = {
            let connection = self.lock_connection();
            let old = "SELECT id FROM job WHERE step IN ('held', 'failed') AND updated < ?1";
            let mut old = connection.prepare(old)?;
            let old = old.query_map([to_millis(before)], |row| row.get::<_, String>(0))?;
            old.collect::<Result<Vec<_>, _>>()?
        };
        let rows = self.workspaces()?.into_iter();
        let left = rows.filter(|row| !row.needs_collection() && row.created < before);
        let old: Vec<_> = old.into_iter().chain(left.map(|row| row.id)).collect();
        let mut failure = None;
        for id in &old {
            if let Err(error) = self.discard_item(id) {
                tracing::warn!(id, %error, "an old item cannot be removed");
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(old.len()), Err)
    }

    /// Stores the disk space of a workspace. Measuring visits every file, so the measuring happens without the lock.
    pub(super) fn record_workspace_size(
        &self,
        id: &str,
        workspace: &Path,
    ) -> Result<(), OutboxError> {
        let weigh = "UPDATE desk SET bytes = ?2 WHERE id = ?1";
        self.lock_connection().execute(weigh, params![id, measure_dir(workspace)])?;
        Ok(())
    }
}

/// Returns the disk space of a directory in bytes, or 0 if the directory cannot be read.
pub(super) fn measure_dir(path: &Path) -> i64 {
    let bytes = dir_tree::disk_usage(path, u64::MAX).unwrap_or_default();
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
