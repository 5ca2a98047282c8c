//! Returns unused pages of the file to the file system.
//!
//! SQLite keeps the pages of deleted data for later data. In a file with incremental vacuum, SQLite can move the last
//! pages of the file into unused pages, and then truncate the file.

use rusqlite::{Connection, Transaction};

/// Turns on incremental vacuum. A file without it, which an earlier version has made, is rewritten once.
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

/// Releases some unused pages. Returns true if there may be more to release.
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

/// Copies committed pages from the write-ahead log to the file, as far as no reader needs the older pages.
pub(super) fn checkpoint_wal(view: &Connection) -> rusqlite::Result<()> {
    view.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
}

/// SQLite's number for the mode `INCREMENTAL` of the pragma `auto_vacuum`.
const AUTO_VACUUM_INCREMENTAL: u32 = 2;

/// The number of unused pages of 4 KiB that stay in the file for later data. Our choice.
const KEEP_FREE_PAGES: u32 = 1024;

/// The largest number of pages that one transaction moves. Our choice: other writers wait for one step only.
const PAGES_PER_STEP: u32 = 256;
