//! The books: facts, notices and receipts in the service's database.
//!
//! Facts and notices come in any order, more than once, and from several tasks and processes. Whatever is written is
//! written in one transaction, and what follows from it with it: the receipt, where the other half is already there.

mod columns;
mod ingest_body;
mod retention;
mod schema;
mod writes;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, params};
use tokio::sync::Semaphore;

use self::columns::{FromRow as _, to_millis};
use super::{BillFlag, BillState, BillingError, CallUsage, ChargeNotice, ChargeReceipt, RunBill};
use crate::base::db::SqliteDatabase;
use crate::llm::budget::Nanodollars;

pub use ingest_body::IngestError;
pub use retention::{CallCursor, DayBill, DeletedCalls, MIN_RETENTION, OldRuns};
pub use schema::SCHEMA;

/// Shared by whoever writes or reads them.
#[derive(Clone, Debug)]
pub struct BillingStore {
    database: SqliteDatabase,
    bound: Duration,
    /// Bodies that are read at the same time, each by a thread of its own.
    readers: Arc<Semaphore>,
}

/// What became of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IngestOutcome {
    New,
    Known,
    /// The call is not in the books; the notice waits for it.
    Waits,
    /// The call is not in the books, and so many notices wait that this one is not kept. Reconciliation finds it.
    Crowded,
    Conflicting,
    /// A failed attempt at no cost, or no price, of a call that used tokens. It is kept, and the call still has no receipt.
    Unpaid,
    /// It is for another deployment's books; nothing is kept of it.
    Foreign,
}

/// How many calls, over all runs, somebody has to look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct BillingTotals {
    pub calls: u64,
    pub receipts: u64,
    /// Billable calls without a receipt, the bound not yet over.
    pub pending_calls: u64,
    /// The same, beyond the bound.
    pub unreceipted_calls: u64,
    pub unreceipted_runs: u64,
    pub unpriced_calls: u64,
    pub conflicting_calls: u64,
    /// Notices of calls that are not in the books.
    pub waiting_notices: u64,
    /// Calls of which only the day's sums are left.
    pub deleted_calls: u64,
}

/// A call that used something, and has no receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreceiptedCall {
    pub call_id: String,
    pub started: SystemTime,
    pub settled: SystemTime,
}

/// Which facts are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFilter {
    /// Calls that began from here…
    pub since: SystemTime,
    /// …to before here.
    pub until: SystemTime,
    pub account: Option<String>,
    pub run: Option<String>,
}

impl BillingStore {
    pub fn new(database: SqliteDatabase) -> Self {
        Self {
            database,
            bound: DEFAULT_RECEIPT_BOUND,
            readers: Arc::new(Semaphore::new(ingest_body::MAX_CONCURRENT_READERS)),
        }
    }

    /// With another time within which a call must have its receipt.
    #[must_use]
    pub fn with_bound(self, bound: Duration) -> Self {
        Self { bound, ..self }
    }

    /// How long after its end a call may be without a receipt.
    pub fn receipt_bound(&self) -> Duration {
        self.bound
    }

    /// Writes down what calls used; returns how many of them were not known. A call that was taken for lost and has ended
    /// after all is put right.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn record_calls(&self, facts: &[CallUsage]) -> Result<u64, BillingError> {
        let facts: Vec<_> = facts.iter().filter(|fact| fact.can_cost()).cloned().collect();
        if facts.is_empty() {
            return Ok(0);
        }
        let now = SystemTime::now();
        let work = move |change: &rusqlite::Transaction<'_>| {
            let mut new = 0;
            for fact in &facts {
                new += u64::from(writes::ingest_usage(change, fact, now)?);
            }
            Ok(new)
        };
        Ok(self.database.write_in_transaction(work).await?)
    }

    /// Takes in notices, all or none; returns what became of each.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn ingest_notices(
        &self,
        notices: Vec<ChargeNotice>,
    ) -> Result<Vec<IngestOutcome>, BillingError> {
        if notices.is_empty() {
            return Ok(vec![]);
        }
        Ok(self.database.write_in_transaction(ingest_in_transaction(notices)).await?)
    }

    /// Which deployment's books these are: a name that was made with them, and that their gateway tells LiteLLM.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn deployment_id(&self) -> Result<String, BillingError> {
        Ok(self
            .database
            .read_committed(|view| view.query_row(writes::DEPLOYMENT_QUERY, [], |row| row.get(0)))
            .await?)
    }

    /// Forgets notices whose calls have not come in two days, and what contradicts such notices; returns the number of
    /// notices. Reconciliation finds what belongs to calls that come later still.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn purge_waiting(&self, now: SystemTime) -> Result<u64, BillingError> {
        let before = to_millis(now.checked_sub(MAX_NOTICE_WAIT).unwrap_or(SystemTime::UNIX_EPOCH));
        let forget = "DELETE FROM billing_notice WHERE call_id IN
                      (SELECT call_id FROM billing_notice WHERE NOT is_taken AND received < ?1 LIMIT ?2)";
        let mut forgotten = 0;
        loop {
            let work = move |change: &rusqlite::Transaction<'_>| {
                change.execute(forget, params![before, MAX_PURGED_NOTICES])
            };
            let gone = self.database.write_in_transaction(work).await?;
            forgotten += gone as u64;
            if gone < MAX_PURGED_NOTICES as usize {
                break;
            }
        }
        self.delete_stray_conflicts(before).await?;
        Ok(forgotten)
    }

    /// A run's receipts, in the order of its calls.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn receipts_of_run(&self, run: &str) -> Result<Vec<ChargeReceipt>, BillingError> {
        let run = run.to_owned();
        let find = "SELECT r.*, f.attempt, f.account, f.model FROM billing_receipt r JOIN billing_fact f USING (call_id)
                    WHERE r.run = ?1 ORDER BY f.started, f.call_id";
        Ok(self
            .database
            .read_committed(move |view| ChargeReceipt::query_all(view, find, params![run]))
            .await?)
    }

    /// A run's calls as our own records have them.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn calls_of_run(&self, run: &str) -> Result<Vec<CallUsage>, BillingError> {
        let run = run.to_owned();
        let find = "SELECT * FROM billing_fact WHERE run = ?1 ORDER BY started, call_id";
        Ok(self
            .database
            .read_committed(move |view| CallUsage::query_all(view, find, params![run]))
            .await?)
    }

    /// The calls that a filter lets through, in order.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn find_calls(&self, filter: &CallFilter) -> Result<Vec<CallUsage>, BillingError> {
        let CallFilter { since, until, account, run } = filter.clone();
        let find = "SELECT * FROM billing_fact WHERE started >= ?1 AND started < ?2
                    AND (?3 IS NULL OR account = ?3) AND (?4 IS NULL OR run = ?4) ORDER BY started, call_id";
        let read = move |view: &Connection| {
            CallUsage::query_all(
                view,
                find,
                params![to_millis(since), to_millis(until), account, run],
            )
        };
        Ok(self.database.read_committed(read).await?)
    }

    /// Those of some call ids that are in the books.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn known_call_ids(&self, ids: Vec<String>) -> Result<HashSet<String>, BillingError> {
        let find = "SELECT 1 FROM billing_fact WHERE call_id = ?1";
        Ok(self.database.read_committed(move |view| existing_names(view, find, ids)).await?)
    }

    /// Those of some runs that have calls in the books.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn known_runs(&self, names: Vec<String>) -> Result<HashSet<String>, BillingError> {
        let find = "SELECT 1 FROM billing_fact WHERE run = ?1";
        Ok(self.database.read_committed(move |view| existing_names(view, find, names)).await?)
    }

    /// What a run comes to by now.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn run_bill(&self, run: &str) -> Result<RunBill, BillingError> {
        self.run_bill_at(run, SystemTime::now()).await
    }

    /// What a run comes to, as it is at a given time.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn run_bill_at(&self, run: &str, now: SystemTime) -> Result<RunBill, BillingError> {
        let (run, due) = (run.to_owned(), self.receipt_deadline(now));
        Ok(self.database.read_committed(move |view| query_bill(view, &run, due)).await?)
    }

    /// The runs that somebody has to look at, by name.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn flagged_runs(&self, now: SystemTime) -> Result<Vec<RunBill>, BillingError> {
        self.flagged_runs_after(now, None, u32::MAX).await
    }

    /// The same, so many of them at most, after a run.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn flagged_runs_after(
        &self,
        now: SystemTime,
        run: Option<String>,
        most: u32,
    ) -> Result<Vec<RunBill>, BillingError> {
        let due = self.receipt_deadline(now);
        let find = "SELECT run FROM (
                        SELECT run FROM billing_fact WHERE is_billable AND NOT has_receipt AND settled < ?1
                        UNION SELECT run FROM billing_receipt WHERE is_unpriced
                        UNION SELECT run FROM billing_conflict
                    ) WHERE ?2 IS NULL OR run > ?2 ORDER BY run LIMIT ?3";
        let read = move |view: &Connection| {
            let runs: Vec<String> = view
                .prepare_cached(find)?
                .query_map(params![due, run, most], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            runs.iter().map(|run| query_bill(view, run, due)).collect()
        };
        Ok(self.database.read_committed(read).await?)
    }

    /// Billable calls without a receipt whose turn it is to be asked for, of those that ended from `since` on: the oldest
    /// of them, in order.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn calls_without_receipt(
        &self,
        since: SystemTime,
        now: SystemTime,
    ) -> Result<Vec<UnreceiptedCall>, BillingError> {
        let find = "SELECT call_id, started, settled FROM billing_fact
                    WHERE is_billable AND NOT has_receipt AND settled >= ?1
                    -- A call is put off by its age at most: a time beyond that was written while the clock was ahead.
                    AND (ask_after <= ?2 OR ask_after > ?2 + (?2 - ?1))
                    ORDER BY settled, call_id LIMIT ?3";
        let read = move |view: &Connection| {
            UnreceiptedCall::query_all(
                view,
                find,
                params![to_millis(since), to_millis(now), MAX_QUERIED_CALLS],
            )
        };
        Ok(self.database.read_committed(read).await?)
    }

    /// These were asked for. Those that LiteLLM does not know are asked for again when they are twice as old.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn mark_queried(
        &self,
        calls: &[UnreceiptedCall],
        now: SystemTime,
    ) -> Result<(), BillingError> {
        let calls: Vec<String> = calls.iter().map(|call| call.call_id.clone()).collect();
        let now = to_millis(now);
        let work = move |change: &rusqlite::Transaction<'_>| {
            let mut later = change.prepare_cached(
                "UPDATE billing_fact SET ask_after = ?1 + max(?1 - settled, 0) WHERE call_id = ?2 AND NOT has_receipt",
            )?;
            calls.iter().try_for_each(|call| later.execute(params![now, call]).map(drop))
        };
        Ok(self.database.write_in_transaction(work).await?)
    }

    /// The sums over all runs.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn totals(&self, now: SystemTime) -> Result<BillingTotals, BillingError> {
        let due = self.receipt_deadline(now);
        Ok(self.database.read_committed(move |view| query_totals(view, due)).await?)
    }

    /// What ended before this should have its receipt.
    fn receipt_deadline(&self, now: SystemTime) -> i64 {
        to_millis(now.checked_sub(self.bound).unwrap_or(SystemTime::UNIX_EPOCH))
    }
}

/// Writes notices down, in one transaction.
fn ingest_in_transaction(
    notices: Vec<ChargeNotice>,
) -> impl FnOnce(&rusqlite::Transaction<'_>) -> rusqlite::Result<Vec<IngestOutcome>> {
    let now = SystemTime::now();
    move |change| {
        let mut room = writes::waiting_capacity(change)?;
        notices.iter().map(|notice| writes::ingest_notice(change, notice, &mut room, now)).collect()
    }
}

/// Those of some names for which `find` finds something.
fn existing_names(
    view: &Connection,
    find: &str,
    names: Vec<String>,
) -> rusqlite::Result<HashSet<String>> {
    let mut find = view.prepare_cached(find)?;
    let mut present = HashSet::new();
    for name in names {
        if find.exists([&name])? {
            present.insert(name);
        }
    }
    Ok(present)
}

fn query_bill(view: &Connection, run: &str, due: i64) -> rusqlite::Result<RunBill> {
    let mut find = view.prepare_cached(BILL_QUERY)?;
    find.query_row(params![run, due], |row| {
        let count = |name: &str| row.get::<_, i64>(name).map(i64::cast_unsigned);
        let (missing, overdue) = (count("missing")?, count("overdue")?);
        let (unpriced, conflicting) = (count("unpriced")?, count("conflicting")?);
        let flags = [
            (overdue, BillFlag::Unreceipted),
            (unpriced, BillFlag::Unpriced),
            (conflicting, BillFlag::Conflicting),
        ];
        Ok(RunBill {
            run: run.to_owned(),
            account: row.get("account")?,
            calls: count("calls")?,
            billable: count("billable")?,
            estimated: count("estimated")?,
            receipts: count("receipts")?,
            amount: Nanodollars(count("amount")?),
            missing,
            overdue,
            unpriced,
            conflicting,
            state: match (overdue, missing) {
                (0, 0) => BillState::Complete,
                (0, _) => BillState::Pending,
                _ => BillState::Overdue,
            },
            flags: flags
                .into_iter()
                .filter(|(count, _)| *count > 0)
                .map(|(_, flag)| flag)
                .collect(),
        })
    })
}

fn query_totals(view: &Connection, due: i64) -> rusqlite::Result<BillingTotals> {
    let mut find = view.prepare_cached(TOTALS_QUERY)?;
    find.query_row([due], |row| {
        let count = |name: &str| row.get::<_, i64>(name).map(i64::cast_unsigned);
        Ok(BillingTotals {
            calls: count("calls")?,
            receipts: count("receipts")?,
            pending_calls: count("pending_calls")?,
            unreceipted_calls: count("unreceipted_calls")?,
            unreceipted_runs: count("unreceipted_runs")?,
            unpriced_calls: count("unpriced_calls")?,
            conflicting_calls: count("conflicting_calls")?,
            waiting_notices: count("waiting_notices")?,
            deleted_calls: count("deleted_calls")?,
        })
    })
}

const BILL_QUERY: &str = "
SELECT f.*, r.receipts, r.amount, r.unpriced,
       (SELECT count(*) FROM billing_conflict WHERE run = ?1) AS conflicting
FROM (
    SELECT count(*) AS calls, coalesce(max(account), '') AS account, coalesce(sum(is_billable), 0) AS billable,
           coalesce(sum(is_billable AND source = 'estimated'), 0) AS estimated,
           coalesce(sum(is_billable AND NOT has_receipt), 0) AS missing,
           coalesce(sum(is_billable AND NOT has_receipt AND settled < ?2), 0) AS overdue
    FROM billing_fact WHERE run = ?1
) f, (
    SELECT count(*) AS receipts, coalesce(sum(amount), 0) AS amount,
           coalesce(sum(is_unpriced), 0) AS unpriced
    FROM billing_receipt WHERE run = ?1
) r";

const TOTALS_QUERY: &str = "
SELECT (SELECT count(*) FROM billing_fact) AS calls,
       (SELECT count(*) FROM billing_receipt) AS receipts,
       (SELECT count(*) FROM billing_fact WHERE is_billable AND NOT has_receipt AND settled >= ?1) AS pending_calls,
       (SELECT count(*) FROM billing_fact WHERE is_billable AND NOT has_receipt AND settled < ?1) AS unreceipted_calls,
       (SELECT count(DISTINCT run) FROM billing_fact
        WHERE is_billable AND NOT has_receipt AND settled < ?1) AS unreceipted_runs,
       (SELECT count(*) FROM billing_receipt WHERE is_unpriced) AS unpriced_calls,
       (SELECT count(DISTINCT call_id) FROM billing_conflict) AS conflicting_calls,
       (SELECT count(*) FROM billing_notice WHERE NOT is_taken) AS waiting_notices,
       (SELECT coalesce(sum(calls), 0) FROM billing_day) AS deleted_calls";

/// How long a notice waits for its call. A run's calls are booked while it goes on; what comes later is reconciled.
const MAX_NOTICE_WAIT: Duration = Duration::from_hours(48);

/// Notices that are forgotten at once, so that nobody waits long for the disk.
const MAX_PURGED_NOTICES: u32 = 10_000;

/// Calls that are asked for at one look; the others are at the next.
const MAX_QUERIED_CALLS: u32 = 10_000;

/// LiteLLM calls back within seconds, once, and writes its rows within a minute; what its callback loses is asked for
/// meanwhile.
pub(super) const DEFAULT_RECEIPT_BOUND: Duration = Duration::from_mins(15);

/// The service's database in its state directory; the books share it with the other rooms.
pub const DATABASE_FILE: &str = "state.db";
