-- A file as the first version of the service has left it, when it was killed: one run that had ended, one that was under
-- way, and one that waited. What stands here never changes.
CREATE TABLE schema (room TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
INSERT INTO schema VALUES ('grant', 1), ('journal', 1), ('billing', 1);
CREATE TABLE grants (
    id TEXT PRIMARY KEY,
    hash TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    terms TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER,
    revoked INTEGER,
    used INTEGER
) STRICT;
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
CREATE INDEX billing_conflict_run ON billing_conflict (run);
INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created, started, ended, error_code, result,
                 stdout, stderr)
VALUES ('run-old', 'g-1', 'd', 'sandbox:agent', 'acct-7', 'fake', '{}', 'ended', 1, 2, 4102444800000, 'timeout',
        '{"ok":false,"error_code":"timeout"}', '{"answer":42}' || char(10), 'thinking' || char(10));
INSERT INTO event (run, seq, at, kind, data)
VALUES ('run-old', 1, 2, 'run_started', '{"run":"run-old"}'),
       ('run-old', 2, 3, 'assistant_final', '{"text":"42"}'),
       ('run-old', 3, 3, 'final', '{"ok":false,"error_code":"timeout"}');
INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created, started)
VALUES ('run-left', 'g-1', 'd', 'sandbox:agent', 'acct-7', 'fake',
        '{"grant":"g-1","agent":"sandbox:agent","model":"fake","messages":[],"account":"acct-7","state_key":null,"max_runtime":null}',
        'running', 1, 2);
INSERT INTO event (run, seq, at, kind, data) VALUES ('run-left', 1, 2, 'run_started', '{}');
INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created)
VALUES ('run-waiting', 'g-1', 'd', 'sandbox:agent', 'acct-7', 'fake',
        '{"grant":"g-1","agent":"sandbox:agent","model":"fake","messages":[{"role":"user","content":"hello"}],"account":"acct-7","state_key":null,"max_runtime":null}',
        'queued', 3);
