//! The number of a grant's open runs, which the grant may limit.

use rusqlite::Connection;

use super::RunStore;
use crate::base::db;

impl RunStore {
    /// Returns true if a grant may have at most `most` runs, and has them. The answer may be outdated at once: only
    /// [`add_run`](RunStore::add_run) decides. Asking first keeps a grant that is full from taking a place for each of
    /// its refused requests.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn is_grant_full(
        &self,
        grant: &str,
        most: Option<u32>,
    ) -> Result<bool, db::DatabaseError> {
        let Some(most) = most else { return Ok(false) };
        let grant = grant.to_owned();
        self.database.read_committed(move |view| Ok(count_open_runs(view, &grant)? >= most)).await
    }
}

/// Returns the number of a grant's runs that have not ended.
pub(super) fn count_open_runs(view: &Connection, grant: &str) -> rusqlite::Result<u32> {
    let open = "SELECT count(*) FROM run WHERE grant_id = ?1 AND state <> 'ended'";
    view.query_row(open, [grant], |row| row.get(0))
}
