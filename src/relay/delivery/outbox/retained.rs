//! What is kept, and goes nowhere by itself: work that is held or has failed, and workspaces in which something is left.
//!
//! How much that is, agents choose. So it is counted for each grant and in all, and has an age.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rusqlite::params;

use super::job::{from_millis, to_millis};
use super::{DeliveryOutbox, OutboxError};
use crate::base::dir_tree;

/// How much is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetainedTotals {
    /// Rows of held and failed work, and workspaces.
    pub works: u64,
    /// What they took on their disk when they were put away.
    pub bytes: u64,
    /// When the first of them was put away.
    pub oldest: Option<SystemTime>,
}

impl RetainedTotals {
    /// Returns how long the first of them has been kept.
    pub fn oldest_age(&self) -> Option<Duration> {
        self.oldest.map(|oldest| oldest.elapsed().unwrap_or_default())
    }
}

impl DeliveryOutbox {
    /// Counts what is kept of a grant's runs; without one, of all.
    ///
    /// # Errors
    /// As every call.
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

    /// Throws away what has been kept since before `before`, and returns how many that were. What is not put away yet
    /// stays.
    ///
    /// # Errors
    /// As every call. What could not be thrown away is the next time.
    pub fn expire_retained(&self, before: SystemTime) -> Result<usize, OutboxError> {
        let old = {
            let connection = self.lock_connection();
            let old = "SELECT id FROM job WHERE step IN ('held', 'failed') AND updated < ?1";
            let mut old = connection.prepare(old)?;
            let old = old.query_map([to_millis(before)], |row| row.get::<_, String>(0))?;
            old.collect::<Result<Vec<_>, _>>()?
        };
        let desks = self.workspaces()?.into_iter();
        let left = desks.filter(|desk| !desk.needs_collection() && desk.created < before);
        let old: Vec<_> = old.into_iter().chain(left.map(|desk| desk.id)).collect();
        old.iter().try_for_each(|id| self.discard_item(id))?;
        Ok(old.len())
    }

    /// Writes down how much a workspace takes. Measuring takes as long as it holds names, so nobody waits for it.
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

/// What a directory takes on its disk; of one that cannot be read, nothing.
pub(super) fn measure_dir(path: &Path) -> i64 {
    let bytes = dir_tree::disk_usage(path, u64::MAX).unwrap_or_default();
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
