//! The table of questions about tool calls.

use crate::base::db::DatabaseSchema;

/// The schema of the approval store. Times are milliseconds since 1970, money is billionths of a dollar.
pub const APPROVAL_SCHEMA: DatabaseSchema =
    DatabaseSchema { module: "approval", migrations: &[MIGRATION_1, MIGRATION_2, MIGRATION_3] };

// The trigger makes a wrong step fail in every program that writes the file, whatever its code does.
const MIGRATION_1: &str = "
CREATE TABLE approval (
    id         TEXT NOT NULL PRIMARY KEY,
    run        TEXT NOT NULL,
    agent      TEXT NOT NULL,
    tool       TEXT NOT NULL,
    rule       TEXT NOT NULL,
    definition TEXT NOT NULL,
    policy     TEXT NOT NULL,
    digest     TEXT NOT NULL,
    arguments  TEXT,
    evidence   TEXT NOT NULL,
    price      INTEGER NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('pending', 'approved', 'denied', 'expired', 'withdrawn', 'consumed')),
    requested  INTEGER NOT NULL,
    not_after  INTEGER NOT NULL,
    resolved   INTEGER,
    decided_by TEXT,
    reason     TEXT,
    call       TEXT
) STRICT;
CREATE INDEX approval_run ON approval (run);
CREATE INDEX approval_requested ON approval (requested, id);
CREATE INDEX approval_open ON approval (requested, id) WHERE state IN ('pending', 'approved');
CREATE TRIGGER approval_inserted BEFORE INSERT ON approval WHEN new.state <> 'pending' BEGIN
    SELECT RAISE(ABORT, 'an approval begins as a question');
END;
CREATE TRIGGER approval_moved BEFORE UPDATE ON approval WHEN NOT (
    new.digest = old.digest AND new.not_after = old.not_after AND (
        (old.state = 'pending' AND new.state IN ('approved', 'denied', 'expired', 'withdrawn'))
        OR (old.state = 'approved' AND new.state IN ('expired', 'withdrawn', 'consumed'))))
BEGIN
    SELECT RAISE(ABORT, 'an approval moves forward only');
END;
";

// A question about a budget: the spent limit with the limits in force, and the limits that a person has raised, as JSON.
const MIGRATION_2: &str = "
ALTER TABLE approval ADD COLUMN budget TEXT;
ALTER TABLE approval ADD COLUMN raised TEXT;
";

// The messages that the receiver of the webhook does not have yet, and the replies that it has sent lately.
const MIGRATION_3: &str = "
CREATE TABLE approval_message (
    id       TEXT NOT NULL PRIMARY KEY,
    body     TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    due      INTEGER NOT NULL,
    expires  INTEGER NOT NULL
) STRICT;
CREATE INDEX approval_message_due ON approval_message (due);
CREATE TABLE approval_reply (
    id       TEXT NOT NULL PRIMARY KEY,
    received INTEGER NOT NULL
) STRICT;
";
