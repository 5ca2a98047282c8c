//! The run store's tables.

use crate::base::db::DatabaseSchema;

/// The run store's schema for [`Database::open`](crate::base::db::SqliteDatabase::open_database).
pub const SCHEMA: DatabaseSchema = DatabaseSchema { module: "journal", migrations: MIGRATIONS };

/// The bytes of an ended run's records, in a statement on the table `run`. The constants are our estimates of what a row
/// takes beside its texts.
macro_rules! kept_bytes {
    () => {
        "(SELECT coalesce(sum(128 + coalesce(octet_length(answer), 0) + coalesce(octet_length(result), 0)
           + octet_length(stdout) + octet_length(stderr)), 0) FROM outcome WHERE outcome.run = run.id)
         + (SELECT coalesce(sum(64 + octet_length(data)), 0) FROM event WHERE event.run = run.id)"
    };
}

/// See [`kept_bytes`].
pub(super) const KEPT_BYTES: &str = kept_bytes!();

const MIGRATIONS: &[&str] = &[
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
    "
CREATE INDEX run_grant ON run (grant_id, created, id);
",
    // Money is in billionths of a dollar; days are counted from 1970, in UTC.
    "
CREATE TABLE grant_reservation (
    run      TEXT NOT NULL PRIMARY KEY,
    grant_id TEXT NOT NULL,
    day      INTEGER NOT NULL,
    reserved INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX grant_reservation_grant ON grant_reservation (grant_id);
CREATE TABLE grant_charge (
    grant_id TEXT NOT NULL,
    day      INTEGER NOT NULL,
    charged  INTEGER NOT NULL,
    PRIMARY KEY (grant_id, day)
) STRICT, WITHOUT ROWID;
",
    // The time of the wall clock when a service last trusted the clock.
    "
CREATE TABLE clock (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    time INTEGER NOT NULL
) STRICT;
",
    // The bytes of each ended run's records, and their sums. The triggers keep the sums true.
    concat!(
        "
ALTER TABLE run ADD COLUMN kept INTEGER NOT NULL DEFAULT 0;
UPDATE run SET kept = ",
        kept_bytes!(),
        " WHERE state = 'ended';
CREATE INDEX run_kept ON run (grant_id, ended, id) WHERE kept > 0;
CREATE TABLE grant_kept (
    grant_id TEXT NOT NULL PRIMARY KEY,
    bytes    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO grant_kept SELECT grant_id, sum(kept) FROM run WHERE kept > 0 GROUP BY grant_id;
CREATE TRIGGER run_kept_changed AFTER UPDATE OF kept ON run BEGIN
    INSERT OR IGNORE INTO grant_kept VALUES (new.grant_id, 0);
    UPDATE grant_kept SET bytes = bytes + new.kept - old.kept WHERE grant_id = new.grant_id;
    DELETE FROM grant_kept WHERE grant_id = new.grant_id AND bytes = 0;
END;
CREATE TRIGGER run_kept_deleted AFTER DELETE ON run BEGIN
    UPDATE grant_kept SET bytes = bytes - old.kept WHERE grant_id = old.grant_id;
    DELETE FROM grant_kept WHERE grant_id = old.grant_id AND bytes = 0;
END;
"
    ),
    // The time of a client's request to cancel the run.
    "
ALTER TABLE run ADD COLUMN cancelled INTEGER;
",
    // Zero while the service does not trust the clock.
    "
ALTER TABLE clock ADD COLUMN is_steady INTEGER NOT NULL DEFAULT 1;
",
];

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, params_from_iter};

    use crate::service::store::{RunFilter, RunPhase};

    /// Lists of a grant's runs read only that grant's index entries, in order, for every combination of the other
    /// filters.
    #[test]
    fn a_grants_lists_are_read_from_its_index() {
        let file = Connection::open_in_memory().unwrap();
        for step in super::MIGRATIONS {
            file.execute_batch(step).unwrap();
        }
        let some = |is_given: bool, text: &str| is_given.then(|| text.to_owned());
        for number in 0..8 {
            let filter = RunFilter {
                grant: Some("g".to_owned()),
                agent: some(number & 1 > 0, "a"),
                state: (number & 2 > 0).then_some(RunPhase::Ended),
                before: some(number & 4 > 0, "r"),
                limit: 50,
            };
            let (query, given) = filter.build_statement();
            let mut plan = file.prepare(&format!("EXPLAIN QUERY PLAN {query}")).unwrap();
            let lines = plan.query_map(params_from_iter(given), |row| row.get::<_, String>(3));
            let plan = lines.unwrap().collect::<Result<Vec<_>, _>>().unwrap().join("; ");
            assert!(plan.contains("USING INDEX run_grant (grant_id=?"), "{plan}");
            assert!(!plan.contains("SCAN") && !plan.contains("TEMP B-TREE"), "{plan}");
        }
    }
}
