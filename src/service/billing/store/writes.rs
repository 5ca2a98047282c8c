//! Writing one fact or one notice, and the receipt that follows from both.

use std::time::SystemTime;

use rusqlite::{OptionalExtension, Transaction, named_params, params};

use super::IngestOutcome;
use super::columns::{
    FromRow as _, enum_column, money_column, to_db_amount, to_db_tokens, to_millis, token_column,
};
use crate::llm::budget::Nanodollars;
use crate::service::billing::{CallUsage, ChargeNotice, ChargeSource};

/// Returns whether the call is new.
pub(super) fn ingest_usage(
    change: &Transaction<'_>,
    fact: &CallUsage,
    now: SystemTime,
) -> rusqlite::Result<bool> {
    let known = "SELECT outcome FROM billing_fact WHERE call_id = ?1";
    let known: Option<String> =
        change.prepare_cached(known)?.query_row([&fact.call_id], |row| row.get(0)).optional()?;
    let was_lost = known.as_deref() == Some("crashed") && fact.outcome.as_str() != "crashed";
    if known.is_some() && !was_lost {
        return Ok(false);
    }
    upsert_usage(change, fact)?;
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

/// Takes a notice in; `room` is for notices whose calls are not in the books.
pub(super) fn ingest_notice(
    change: &Transaction<'_>,
    notice: &ChargeNotice,
    room: &mut u64,
    now: SystemTime,
) -> rusqlite::Result<IngestOutcome> {
    let find = "SELECT * FROM billing_fact WHERE call_id = ?1";
    let fact = CallUsage::query_all(change, find, [&notice.call_id])?.pop();
    if fact.is_none() && is_foreign(change, notice)? {
        return Ok(IngestOutcome::Foreign);
    }
    let Some(before) = find_notice(change, &notice.call_id)? else {
        if fact.is_none() {
            if *room == 0 {
                return Ok(IngestOutcome::Crowded);
            }
            *room -= 1;
        }
        insert_notice(change, notice, now)?;
        return fact
            .map_or(Ok(IngestOutcome::Waits), |fact| create_receipt(change, &fact, notice, now));
    };
    let run = fact.as_ref().map(|fact| &fact.run).or(before.run.as_ref());
    if before.run != notice.run {
        record_conflict(change, notice, run, Some(&before), now)?;
        return Ok(IngestOutcome::Conflicting);
    }
    match (before.is_provisional, notice.is_provisional) {
        // It tried again and came through, or says now what it gave up before, or what it cost.
        (true, false) if before.amount.is_zero() => {
            insert_notice(change, notice, now)?;
            fact.map_or(Ok(IngestOutcome::Waits), |fact| create_receipt(change, &fact, notice, now))
        }
        (false, true) if notice.amount.is_zero() => Ok(IngestOutcome::Known),
        // The same figure comes as 4.9999999999999996e-05 from one door and as 5e-05 from another.
        _ if before.amount.0.abs_diff(notice.amount.0) <= 1 => Ok(IngestOutcome::Known),
        _ => {
            record_conflict(change, notice, run, Some(&before), now)?;
            Ok(IngestOutcome::Conflicting)
        }
    }
}

/// Whether it names other books than these. Where the call is known, whoever recorded it here has decided that.
fn is_foreign(change: &Transaction<'_>, notice: &ChargeNotice) -> rusqlite::Result<bool> {
    let Some(named) = &notice.deployment else { return Ok(false) };
    let ours: String = change.prepare_cached(DEPLOYMENT_QUERY)?.query_row([], |row| row.get(0))?;
    Ok(ours != *named)
}

/// Makes a receipt of a fact and a notice, which must be of the same run.
fn create_receipt(
    change: &Transaction<'_>,
    fact: &CallUsage,
    notice: &ChargeNotice,
    now: SystemTime,
) -> rusqlite::Result<IngestOutcome> {
    if notice.run.as_ref().is_some_and(|run| *run != fact.run) {
        change.execute("DELETE FROM billing_notice WHERE call_id = ?1", [&notice.call_id])?;
        record_conflict(change, notice, Some(&fact.run), None, now)?;
        return Ok(IngestOutcome::Conflicting);
    }
    change
        .execute("UPDATE billing_notice SET is_taken = 1 WHERE call_id = ?1", [&notice.call_id])?;
    if !notice.is_charge_for(fact) {
        remove_receipt(change, fact)?;
        return Ok(IngestOutcome::Unpaid);
    }
    upsert_receipt(change, fact, notice, now)?;
    Ok(IngestOutcome::New)
}

/// Removes the receipt of a call that turned out to have used tokens when what it cost was left open.
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

/// What we ourselves say of a call, where nobody else does.
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

/// The one receipt of a call; what took it for lost, or for failed, is put right.
fn upsert_receipt(
    change: &Transaction<'_>,
    fact: &CallUsage,
    notice: &ChargeNotice,
    now: SystemTime,
) -> rusqlite::Result<()> {
    if !fact.is_billable() && notice.source == ChargeSource::PriceTable {
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

/// What was taken for lost, and charged for all that it had reserved, has used nothing. What somebody else has said of it
/// stays.
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

/// Keeps what contradicts what was said before, or names another run than ours; of each call the first some.
fn record_conflict(
    change: &Transaction<'_>,
    notice: &ChargeNotice,
    run: Option<&String>,
    before: Option<&ChargeNotice>,
    now: SystemTime,
) -> rusqlite::Result<()> {
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

/// What was said of a call so far.
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

/// Notices that wait for their calls. A gateway's own are booked within seconds; the rest is of earlier books or made up.
const MAX_WAITING: u64 = 100_000;

/// Conflicts that are kept of one call: enough for people to see what contradicts what.
const MAX_CONFLICTS: i64 = 16;

/// Says whose books these are.
pub(super) const DEPLOYMENT_QUERY: &str = "SELECT id FROM billing_deployment";
