CREATE TABLE job (
    id          TEXT NOT NULL PRIMARY KEY,
    repository  TEXT NOT NULL,
    branch_key  TEXT NOT NULL,
    run         TEXT NOT NULL,
    tree        TEXT NOT NULL,
    "order"     TEXT NOT NULL,
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
PRAGMA user_version = 1;
