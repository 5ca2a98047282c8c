//! The database tables of the billing store.

use crate::base::db::DatabaseSchema;

/// The schema of the billing store. Times are milliseconds since 1970, money is billionths of a dollar.
pub const SCHEMA: DatabaseSchema = DatabaseSchema {
    module: "billing",
    migrations: &[MIGRATION_1, MIGRATION_2, MIGRATION_3, MIGRATION_4, MIGRATION_5],
};

const MIGRATION_1: &str = "
CREATE TABLE billing_fact (
    call_id TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    attempt TEXT NOT NULL,
    account TEXT NOT NULL,
    upstream TEXT NOT NULL,
    route TEXT NOT NULL,
    model TEXT,
    stream INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    status INTEGER NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    cache_read INTEGER NOT NULL,
    cache_write INTEGER NOT NULL,
    cache_write_1h INTEGER NOT NULL,
    reasoning INTEGER NOT NULL,
    source TEXT NOT NULL,
    cost INTEGER NOT NULL,
    reported_cost INTEGER,
    started INTEGER NOT NULL,
    settled INTEGER NOT NULL,
    is_billable INTEGER NOT NULL,
    has_receipt INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX billing_fact_run ON billing_fact (run, started);
CREATE INDEX billing_fact_started ON billing_fact (started);
CREATE INDEX billing_fact_unreceipted ON billing_fact (settled, run) WHERE is_billable AND NOT has_receipt;

-- What was said of a call, whether or not it is in the books.
CREATE TABLE billing_notice (
    call_id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    run TEXT,
    is_failure INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    ended INTEGER NOT NULL,
    received INTEGER NOT NULL,
    is_taken INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX billing_notice_waiting ON billing_notice (received) WHERE NOT is_taken;

CREATE TABLE billing_receipt (
    source_reference TEXT PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE REFERENCES billing_fact (call_id),
    run TEXT NOT NULL,
    source TEXT NOT NULL,
    amount INTEGER NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    ended INTEGER NOT NULL,
    received INTEGER NOT NULL
) STRICT;
CREATE INDEX billing_receipt_run ON billing_receipt (run);
CREATE INDEX billing_receipt_unpriced ON billing_receipt (run) WHERE amount = 0 AND input + output > 0;

-- What contradicts a receipt; it is kept, and not charged.
CREATE TABLE billing_conflict (
    call_id TEXT NOT NULL,
    run TEXT NOT NULL,
    source TEXT NOT NULL,
    amount INTEGER NOT NULL,
    delta INTEGER NOT NULL,
    named_run TEXT,
    received INTEGER NOT NULL,
    PRIMARY KEY (call_id, source, amount)
) STRICT;
CREATE INDEX billing_conflict_run ON billing_conflict (run)";

/// Adds the time before which the service does not query LiteLLM again for a call that LiteLLM did not have.
const MIGRATION_2: &str =
    "ALTER TABLE billing_fact ADD COLUMN ask_after INTEGER NOT NULL DEFAULT 0";

/// Adds the deployment's id, which is random and generated once, with the table.
const MIGRATION_3: &str = "
CREATE TABLE billing_deployment (id TEXT NOT NULL) STRICT;
INSERT INTO billing_deployment VALUES (lower(hex(randomblob(8))))";

/// Adds a column for receipts of $0 for calls that used tokens. An earlier version took a failed attempt at no cost for
/// the receipt of such a call; the step removes these receipts.
const MIGRATION_4: &str = "
ALTER TABLE billing_receipt ADD COLUMN is_unpriced INTEGER NOT NULL DEFAULT 0;
CREATE TEMP TABLE failed AS
    SELECT r.call_id FROM billing_receipt r JOIN billing_fact f USING (call_id) JOIN billing_notice n USING (call_id)
    WHERE r.amount = 0 AND f.is_billable AND n.is_failure AND n.amount = 0 AND f.upstream = 'litellm';
DELETE FROM billing_receipt WHERE call_id IN (SELECT call_id FROM failed);
UPDATE billing_fact SET has_receipt = 0, ask_after = 0 WHERE call_id IN (SELECT call_id FROM failed);
DROP TABLE failed;
UPDATE billing_receipt SET is_unpriced = 1 WHERE amount = 0
    AND (input + output > 0 OR (SELECT is_billable FROM billing_fact f WHERE f.call_id = billing_receipt.call_id));
DROP INDEX billing_receipt_unpriced;
CREATE INDEX billing_receipt_unpriced ON billing_receipt (run) WHERE is_unpriced";

/// Adds the sums of deleted calls by account and by the day on which the calls began (since 1970, UTC), and the indexes
/// that find old calls.
const MIGRATION_5: &str = "
CREATE TABLE billing_day (
    day INTEGER NOT NULL,
    account TEXT NOT NULL,
    calls INTEGER NOT NULL,
    billable INTEGER NOT NULL,
    receipts INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    unreceipted INTEGER NOT NULL,
    unpriced INTEGER NOT NULL,
    conflicting INTEGER NOT NULL,
    PRIMARY KEY (day, account)
) STRICT, WITHOUT ROWID;
DROP INDEX billing_fact_started;
CREATE INDEX billing_fact_started ON billing_fact (started, run);
CREATE INDEX billing_conflict_received ON billing_conflict (received)";
