//! Rows of a state directory that was copied, moved or restored to another path.
//!
//! The rows name the directories of their work by absolute paths. In a copy these paths lead into the original. Without
//! this step, discarding work in a copy would delete the original's files.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, TransactionBehavior};

use super::OutboxError;

/// Makes every row name the directory of its work below `state`, the directory that the outbox is in now.
pub(super) fn adopt_moved_rows(
    connection: &mut Connection,
    state: &Path,
) -> Result<(), OutboxError> {
    let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut moved = vec![];
    for (table, select) in [
        ("job", "SELECT rowid, artifacts, '' FROM job"),
        ("desk", "SELECT rowid, artifacts, workspace FROM desk"),
    ] {
        let mut statement = change.prepare(select)?;
        let rows = statement.query_map([], |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?))
        })?;
        for row in rows {
            let (row, artifacts, workspace) = row?;
            let Some(earlier) = earlier_state_dir(Path::new(&artifacts)) else { continue };
            // Another name of the same directory, such as a symlink, is no move. A run in progress may know its work by
            // that name.
            if is_same_dir(earlier, state) {
                continue;
            }
            let relocated = |path: &str| relocate_path(Path::new(path), earlier, state);
            moved.push((table, row, relocated(&artifacts), relocated(&workspace)));
        }
    }
    for (table, row, artifacts, workspace) in moved {
        let artifacts = artifacts.display().to_string();
        let workspace = workspace.display().to_string();
        let changed = match table {
            "job" => change.execute(
                "UPDATE job SET artifacts = ?2, \"order\" = json_set(\"order\", '$.artifacts', ?2) WHERE rowid = ?1",
                (row, &artifacts),
            ),
            _ => change.execute(
                "UPDATE desk SET artifacts = ?2, plan = json_set(plan, '$.artifacts', ?2), workspace = ?3 WHERE rowid = ?1",
                (row, &artifacts, &workspace),
            ),
        };
        // One row that is damaged must not keep all others from their work. Reading that row reports it again.
        if let Err(error) = changed {
            tracing::error!(
                table, row, artifacts, %error,
                "this row of a moved outbox is damaged; it still names its former directory"
            );
            continue;
        }
        tracing::info!(
            artifacts,
            "the state directory was moved or copied; this work is looked for here"
        );
    }
    Ok(change.commit()?)
}

/// Returns the state directory of a work's directory, which is two levels below it. A directory of another form was not
/// made by this program, and stays as it is.
fn earlier_state_dir(artifacts: &Path) -> Option<&Path> {
    let works_dir = artifacts.parent()?;
    works_dir.ends_with(super::WORK_DIR).then(|| works_dir.parent())?
}

/// Returns true if both paths lead to one directory.
fn is_same_dir(left: &Path, right: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    left == right || id(left).is_some_and(|found| Some(found) == id(right))
}

/// Returns a path below the earlier state directory as a path below the present one. Returns other paths unchanged.
fn relocate_path(path: &Path, earlier: &Path, state: &Path) -> PathBuf {
    path.strip_prefix(earlier).map_or_else(|_| path.to_owned(), |rest| state.join(rest))
}
