//! The billing store: calls, notices and receipts in the service's database.
//!
//! Calls and notices arrive in any order, more than once, and from several tasks and processes. Each is written in one
//! transaction, together with its consequence: the receipt, if the other half is already there.

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

/// The billing store of one deployment. Clones share the same database.
#[derive(Clone, Debug)]
pub struct BillingStore {
    database: SqliteDatabase,
    bound: Duration,
    /// The permits for bodies that are read at the same time, each in its own thread.
    readers: Arc<Semaphore>,
}

/// The outcome of ingesting a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IngestOutcome {
    New,
    Known,
    /// The call is not in the billing store; the notice waits for it.
    WaitsForCall,
    /// The call is not in the billing store, and the maximum number of notices waits already. The notice is not stored;
    /// reconciliation finds its call.
    TooManyWaiting,
    Conflicting,
    /// A failed attempt at no cost, or a notice without a price, of a call that used tokens. The notice is stored, and
    /// the call still has no receipt.
    Unpaid,
    /// The notice is for another deployment's billing store and is not stored.
    OtherDeployment,
}

/// The sums over all runs, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct BillingTotals {
    pub calls: u64,
    pub receipts: u64,
    /// Billable calls without a receipt, within the time for a receipt.
    pub pending_calls: u64,
    /// Billable calls without a receipt, beyond the time for a receipt.
    pub unreceipted_calls: u64,
    pub unreceipted_runs: u64,
    pub unpriced_calls: u64,
    pub conflicting_calls: u64,
    /// Notices of calls that are not in the billing store.
    pub waiting_notices: u64,
    /// Calls of which only the day's sums are left.
    pub deleted_calls: u64,
}

/// A billable call that has no receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreceiptedCall {
    pub call_id: String,
    pub started: SystemTime,
    pub settled: SystemTime,
}

/// A filter for calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFilter {
    /// The beginning of the time: only calls that began at or after it.
    pub since: SystemTime,
    /// The end of the time: only calls that began before it.
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

    /// Sets the time within which a call must have its receipt.
    #[must_use]
    pub fn with_bound(self, bound: Duration) -> Self {
        Self { bound, ..self }
    }

    /// Returns the time after its end for which a call may lack a receipt.
    pub fn receipt_bound(&self) -> Duration {
        self.bound
    }

    /// Records the usage of calls, and returns the number of new calls. If a call was recorded as lost and has ended
    /// after all, its record is corrected.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn record_calls(&self, facts: &[CallUsage]) -> Result<u64, BillingError> {
        // Free calls may come in any number, so they are never recorded.
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

    /// Ingests notices in one transaction, and returns the outcome of each.
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

    /// Returns the deployment's id, which was generated with the billing store and which the gateway sends to LiteLLM.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn deployment_id(&self) -> Result<String, BillingError> {
        Ok(self
            .database
            .read_committed(|view| view.query_row(writes::DEPLOYMENT_QUERY, [], |row| row.get(0)))
            .await?)
    }

    /// Deletes notices whose calls have not arrived within two days, and the conflicts of such notices. Returns the
    /// number of notices. If a call arrives later, reconciliation finds its notice again.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn purge_waiting(&self, now: SystemTime) -> Result<u64, BillingError> {
        let before = to_millis(now.checked_sub(MAX_NOTICE_WAIT).unwrap_or(SystemTime::UNIX_EPOCH));
        // In chunks, so that the calls of running gateways are recorded between two chunks.
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

    /// Returns a run's receipts, in the order of its calls.
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

    /// Returns a run's calls as our own audit log has them.
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

    /// Returns the calls that match a filter, in order.
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

    /// Returns the call ids that are in the billing store.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn known_call_ids(&self, ids: Vec<String>) -> Result<HashSet<String>, BillingError> {
        let find = "SELECT 1 FROM billing_fact WHERE call_id = ?1";
        Ok(self.database.read_committed(move |view| existing_names(view, find, ids)).await?)
    }

    /// Returns the runs that have calls in the billing store.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn known_runs(&self, names: Vec<String>) -> Result<HashSet<String>, BillingError> {
        let find = "SELECT 1 FROM billing_fact WHERE run = ?1";
        Ok(self.database.read_committed(move |view| existing_names(view, find, names)).await?)
    }

    /// Returns a run's bill as of now.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn run_bill(&self, run: &str) -> Result<RunBill, BillingError> {
        self.run_bill_at(run, SystemTime::now()).await
    }

    /// Returns a run's bill as of a given time.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn run_bill_at(&self, run: &str, now: SystemTime) -> Result<RunBill, BillingError> {
        let (run, due) = (run.to_owned(), self.receipt_deadline(now));
        Ok(self.database.read_committed(move |view| query_bill(view, &run, due)).await?)
    }

    /// Returns the bills of the flagged runs, by name.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn flagged_runs(&self, now: SystemTime) -> Result<Vec<RunBill>, BillingError> {
        self.flagged_runs_after(now, None, u32::MAX).await
    }

    /// Returns at most `most` bills of the flagged runs after a given run, by name.
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

    /// Returns the billable calls without a receipt that ended from `since` on and whose next query is due: the oldest
    /// calls, in order.
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

    /// Reschedules calls that were queried. A call that still has no receipt is queried again when the call is twice as
    /// old.
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

    /// Returns the sums over all runs.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read or written.
    pub async fn totals(&self, now: SystemTime) -> Result<BillingTotals, BillingError> {
        let due = self.receipt_deadline(now);
        Ok(self.database.read_committed(move |view| query_totals(view, due)).await?)
    }

    /// Returns the time before which an ended call should have its receipt.
    fn receipt_deadline(&self, now: SystemTime) -> i64 {
        to_millis(now.checked_sub(self.bound).unwrap_or(SystemTime::UNIX_EPOCH))
    }
}

/// Returns the transaction that ingests notices.
fn ingest_in_transaction(
    notices: Vec<ChargeNotice>,
) -> impl FnOnce(&rusqlite::Transaction<'_>) -> rusqlite::Result<Vec<IngestOutcome>> {
    let now = SystemTime::now();
    move |change| {
        // The free capacity is counted once per transaction and decreases with each notice that waits.
        let mut room = writes::waiting_capacity(change)?;
        notices.iter().map(|notice| writes::ingest_notice(change, notice, &mut room, now)).collect()
    }
}

/// Returns the names for which the query `find` returns a row.
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
            // `overdue` is a part of `missing`.
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

/// The time for which a notice waits for its call. Our choice: a run's calls are recorded while the run goes on, and
/// reconciliation finds later calls.
const MAX_NOTICE_WAIT: Duration = Duration::from_hours(48);

/// The maximum number of notices that one transaction deletes. Our choice: other writers wait only a moment.
const MAX_PURGED_NOTICES: u32 = 10_000;

/// The maximum number of calls that one reconciliation queries. Our choice; the next reconciliation queries the
/// remaining calls.
const MAX_QUERIED_CALLS: u32 = 10_000;

/// The default time within which a call must have its receipt. LiteLLM calls back once, within seconds, and writes its
/// rows within a minute; the reconciliation within this time finds the receipts that the callback lost.
pub(super) const DEFAULT_RECEIPT_BOUND: Duration = Duration::from_mins(15);

/// The file name of the service's database in its state directory, which the billing store shares with the other
/// modules.
pub const DATABASE_FILE: &str = "state.db";
