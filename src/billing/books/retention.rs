//! The end of old calls: how they are found and deleted, and what is left of them.
//!
//! Calls are deleted run by run, so that a run's bill is whole or gone. What they came to stays in a row for each day and
//! account, which is written in the transaction that deletes them.
//!
//! **Invariant:** no transaction deletes more than [`CHUNK`] calls.

use std::ops::AddAssign;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension, Params, Transaction, params};
use serde::{Serialize, Serializer};

use super::row::{Row, count, dollars, from_millis, millis};
use super::{Books, Error};
use crate::budget::{Nanodollars, Tokens};

/// Runs that may be old enough, and where the next of them are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldRuns {
    pub runs: Vec<String>,
    pub next: Option<Cursor>,
}

/// A place in the order of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    started: i64,
    run: String,
}

/// The number of calls that were deleted, and of those among them that somebody should have looked at.
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
    #[serde(serialize_with = "date")]
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
    /// Of the calls, those of which nothing else is left.
    pub deleted_calls: u64,
}

impl Books {
    /// Finds runs with calls that began before a time, in the order of their calls, after a place in it. A run may be found
    /// more than once.
    ///
    /// # Errors
    /// As every call.
    pub async fn old_runs(
        &self,
        before: SystemTime,
        after: Option<Cursor>,
    ) -> Result<OldRuns, Error> {
        let before = millis(before);
        Ok(self.database.read(move |view| old_runs(view, before, after)).await?)
    }

    /// Deletes all calls of a run, with their receipts, notices and conflicts, if the last of them was settled before a
    /// time.
    ///
    /// # Errors
    /// As every call. What is deleted by then stays so.
    pub async fn delete_run(&self, run: &str, before: SystemTime) -> Result<DeletedCalls, Error> {
        let (run, before) = (run.to_owned(), millis(before));
        let last = "SELECT max(settled) FROM billing_fact WHERE run = ?1";
        let of = run.clone();
        let read =
            move |view: &Connection| view.query_row(last, [of], |row| row.get::<_, Option<i64>>(0));
        let mut deleted = DeletedCalls::default();
        if self.database.read(read).await?.is_none_or(|last| last >= before) {
            return Ok(deleted);
        }
        loop {
            let of = run.clone();
            let some = self.database.write(move |change| delete_some(change, &of)).await?;
            deleted += some;
            if some.calls < u64::from(CHUNK) {
                return Ok(deleted);
            }
        }
    }

    /// Deletes contradictions of calls that are not in the books, if they were received before a time, in milliseconds
    /// since 1970.
    pub(super) async fn delete_stray_conflicts(&self, before: i64) -> Result<(), Error> {
        loop {
            let work = move |change: &Transaction<'_>| {
                change.prepare_cached(DELETE_STRAY)?.execute(params![before, CHUNK])
            };
            if self.database.write(work).await? < CHUNK as usize {
                return Ok(());
            }
        }
    }

    /// Gives the room of what was deleted back to the disk.
    ///
    /// # Errors
    /// As every call.
    pub async fn shrink(&self) -> Result<(), Error> {
        Ok(self.database.shrink().await?)
    }

    /// Sums calls by day and account, in this order, from one day to another; deleted calls are included.
    ///
    /// # Errors
    /// As every call.
    pub async fn days(
        &self,
        since: SystemTime,
        until: SystemTime,
        account: Option<String>,
    ) -> Result<Vec<DayBill>, Error> {
        let find = format!(
            "SELECT {SUMS} FROM ({CALLS} UNION ALL {DELETED})
             WHERE day BETWEEN ?1 AND ?2 AND (?3 IS NULL OR account = ?3)
             GROUP BY day, account ORDER BY day, account"
        );
        let read = move |view: &Connection| {
            DayBill::all(view, &find, params![day(since), day(until), account])
        };
        Ok(self.database.read(read).await?)
    }

    /// The end of the last day of which calls are deleted: before it the books may lack calls.
    ///
    /// # Errors
    /// As every call.
    pub async fn complete_since(&self) -> Result<Option<SystemTime>, Error> {
        let last = "SELECT max(day) FROM billing_day";
        let read = |view: &Connection| view.query_row(last, [], |row| row.get::<_, Option<i64>>(0));
        let last = self.database.read(read).await?;
        Ok(last.map(|day| from_millis((day + 1).saturating_mul(DAY_MILLIS))))
    }
}

fn old_runs(view: &Connection, before: i64, after: Option<Cursor>) -> rusqlite::Result<OldRuns> {
    let Cursor { started, run } = after.unwrap_or(Cursor { started: i64::MIN, run: String::new() });
    let mut found = view.prepare_cached(OLD)?;
    let found = found.query_map(params![before, started, run, PAGE], |row| {
        Ok(Cursor { started: row.get(0)?, run: row.get(1)? })
    })?;
    let found: Vec<Cursor> = found.collect::<Result<_, _>>()?;
    let next = found.last().filter(|_| found.len() >= PAGE as usize).cloned();
    let mut runs: Vec<_> = found.into_iter().map(|call| call.run).collect();
    runs.sort_unstable();
    runs.dedup();
    Ok(OldRuns { runs, next })
}

/// Deletes the run's first calls, [`CHUNK`] of them at most, and adds them to the sums of their days.
fn delete_some(change: &Transaction<'_>, run: &str) -> rusqlite::Result<DeletedCalls> {
    let last = change
        .prepare_cached(LAST_OF_CHUNK)?
        .query_row(params![run, CHUNK - 1], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    // Fewer are left: all of them.
    let (started, call_id) = last.unwrap_or((i64::MAX, String::new()));
    let chunk = params![run, started, call_id];
    let deleted = add_to_days(change, chunk)?;
    for table in ["billing_receipt", "billing_notice", "billing_conflict"] {
        let delete =
            format!("DELETE FROM {table} WHERE call_id IN (SELECT call_id FROM {OF_CHUNK})");
        change.prepare_cached(&delete)?.execute(chunk)?;
    }
    change.prepare_cached(&format!("DELETE FROM {OF_CHUNK}"))?.execute(chunk)?;
    Ok(deleted)
}

fn add_to_days(
    change: &Transaction<'_>,
    chunk: impl Params + Copy,
) -> rusqlite::Result<DeletedCalls> {
    let select = format!("{CALLS} WHERE call_id IN (SELECT call_id FROM {OF_CHUNK})");
    let sums = format!("SELECT {SUMS} FROM ({select}) GROUP BY day, account");
    let mut deleted = DeletedCalls::default();
    let mut add = change.prepare_cached(ADD)?;
    for sum in DayBill::all(change, &sums, chunk)? {
        deleted += DeletedCalls {
            calls: sum.calls,
            unreceipted: sum.unreceipted,
            unpriced: sum.unpriced,
            conflicting: sum.conflicting,
        };
        add.execute(params![
            day(sum.day),
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
    /// Whether somebody should have looked at some of them.
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

impl Row for DayBill {
    fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        let number = |name: &str| row.get::<_, i64>(name).map(i64::cast_unsigned);
        Ok(Self {
            day: from_millis(row.get::<_, i64>("day")?.saturating_mul(DAY_MILLIS)),
            account: row.get("account")?,
            calls: number("calls")?,
            billable: number("billable")?,
            receipts: number("receipts")?,
            amount: dollars(row, "amount")?,
            input: count(row, "input")?,
            output: count(row, "output")?,
            unreceipted: number("unreceipted")?,
            unpriced: number("unpriced")?,
            conflicting: number("conflicting")?,
            deleted_calls: number("deleted")?,
        })
    }
}

fn day(time: SystemTime) -> i64 {
    millis(time) / DAY_MILLIS
}

fn date<S: Serializer>(day: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let text = humantime::format_rfc3339_seconds(*day).to_string();
    serializer.serialize_str(text.split('T').next().unwrap_or_default())
}

/// The shortest time for which calls can be kept: the service asks for receipts for two days, and a day of margin on each
/// side keeps what is compared with LiteLLM apart from what is deleted.
pub const MIN_RETENTION: Duration = Duration::from_hours(4 * 24);

/// Calls that are deleted in one transaction: some milliseconds of the writer's time.
const CHUNK: u32 = 500;

/// Calls that are looked at in one read.
const PAGE: u32 = 10_000;

const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

const OLD: &str =
    "SELECT started, run FROM billing_fact WHERE started < ?1 AND (started, run) > (?2, ?3)
    ORDER BY started, run LIMIT ?4";

const LAST_OF_CHUNK: &str = "SELECT started, call_id FROM billing_fact WHERE run = ?1 ORDER BY started, call_id LIMIT 1 OFFSET ?2";

/// The calls of a chunk, by the run and its last call.
const OF_CHUNK: &str = "billing_fact WHERE run = ?1 AND (started, call_id) <= (?2, ?3)";

/// A row for each call, as far as the sums need it.
const CALLS: &str = "
    SELECT started / 86400000 AS day, account, 1 AS calls, is_billable AS billable,
           r.call_id IS NOT NULL AS receipts, coalesce(r.amount, 0) AS amount, f.input, f.output,
           is_billable AND NOT has_receipt AS unreceipted, coalesce(r.is_unpriced, 0) AS unpriced,
           EXISTS (SELECT 1 FROM billing_conflict c WHERE c.call_id = f.call_id) AS conflicting, 0 AS deleted
    FROM billing_fact f LEFT JOIN billing_receipt r USING (call_id)";

/// The same, for each day and account of which calls are deleted.
const DELETED: &str = "
    SELECT day, account, calls, billable, receipts, amount, input, output, unreceipted, unpriced, conflicting,
           calls AS deleted
    FROM billing_day";

const SUMS: &str = "day, account, sum(calls) AS calls, sum(billable) AS billable, sum(receipts) AS receipts,
    sum(amount) AS amount, sum(input) AS input, sum(output) AS output, sum(unreceipted) AS unreceipted,
    sum(unpriced) AS unpriced, sum(conflicting) AS conflicting, sum(deleted) AS deleted";

const ADD: &str = "
INSERT INTO billing_day VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, billable = billable + excluded.billable,
    receipts = receipts + excluded.receipts, amount = amount + excluded.amount, input = input + excluded.input,
    output = output + excluded.output, unreceipted = unreceipted + excluded.unreceipted,
    unpriced = unpriced + excluded.unpriced, conflicting = conflicting + excluded.conflicting";

const DELETE_STRAY: &str = "
DELETE FROM billing_conflict WHERE rowid IN (
    SELECT rowid FROM billing_conflict c WHERE received < ?1
        AND NOT EXISTS (SELECT 1 FROM billing_fact f WHERE f.call_id = c.call_id) LIMIT ?2)";
