//! The journal's tables.

use crate::base::db::Schema;

/// For [`Database::open`](crate::base::db::Database::open).
pub const SCHEMA: Schema = Schema { room: "journal", steps: STEPS };

const STEPS: &[&str] = &[
    "
CREATE TABLE run (
    id              TEXT NOT NULL PRIMARY KEY,
    grant_id        TEXT NOT NULL,
    idempotency_key TEXT,
    digest          TEXT NOT NULL,
    agent           TEXT NOT NULL,
    account         TEXT NOT NULL,
    model           TEXT NOT NULL,
    wanted          TEXT NOT NULL,
    state           TEXT NOT NULL CHECK (state IN ('queued', 'running', 'ended')),
    created         INTEGER NOT NULL,
    started         INTEGER,
    ended           INTEGER,
    error_code      TEXT,
    result          TEXT,
    stdout          TEXT,
    stderr          TEXT,
    UNIQUE (grant_id, idempotency_key)
) STRICT;
CREATE INDEX run_open ON run (grant_id) WHERE state <> 'ended';
CREATE INDEX run_created ON run (created, id);
CREATE INDEX run_ended ON run (ended) WHERE state = 'ended';
CREATE TABLE event (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    at   INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) STRICT, WITHOUT ROWID;
",
    "
CREATE TABLE outcome (
    run    TEXT NOT NULL PRIMARY KEY REFERENCES run (id) ON DELETE CASCADE,
    answer TEXT,
    result TEXT,
    stdout TEXT NOT NULL,
    stderr TEXT NOT NULL
) STRICT;
INSERT INTO outcome (run, result, stdout, stderr)
    SELECT id, result, coalesce(stdout, ''), coalesce(stderr, '') FROM run WHERE state = 'ended';
UPDATE run SET result = NULL, stdout = NULL, stderr = NULL WHERE state = 'ended';
ALTER TABLE run DROP COLUMN result;
ALTER TABLE run DROP COLUMN stdout;
ALTER TABLE run DROP COLUMN stderr;
",
    "
ALTER TABLE run ADD COLUMN log_records INTEGER;
ALTER TABLE run ADD COLUMN log_head TEXT;
ALTER TABLE run ADD COLUMN log_key TEXT;
",
];
