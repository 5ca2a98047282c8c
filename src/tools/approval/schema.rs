//! The tables of questions about tool calls, of standing approvals, and of the policies of agents.

use crate::base::db::DatabaseSchema;

/// The schema of the approval store. Times are milliseconds since 1970, money is billionths of a dollar. The same file has
/// the table of grants before.
pub const APPROVAL_SCHEMA: DatabaseSchema = DatabaseSchema {
    module: "approval",
    migrations: &[
        MIGRATION_1,
        MIGRATION_2,
        MIGRATION_3,
        MIGRATION_4,
        MIGRATION_5,
        MIGRATION_6,
        MIGRATION_7,
        MIGRATION_8,
        MIGRATION_9,
    ],
};

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

// The standing approvals, and the salt of their digests: a digest must stay the same in the next process, and must not tell
// a short argument. `randomblob` reads the generator that SQLite seeds from the system's.
const MIGRATION_4: &str = "
ALTER TABLE approval ADD COLUMN standing TEXT;
CREATE TABLE approval_salt (
    one  INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    salt TEXT NOT NULL
) STRICT;
INSERT INTO approval_salt (one, salt) VALUES (1, lower(hex(randomblob(16))));
CREATE TABLE standing_approval (
    id         TEXT NOT NULL PRIMARY KEY,
    state      TEXT NOT NULL CHECK (state IN ('proposed', 'granted', 'spent', 'revoked', 'expired')),
    scope      TEXT NOT NULL CHECK (scope IN ('run', 'always')),
    call_key   TEXT NOT NULL,
    digest     TEXT NOT NULL,
    run        TEXT NOT NULL,
    owner      TEXT,
    account    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    tool       TEXT NOT NULL,
    rules      TEXT NOT NULL,
    definition TEXT NOT NULL,
    arguments  TEXT,
    evidence   TEXT NOT NULL,
    price      INTEGER NOT NULL,
    created    INTEGER NOT NULL,
    not_after  INTEGER NOT NULL,
    max_uses   INTEGER NOT NULL,
    used       INTEGER NOT NULL DEFAULT 0 CHECK (used <= max_uses),
    granted    INTEGER,
    granted_by TEXT,
    reason     TEXT,
    revoked_by TEXT
) STRICT;
CREATE INDEX standing_approval_run ON standing_approval (run);
CREATE INDEX standing_approval_open ON standing_approval (not_after) WHERE state IN ('proposed', 'granted');
CREATE INDEX standing_approval_created ON standing_approval (created, id);
CREATE INDEX standing_approval_granted ON standing_approval (call_key) WHERE state = 'granted';
CREATE UNIQUE INDEX standing_approval_proposed ON standing_approval (call_key) WHERE state = 'proposed';
CREATE TRIGGER standing_approval_inserted BEFORE INSERT ON standing_approval
WHEN new.used <> 0 OR new.state NOT IN ('proposed', 'granted') OR (new.state = 'granted' AND new.granted_by IS NULL) BEGIN
    SELECT RAISE(ABORT, 'a standing approval begins as a proposal or with an answer');
END;
CREATE TRIGGER standing_approval_moved BEFORE UPDATE ON standing_approval WHEN NOT (
    new.digest = old.digest AND new.call_key = old.call_key AND (
        (old.state = 'proposed' AND new.used = 0 AND new.state IN ('granted', 'revoked', 'expired'))
        OR (old.state = 'granted' AND new.state IN ('granted', 'spent', 'revoked', 'expired') AND new.used >= old.used
            AND new.max_uses = old.max_uses AND new.not_after = old.not_after AND new.granted_by = old.granted_by)))
BEGIN
    SELECT RAISE(ABORT, 'a standing approval moves forward only');
END;
";

// The time of the last step of a standing approval, before which no later process begins.
const MIGRATION_5: &str = "
CREATE TABLE approval_clock (
    one    INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    latest INTEGER NOT NULL
) STRICT;
INSERT INTO approval_clock (one, latest)
SELECT 1, coalesce(max(max(created, coalesce(granted, created))), 0) FROM standing_approval;
";

// The digests of the standing approvals of earlier versions name an agent by the name in its records, which agents may
// share, and allow some interpreters for all runs. None of them matches a call any more.
const MIGRATION_6: &str = "
UPDATE standing_approval SET state = 'expired', arguments = NULL WHERE state IN ('proposed', 'granted');
";

// The policies that people have set, as JSON.
const MIGRATION_7: &str = "
CREATE TABLE agent_policy (
    agent      TEXT NOT NULL PRIMARY KEY,
    policy     TEXT NOT NULL,
    changed    INTEGER NOT NULL,
    changed_by TEXT NOT NULL
) STRICT;
";

// The account of the run that asks. No question of an earlier version is open, so theirs need not be known.
const MIGRATION_8: &str = "
ALTER TABLE approval ADD COLUMN account TEXT NOT NULL DEFAULT '';
";

// A grant that is revoked takes its standing approvals with it. The trigger is part of the transaction that revokes, in
// whatever program: the command line revokes while a service runs.
const MIGRATION_9: &str = "
UPDATE standing_approval SET state = 'revoked', arguments = NULL
WHERE state = 'granted' AND granted_by IN (SELECT id FROM grants WHERE revoked IS NOT NULL);
CREATE TRIGGER standing_approval_giver_revoked AFTER UPDATE OF revoked ON grants
WHEN old.revoked IS NULL AND new.revoked IS NOT NULL BEGIN
    UPDATE standing_approval SET state = 'revoked', arguments = NULL WHERE state = 'granted' AND granted_by = new.id;
END;
";
