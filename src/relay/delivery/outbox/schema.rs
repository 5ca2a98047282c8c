//! The outbox's tables, and the migrations from earlier versions.

use rusqlite::{Connection, TransactionBehavior};

use super::OutboxError;

/// Prepares a connection: sets its durability, and migrates the file to this version's tables.
pub(super) fn prepare_schema(connection: &mut Connection) -> Result<(), OutboxError> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A commit waits for the disk, and not only for the kernel: the next step, such as a push, cannot be undone.
    connection.pragma_update(None, "synchronous", "FULL")?;
    // A changed schema in the file must not be able to call functions with side effects.
    connection.pragma_update(None, "trusted_schema", "OFF")?;
    // One transaction for all migrations: a crash leaves the file in its old version.
    let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found: i64 = change.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let applied = usize::try_from(found).unwrap_or(usize::MAX);
    if applied > SCHEMA_VERSION {
        return Err(OutboxError::NewerSchema { found });
    }
    for migration in &MIGRATIONS[applied..] {
        change.execute_batch(migration)?;
    }
    change.pragma_update(None, "user_version", SCHEMA_VERSION.cast_signed())?;
    Ok(change.commit()?)
}

/// The version of the schema that this program writes.
pub(super) const SCHEMA_VERSION: usize = MIGRATIONS.len();

/// Migrations. Each one brings the file from the version that is its index to the next version. A published migration
/// never changes.
const MIGRATIONS: &[&str] = &["
CREATE TABLE job (
    id          TEXT NOT NULL PRIMARY KEY,
    repository  TEXT NOT NULL,
    branch_key  TEXT NOT NULL,
    run         TEXT NOT NULL,
    tree        TEXT NOT NULL,
    \"order\"     TEXT NOT NULL,
    artifacts   TEXT NOT NULL,
    fence       INTEGER NOT NULL DEFAULT 0,
    step        TEXT NOT NULL CHECK (step IN
        ('extracted', 'quarantined', 'judged', 'pushed', 'pull_requested', 'done', 'held', 'failed')),
    verdict     TEXT CHECK (verdict IN ('push', 'review', 'hold')),
    head        TEXT,
    is_pushed   INTEGER NOT NULL DEFAULT 0,
    pull_number INTEGER,
    pull_url    TEXT,
    attempts    INTEGER NOT NULL DEFAULT 0,
    due         INTEGER NOT NULL,
    error       TEXT,
    created     INTEGER NOT NULL,
    updated     INTEGER NOT NULL,
    UNIQUE (repository, branch_key, run, tree)
) STRICT;
CREATE INDEX job_due ON job (due) WHERE step NOT IN ('done', 'held', 'failed');
", "
ALTER TABLE job ADD COLUMN reasons TEXT NOT NULL DEFAULT '[]';
", "
CREATE TABLE job_next (
    id          TEXT NOT NULL PRIMARY KEY,
    repository  TEXT NOT NULL,
    branch_key  TEXT NOT NULL,
    run         TEXT NOT NULL,
    \"order\"     TEXT NOT NULL,
    artifacts   TEXT NOT NULL,
    fence       INTEGER NOT NULL DEFAULT 0,
    step        TEXT NOT NULL CHECK (step IN
        ('extracted', 'quarantined', 'judged', 'pushed', 'pull_requested', 'done', 'held', 'failed')),
    verdict     TEXT CHECK (verdict IN ('push', 'review', 'hold')),
    head        TEXT,
    is_pushed   INTEGER NOT NULL DEFAULT 0,
    pull_number INTEGER,
    pull_url    TEXT,
    attempts    INTEGER NOT NULL DEFAULT 0,
    due         INTEGER NOT NULL,
    error       TEXT,
    created     INTEGER NOT NULL,
    updated     INTEGER NOT NULL,
    code        TEXT,
    statement   TEXT,
    reasons     TEXT NOT NULL DEFAULT '[]'
) STRICT;
INSERT INTO job_next (id, repository, branch_key, run, \"order\", artifacts, fence, step, verdict, head, is_pushed,
        pull_number, pull_url, attempts, due, error, created, updated, reasons)
    SELECT id, repository, branch_key, run, \"order\", artifacts, fence, step, verdict, head, is_pushed,
        pull_number, pull_url, attempts, due, error, created, updated, reasons FROM job;
DROP TABLE job;
ALTER TABLE job_next RENAME TO job;
CREATE INDEX job_due ON job (due) WHERE step NOT IN ('done', 'held', 'failed');
CREATE INDEX job_artifacts ON job (artifacts);
CREATE TABLE desk (
    id          TEXT NOT NULL PRIMARY KEY,
    repository  TEXT NOT NULL,
    branch_key  TEXT NOT NULL,
    run         TEXT NOT NULL,
    plan        TEXT NOT NULL,
    artifacts   TEXT NOT NULL,
    workspace   TEXT NOT NULL,
    remains     TEXT,
    created     INTEGER NOT NULL
) STRICT;
", "
ALTER TABLE job ADD COLUMN mode TEXT;
", "
ALTER TABLE desk ADD COLUMN due INTEGER;
ALTER TABLE desk ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
UPDATE desk SET due = 0 WHERE remains LIKE '%No space left on device%' OR remains LIKE '%Disk quota exceeded%'
    OR remains LIKE '%not a git repository: ''/workspace/.git''%';
", "
ALTER TABLE job ADD COLUMN grant_id TEXT;
ALTER TABLE job ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE desk ADD COLUMN grant_id TEXT;
ALTER TABLE desk ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
"];
