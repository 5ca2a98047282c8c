//! Writes one call or one notice, and the receipt that follows from both.

use std::time::SystemTime;

use rusqlite::{OptionalExtension, Transaction, named_params, params};

use super::IngestOutcome;
use super::columns::{
    FromRow as _, enum_column, money_column, to_db_amount, to_db_tokens, to_millis, token_column,
};
use crate::llm::budget::Nanodollars;
use crate::service::billing::{CallUsage, ChargeNotice, ChargeSource};

/// Records a call and its receipt, if the notice is already there. Returns true if the call is new.
pub(super) fn ingest_usage(
    change: &Transaction<'_>,
    fact: &CallUsage,
    now: SystemTime,
) -> rusqlite::Result<bool> {
    let known = "SELECT outcome FROM billing_fact WHERE call_id = ?1";
    let known: Option<String> =
        change.prepare_cached(known)?.query_row([&fact.call_id], |row| row.get(0)).optional()?;
    // A call that was recorded as crashed counts with its whole reservation. If its real settlement arrives, the real
    // usage replaces that record; every other repetition changes nothing.
    let was_lost = known.as_deref() == Some("crashed") && fact.outcome.as_str() != "crashed";
    if known.is_some() && !was_lost {
        return Ok(false);
    }
    // The call is written first: a receipt refers to its row.
    upsert_usage(change, fact)?;
    // Our own price table is final, so its receipt needs no notice. A call through LiteLLM takes the notice that may
    // wait for it.
    if !fact.is_billed_by_litellm() {
        upsert_receipt(change, fact, &notice_from_price_table(fact), now)?;
    } else if let Some(notice) = find_notice(change, &fact.call_id)? {
        create_receipt(change, fact, &notice, now)?;
    }
    Ok(known.is_none())
}

/// Returns how many notices may still wait for their calls.
pub(super) fn waiting_capacity(change: &Transaction<'_>) -> rusqlite::Result<u64> {
    let count = "SELECT count(*) FROM billing_notice WHERE NOT is_taken";
    let waiting: i64 = change.prepare_cached(count)?.query_row([], |row| row.get(0))?;
    Ok(MAX_WAITING.saturating_sub(waiting.cast_unsigned()))
}

/// Ingests a notice. `room` is the number of further notices that may wait for their calls.
pub(super) fn ingest_notice(
    change: &Transaction<'_>,
    notice: &ChargeNotice,
    room: &mut u64,
    now: SystemTime,
) -> rusqlite::Result<IngestOutcome> {
    let find = "SELECT * FROM billing_fact WHERE call_id = ?1";
    // 1. Skip the notices of other deployments, unless the call is in this billing store.
    let fact = CallUsage::query_all(change, find, [&notice.call_id])?.pop();
    if fact.is_none() && is_foreign(change, notice)? {
        return Ok(IngestOutcome::OtherDeployment);
    }
    // 2. The first notice of a call is stored. If the call is recorded, the notice makes its receipt; otherwise the
    // notice waits.
    let Some(before) = find_notice(change, &notice.call_id)? else {
        if fact.is_none() {
            if *room == 0 {
                return Ok(IngestOutcome::TooManyWaiting);
            }
            *room -= 1;
        }
        insert_notice(change, notice, now)?;
        return fact.map_or(Ok(IngestOutcome::WaitsForCall), |fact| {
            create_receipt(change, &fact, notice, now)
        });
    };
    // 3. A further notice must name the same run. A different run is a conflict and never moves a charge.
    let run = fact.as_ref().map(|fact| &fact.run).or(before.run.as_ref());
    if before.run != notice.run {
        record_conflict(change, notice, run, Some(&before), now)?;
        return Ok(IngestOutcome::Conflicting);
    }
    // 4. Compare the amounts. Only a final notice after a provisional one of $0 replaces the earlier notice.
    match (before.is_provisional, notice.is_provisional) {
        // LiteLLM retried the call and succeeded, or names now the cost that an earlier notice left open.
        (true, false) if before.amount.is_zero() => {
            insert_notice(change, notice, now)?;
            fact.map_or(Ok(IngestOutcome::WaitsForCall), |fact| {
                create_receipt(change, &fact, notice, now)
            })
        }
        // A late report of a failed attempt says nothing about the final charge.
        (false, true) if notice.amount.is_zero() => Ok(IngestOutcome::Known),
        // One LiteLLM endpoint sends a figure as 4.9999999999999996e-05 and another sends 5e-05, so a billionth of a
        // dollar is no difference.
        _ if before.amount.0.abs_diff(notice.amount.0) <= 1 => Ok(IngestOutcome::Known),
        _ => {
            record_conflict(change, notice, run, Some(&before), now)?;
            Ok(IngestOutcome::Conflicting)
        }
    }
}

/// Returns true if the notice names the billing store of another deployment. The caller checks only unknown calls: a
/// call that is recorded here belongs to this billing store.
fn is_foreign(change: &Transaction<'_>, notice: &ChargeNotice) -> rusqlite::Result<bool> {
    let Some(named) = &notice.deployment else { return Ok(false) };
    let ours: String = change.prepare_cached(DEPLOYMENT_QUERY)?.query_row([], |row| row.get(0))?;
    Ok(ours != *named)
}

/// Creates a receipt from a call and a notice, which must name the same run.
fn create_receipt(
    change: &Transaction<'_>,
    fact: &CallUsage,
    notice: &ChargeNotice,
    now: SystemTime,
) -> rusqlite::Result<IngestOutcome> {
    // A notice that waited may name another run than the call. The notice leaves the table, so that a correct notice
    // can still arrive.
    if notice.run.as_ref().is_some_and(|run| *run != fact.run) {
        change.execute("DELETE FROM billing_notice WHERE call_id = ?1", [&notice.call_id])?;
        record_conflict(change, notice, Some(&fact.run), None, now)?;
        return Ok(IngestOutcome::Conflicting);
    }
    change
        .execute("UPDATE billing_notice SET is_taken = 1 WHERE call_id = ?1", [&notice.call_id])?;
    if !notice.is_charge_for(fact) {
        // An earlier receipt can exist if the call was recorded as lost without tokens and has used some after all.
        remove_receipt(change, fact)?;
        return Ok(IngestOutcome::Unpaid);
    }
    upsert_receipt(change, fact, notice, now)?;
    Ok(IngestOutcome::New)
}

/// Removes the receipt of a call that used tokens after all, while its notice names no cost.
fn remove_receipt(change: &Transaction<'_>, fact: &CallUsage) -> rusqlite::Result<()> {
    let gone = change
        .prepare_cached("DELETE FROM billing_receipt WHERE call_id = ?1")?
        .execute([&fact.call_id])?;
    if gone > 0 {
        change
            .prepare_cached("UPDATE billing_fact SET has_receipt = 0 WHERE call_id = ?1")?
            .execute([&fact.call_id])?;
    }
    Ok(())
}

/// Returns the notice by our own price table, for a call that no LiteLLM charges.
fn notice_from_price_table(fact: &CallUsage) -> ChargeNotice {
    ChargeNotice {
        call_id: fact.call_id.clone(),
        source: ChargeSource::PriceTable,
        run: Some(fact.run.clone()),
        deployment: None,
        account: Some(fact.account.clone()),
        model: fact.model.clone(),
        is_provisional: false,
        amount: fact.cost,
        input: fact.usage.input,
        output: fact.usage.output,
        started: fact.started,
        ended: fact.settled,
    }
}

/// Writes the one receipt of a call. A receipt for a lost or failed attempt is corrected.
fn upsert_receipt(
    change: &Transaction<'_>,
    fact: &CallUsage,
    notice: &ChargeNotice,
    now: SystemTime,
) -> rusqlite::Result<()> {
    if !fact.is_billable() && notice.source == ChargeSource::PriceTable {
        // Nothing was used, so our own table must not leave a receipt.
        return reverse_charge(change, fact);
    }
    change
        .prepare_cached(
            "INSERT INTO billing_receipt (source_reference, call_id, run, source, amount, input, output, ended, received,
                 is_unpriced)
             VALUES (:reference, :call, :run, :source, :amount, :input, :output, :ended, :now, :unpriced)
             ON CONFLICT DO UPDATE SET source = excluded.source, amount = excluded.amount, input = excluded.input,
             output = excluded.output, ended = excluded.ended, is_unpriced = excluded.is_unpriced",
        )?
        .execute(named_params! {
            ":reference": fact.source_reference(),
            ":call": fact.call_id,
            ":run": fact.run,
            ":source": notice.source.as_str(),
            ":amount": to_db_amount(notice.amount),
            ":input": to_db_tokens(notice.input),
            ":output": to_db_tokens(notice.output),
            ":ended": to_millis(notice.ended),
            ":now": to_millis(now),
            ":unpriced": notice.amount.is_zero() && (fact.is_billable() || notice.has_tokens()),
        })?;
    change
        .prepare_cached("UPDATE billing_fact SET has_receipt = 1 WHERE call_id = ?1")?
        .execute([&fact.call_id])?;
    Ok(())
}

/// Removes the price table's receipt of a call that was recorded as lost and has used nothing. Receipts from other
/// sources stay.
fn reverse_charge(change: &Transaction<'_>, fact: &CallUsage) -> rusqlite::Result<()> {
    let taken = change
        .prepare_cached("DELETE FROM billing_receipt WHERE call_id = ?1 AND source = ?2")?
        .execute(params![fact.call_id, ChargeSource::PriceTable.as_str()])?;
    if taken > 0 {
        change
            .prepare_cached("UPDATE billing_fact SET has_receipt = 0 WHERE call_id = ?1")?
            .execute([&fact.call_id])?;
    }
    Ok(())
}

/// Records a notice that contradicts an earlier notice or names another run, up to [`MAX_CONFLICTS`] for each call.
fn record_conflict(
    change: &Transaction<'_>,
    notice: &ChargeNotice,
    run: Option<&String>,
    before: Option<&ChargeNotice>,
    now: SystemTime,
) -> rusqlite::Result<()> {
    // The difference to the earlier notice, which the operator reads.
    let charged = before.map_or(Nanodollars::ZERO, |before| before.amount);
    change
        .prepare_cached(
            "INSERT OR IGNORE INTO billing_conflict SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7
             WHERE (SELECT count(*) FROM billing_conflict WHERE call_id = ?1) < ?8",
        )?
        .execute(params![
            notice.call_id,
            run.map_or("", String::as_str),
            notice.source.as_str(),
            to_db_amount(notice.amount),
            to_db_amount(notice.amount).saturating_sub(to_db_amount(charged)),
            notice.run,
            to_millis(now),
            MAX_CONFLICTS,
        ])?;
    Ok(())
}

fn upsert_usage(change: &Transaction<'_>, fact: &CallUsage) -> rusqlite::Result<()> {
    let CallUsage { usage, .. } = fact;
    change
        .prepare_cached(
            "INSERT INTO billing_fact (call_id, run, attempt, account, upstream, route, model, stream, outcome, status,
                 input, output, cache_read, cache_write, cache_write_1h, reasoning, source, cost, reported_cost,
                 started, settled, is_billable)
             VALUES (:call, :run, :attempt, :account, :upstream, :route, :model, :stream, :outcome, :status,
                 :input, :output, :cache_read, :cache_write, :cache_write_1h, :reasoning, :source, :cost, :reported,
                 :started, :settled, :billable)
             ON CONFLICT DO UPDATE SET outcome = excluded.outcome, status = excluded.status, input = excluded.input,
                 output = excluded.output, cache_read = excluded.cache_read, cache_write = excluded.cache_write,
                 cache_write_1h = excluded.cache_write_1h, reasoning = excluded.reasoning, source = excluded.source,
                 cost = excluded.cost, reported_cost = excluded.reported_cost, settled = excluded.settled,
                 is_billable = excluded.is_billable",
        )?
        .execute(named_params! {
            ":call": fact.call_id,
            ":run": fact.run,
            ":attempt": fact.attempt,
            ":account": fact.account,
            ":upstream": fact.upstream,
            ":route": fact.route,
            ":model": fact.model,
            ":stream": fact.stream,
            ":outcome": fact.outcome.as_str(),
            ":status": fact.status,
            ":input": to_db_tokens(usage.input),
            ":output": to_db_tokens(usage.output),
            ":cache_read": to_db_tokens(usage.cache_read),
            ":cache_write": to_db_tokens(usage.cache_write),
            ":cache_write_1h": to_db_tokens(usage.cache_write_1h),
            ":reasoning": to_db_tokens(usage.reasoning),
            ":source": usage.source.as_str(),
            ":cost": to_db_amount(fact.cost),
            ":reported": fact.reported_cost.map(to_db_amount),
            ":started": to_millis(fact.started),
            ":settled": to_millis(fact.settled),
            ":billable": fact.is_billable(),
        })?;
    Ok(())
}

fn insert_notice(
    change: &Transaction<'_>,
    notice: &ChargeNotice,
    now: SystemTime,
) -> rusqlite::Result<()> {
    change
        .prepare_cached(
            "INSERT OR REPLACE INTO billing_notice (call_id, source, run, is_failure, amount, input, output, ended, received)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )?
        .execute(params![
            notice.call_id,
            notice.source.as_str(),
            notice.run,
            notice.is_provisional,
            to_db_amount(notice.amount),
            to_db_tokens(notice.input),
            to_db_tokens(notice.output),
            to_millis(notice.ended),
            to_millis(now),
        ])?;
    Ok(())
}

/// Returns the stored notice of a call.
fn find_notice(change: &Transaction<'_>, call_id: &str) -> rusqlite::Result<Option<ChargeNotice>> {
    let find = "SELECT * FROM billing_notice WHERE call_id = ?1";
    change
        .prepare_cached(find)?
        .query_row([call_id], |row| {
            let ended = super::columns::from_millis(row.get("ended")?);
            Ok(ChargeNotice {
                call_id: row.get("call_id")?,
                source: enum_column(row, "source")?,
                run: row.get("run")?,
                deployment: None,
                account: None,
                model: None,
                is_provisional: row.get("is_failure")?,
                amount: money_column(row, "amount")?,
                input: token_column(row, "input")?,
                output: token_column(row, "output")?,
                started: ended,
                ended,
            })
        })
        .optional()
}

/// The maximum number of notices that wait for their calls. Our choice: a gateway's own calls are recorded within
/// seconds, and the other notices belong to an earlier billing store or are forged.
const MAX_WAITING: u64 = 100_000;

/// The maximum number of conflicts that are stored for one call. Our choice: enough for the operator to see the
/// contradiction.
const MAX_CONFLICTS: i64 = 16;

/// The query for the deployment's id.
pub(super) const DEPLOYMENT_QUERY: &str = "SELECT id FROM billing_deployment";
