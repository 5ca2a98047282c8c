//! Room on the disk: a file that has been large becomes small again.
//!
//! SQLite keeps the pages of what was deleted for what comes next. A file that was made for it can have its last pages
//! moved there, and be cut.

use rusqlite::{Connection, Transaction};

/// A file of an earlier version was not made for it, and is written anew, once.
pub(super) fn enable_incremental_vacuum(connection: &Connection) {
    let make = || {
        let mode: u32 = connection.pragma_query_value(None, "auto_vacuum", |row| row.get(0))?;
        if mode == AUTO_VACUUM_INCREMENTAL {
            return Ok(());
        }
        connection.pragma_update(None, "auto_vacuum", AUTO_VACUUM_INCREMENTAL)?;
        connection.execute_batch("VACUUM")
    };
    if let Err(error) = make() {
        tracing::warn!(%error, "the database stays as large as it gets: it cannot be written anew");
    }
}

/// Returns whether there may be more to give.
pub(super) fn vacuum_step(change: &Transaction<'_>) -> rusqlite::Result<bool> {
    let free = || change.pragma_query_value(None, "freelist_count", |row| row.get::<_, u32>(0));
    let before = free()?;
    if before <= KEEP_FREE_PAGES {
        return Ok(false);
    }
    let mut statement = change.prepare(&format!("PRAGMA incremental_vacuum({PAGES_PER_STEP})"))?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(free()? < before)
}

/// Brings the file itself, not only its log, to where the last commit is, as far as no reader needs what was before.
pub(super) fn checkpoint_wal(view: &Connection) -> rusqlite::Result<()> {
    view.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
}

/// SQLite's number for it.
const AUTO_VACUUM_INCREMENTAL: u32 = 2;

/// Pages of 4 KiB that are kept for what comes next.
const KEEP_FREE_PAGES: u32 = 1024;

/// Pages that are moved in one transaction.
const PAGES_PER_STEP: u32 = 256;
