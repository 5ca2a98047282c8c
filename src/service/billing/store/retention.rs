//! Finds and deletes old calls, and keeps their sums.
//!
//! Calls are deleted run by run, so that a run's bill is either whole or gone. The transaction that deletes calls adds
//! them to the sums of their day and account.
//!
//! **Invariant:** no transaction deletes more than [`MAX_DELETED_PER_TX`] calls.

use std::ops::AddAssign;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension, Params, Transaction, params};
use serde::{Serialize, Serializer};

use super::columns::{FromRow, from_millis, money_column, to_millis, token_column};
use super::{BillingError, BillingStore};
use crate::base::timestamp;
use crate::llm::budget::{Nanodollars, Tokens};

/// A page of runs that may be old enough, and the cursor of the next page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldRuns {
    pub runs: Vec<String>,
    pub next: Option<CallCursor>,
}

/// A position in the order of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCursor {
    started: i64,
    run: String,
}

/// The number of deleted calls, and the number of flagged calls among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedCalls {
    pub calls: u64,
    /// Billable calls without a receipt.
    pub unreceipted: u64,
    pub unpriced: u64,
    pub conflicting: u64,
}

/// The sums over an account's calls that began on one day, deleted calls included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DayBill {
    /// Midnight, UTC.
    #[serde(serialize_with = "serialize_date")]
    pub day: SystemTime,
    pub account: String,
    pub calls: u64,
    pub billable: u64,
    pub receipts: u64,
    /// The sum of the receipts.
    #[serde(rename = "amount_usd")]
    pub amount: Nanodollars,
    /// Tokens as our own records have them.
    pub input: Tokens,
    pub output: Tokens,
    /// Billable calls without a receipt.
    pub unreceipted: u64,
    pub unpriced: u64,
    /// Calls with a contradiction.
    pub conflicting: u64,
    /// The number of deleted calls, of which only these sums are left.
    pub deleted_calls: u64,
}

impl BillingStore {
    /// Finds a page of runs with calls that began before a time, in the order of their calls, after a cursor. A run may
    /// be found more than once.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn old_runs(
        &self,
        before: SystemTime,
        after: Option<CallCursor>,
    ) -> Result<OldRuns, BillingError> {
        let before = to_millis(before);
        Ok(self.database.read_committed(move |view| query_old_runs(view, before, after)).await?)
    }

    /// Deletes all calls of a run, with their receipts, notices and conflicts, if the last of them was settled before a
    /// time.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written. The chunks that were deleted before the error stay
    /// deleted.
    pub async fn delete_run(
        &self,
        run: &str,
        before: SystemTime,
    ) -> Result<DeletedCalls, BillingError> {
        let (run, before) = (run.to_owned(), to_millis(before));
        let last = "SELECT max(settled) FROM billing_fact WHERE run = ?1";
        let of = run.clone();
        let read =
            move |view: &Connection| view.query_row(last, [of], |row| row.get::<_, Option<i64>>(0));
        let mut deleted = DeletedCalls::default();
        // The last call decides, so that a bill is deleted as a whole. Forgotten runs get no further calls, so a check
        // before the transaction is enough.
        if self.database.read_committed(read).await?.is_none_or(|last| last >= before) {
            return Ok(deleted);
        }
        loop {
            let of = run.clone();
            let some =
                self.database.write_in_transaction(move |change| delete_chunk(change, &of)).await?;
            deleted += some;
            // A chunk that is not full was the last one.
            if some.calls < u64::from(MAX_DELETED_PER_TX) {
                return Ok(deleted);
            }
        }
    }

    /// Deletes the conflicts of calls that are not in the billing store and that were received before a time, in
    /// milliseconds since 1970.
    pub(super) async fn delete_stray_conflicts(&self, before: i64) -> Result<(), BillingError> {
        loop {
            let work = move |change: &Transaction<'_>| {
                change
                    .prepare_cached(DELETE_STRAY_STATEMENT)?
                    .execute(params![before, MAX_DELETED_PER_TX])
            };
            if self.database.write_in_transaction(work).await? < MAX_DELETED_PER_TX as usize {
                return Ok(());
            }
        }
    }

    /// Returns the space of deleted rows to the disk.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn shrink(&self) -> Result<(), BillingError> {
        Ok(self.database.release_free_pages().await?)
    }

    /// Sums calls by day and account, in this order, from one day to another; deleted calls are included.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn daily_bills(
        &self,
        since: SystemTime,
        until: SystemTime,
        account: Option<String>,
    ) -> Result<Vec<DayBill>, BillingError> {
        let find = format!(
            "SELECT {SUM_COLUMNS} FROM ({CALL_ROWS_QUERY} UNION ALL {DELETED_DAYS_QUERY})
             WHERE day BETWEEN ?1 AND ?2 AND (?3 IS NULL OR account = ?3)
             GROUP BY day, account ORDER BY day, account"
        );
        let read = move |view: &Connection| {
            DayBill::query_all(view, &find, params![day_number(since), day_number(until), account])
        };
        Ok(self.database.read_committed(read).await?)
    }

    /// Returns the end of the last day from which calls are deleted. Before that time the billing store may lack calls.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn complete_since(&self) -> Result<Option<SystemTime>, BillingError> {
        let last = "SELECT max(day) FROM billing_day";
        let read = |view: &Connection| view.query_row(last, [], |row| row.get::<_, Option<i64>>(0));
        let last = self.database.read_committed(read).await?;
        Ok(last.map(|day| from_millis((day + 1).saturating_mul(DAY_MILLIS))))
    }
}

fn query_old_runs(
    view: &Connection,
    before: i64,
    after: Option<CallCursor>,
) -> rusqlite::Result<OldRuns> {
    let CallCursor { started, run } =
        after.unwrap_or(CallCursor { started: i64::MIN, run: String::new() });
    let mut found = view.prepare_cached(OLD_RUNS_QUERY)?;
    let found = found.query_map(params![before, started, run, PAGE_SIZE], |row| {
        Ok(CallCursor { started: row.get(0)?, run: row.get(1)? })
    })?;
    let found: Vec<CallCursor> = found.collect::<Result<_, _>>()?;
    // A page that is not full is the last one.
    let next = found.last().filter(|_| found.len() >= PAGE_SIZE as usize).cloned();
    let mut runs: Vec<_> = found.into_iter().map(|call| call.run).collect();
    runs.sort_unstable();
    runs.dedup();
    Ok(OldRuns { runs, next })
}

/// Deletes the run's first calls, at most [`MAX_DELETED_PER_TX`], and adds them to the sums of their days.
fn delete_chunk(change: &Transaction<'_>, run: &str) -> rusqlite::Result<DeletedCalls> {
    let last = change
        .prepare_cached(CHUNK_END_QUERY)?
        .query_row(params![run, MAX_DELETED_PER_TX - 1], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    // Fewer calls are left than a chunk has, so the chunk ends after the last call.
    let (started, call_id) = last.unwrap_or((i64::MAX, String::new()));
    let chunk = params![run, started, call_id];
    // The sums are read from the rows that the following statements delete, so the order matters. The calls themselves
    // go last, because receipts refer to them and the chunk's condition reads them.
    let deleted = add_to_days(change, chunk)?;
    for table in ["billing_receipt", "billing_notice", "billing_conflict"] {
        let delete =
            format!("DELETE FROM {table} WHERE call_id IN (SELECT call_id FROM {CHUNK_CONDITION})");
        change.prepare_cached(&delete)?.execute(chunk)?;
    }
    change.prepare_cached(&format!("DELETE FROM {CHUNK_CONDITION}"))?.execute(chunk)?;
    Ok(deleted)
}

fn add_to_days(
    change: &Transaction<'_>,
    chunk: impl Params + Copy,
) -> rusqlite::Result<DeletedCalls> {
    let select =
        format!("{CALL_ROWS_QUERY} WHERE call_id IN (SELECT call_id FROM {CHUNK_CONDITION})");
    let sums = format!("SELECT {SUM_COLUMNS} FROM ({select}) GROUP BY day, account");
    let mut deleted = DeletedCalls::default();
    let mut add = change.prepare_cached(ADD_DAY_STATEMENT)?;
    for sum in DayBill::query_all(change, &sums, chunk)? {
        deleted += DeletedCalls {
            calls: sum.calls,
            unreceipted: sum.unreceipted,
            unpriced: sum.unpriced,
            conflicting: sum.conflicting,
        };
        add.execute(params![
            day_number(sum.day),
            sum.account,
            sum.calls.cast_signed(),
            sum.billable.cast_signed(),
            sum.receipts.cast_signed(),
            sum.amount.0.cast_signed(),
            sum.input.0.cast_signed(),
            sum.output.0.cast_signed(),
            sum.unreceipted.cast_signed(),
            sum.unpriced.cast_signed(),
            sum.conflicting.cast_signed(),
        ])?;
    }
    Ok(deleted)
}

impl DeletedCalls {
    /// Returns true if some of the deleted calls were flagged.
    pub fn has_flagged(&self) -> bool {
        self.unreceipted + self.unpriced + self.conflicting > 0
    }
}

impl AddAssign for DeletedCalls {
    fn add_assign(&mut self, more: Self) {
        self.calls += more.calls;
        self.unreceipted += more.unreceipted;
        self.unpriced += more.unpriced;
        self.conflicting += more.conflicting;
    }
}

impl FromRow for DayBill {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        let number = |name: &str| row.get::<_, i64>(name).map(i64::cast_unsigned);
        Ok(Self {
            day: from_millis(row.get::<_, i64>("day")?.saturating_mul(DAY_MILLIS)),
            account: row.get("account")?,
            calls: number("calls")?,
            billable: number("billable")?,
            receipts: number("receipts")?,
            amount: money_column(row, "amount")?,
            input: token_column(row, "input")?,
            output: token_column(row, "output")?,
            unreceipted: number("unreceipted")?,
            unpriced: number("unpriced")?,
            conflicting: number("conflicting")?,
            deleted_calls: number("deleted")?,
        })
    }
}

fn day_number(time: SystemTime) -> i64 {
    to_millis(time) / DAY_MILLIS
}

fn serialize_date<S: Serializer>(day: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let text = timestamp::format_rfc3339_seconds(*day).to_string();
    serializer.serialize_str(text.split('T').next().unwrap_or_default())
}

/// The shortest time for which calls can be stored. The service queries receipts for two days; a day of margin on each
/// side separates the calls that are compared with LiteLLM from the calls that are deleted.
pub const MIN_RETENTION: Duration = Duration::from_hours(4 * 24);

/// The maximum number of calls that one transaction deletes. Our choice: some milliseconds of the writer's time.
const MAX_DELETED_PER_TX: u32 = 500;

/// The number of calls in one page of old runs. Our choice.
const PAGE_SIZE: u32 = 10_000;

const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

const OLD_RUNS_QUERY: &str =
    "SELECT started, run FROM billing_fact WHERE started < ?1 AND (started, run) > (?2, ?3)
    ORDER BY started, run LIMIT ?4";

const CHUNK_END_QUERY: &str = "SELECT started, call_id FROM billing_fact WHERE run = ?1 ORDER BY started, call_id LIMIT 1 OFFSET ?2";

/// The condition for the calls of a chunk, by the run and the chunk's last call.
const CHUNK_CONDITION: &str = "billing_fact WHERE run = ?1 AND (started, call_id) <= (?2, ?3)";

/// A query for a row per call, with the columns of the sums.
const CALL_ROWS_QUERY: &str = "
    SELECT started / 86400000 AS day, account, 1 AS calls, is_billable AS billable,
           r.call_id IS NOT NULL AS receipts, coalesce(r.amount, 0) AS amount, f.input, f.output,
           is_billable AND NOT has_receipt AS unreceipted, coalesce(r.is_unpriced, 0) AS unpriced,
           EXISTS (SELECT 1 FROM billing_conflict c WHERE c.call_id = f.call_id) AS conflicting, 0 AS deleted
    FROM billing_fact f LEFT JOIN billing_receipt r USING (call_id)";

/// A query for a row per day and account of deleted calls, with the columns of the sums.
const DELETED_DAYS_QUERY: &str = "
    SELECT day, account, calls, billable, receipts, amount, input, output, unreceipted, unpriced, conflicting,
           calls AS deleted
    FROM billing_day";

const SUM_COLUMNS: &str = "day, account, sum(calls) AS calls, sum(billable) AS billable, sum(receipts) AS receipts,
    sum(amount) AS amount, sum(input) AS input, sum(output) AS output, sum(unreceipted) AS unreceipted,
    sum(unpriced) AS unpriced, sum(conflicting) AS conflicting, sum(deleted) AS deleted";

const ADD_DAY_STATEMENT: &str = "
INSERT INTO billing_day VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, billable = billable + excluded.billable,
    receipts = receipts + excluded.receipts, amount = amount + excluded.amount, input = input + excluded.input,
    output = output + excluded.output, unreceipted = unreceipted + excluded.unreceipted,
    unpriced = unpriced + excluded.unpriced, conflicting = conflicting + excluded.conflicting";

const DELETE_STRAY_STATEMENT: &str = "
DELETE FROM billing_conflict WHERE rowid IN (
    SELECT rowid FROM billing_conflict c WHERE received < ?1
        AND NOT EXISTS (SELECT 1 FROM billing_fact f WHERE f.call_id = c.call_id) LIMIT ?2)";
