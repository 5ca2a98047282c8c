//! Writing one fact or one notice, and the receipt that follows from both.

use std::time::SystemTime;

use rusqlite::{OptionalExtension, Transaction, named_params, params};

use super::Fate;
use super::row::{Row as _, count, dollars, millis, money, tokens, word};
use crate::billing::{Fact, Notice, Source};
use crate::budget::Nanodollars;

/// Returns whether the call is new.
pub(super) fn fact(
    change: &Transaction<'_>,
    fact: &Fact,
    now: SystemTime,
) -> rusqlite::Result<bool> {
    let known = "SELECT outcome FROM billing_fact WHERE call_id = ?1";
    let known: Option<String> =
        change.prepare_cached(known)?.query_row([&fact.call_id], |row| row.get(0)).optional()?;
    let was_lost = known.as_deref() == Some("crashed") && fact.outcome.as_str() != "crashed";
    if known.is_some() && !was_lost {
        return Ok(false);
    }
    write(change, fact)?;
    if !fact.is_billed_by_litellm() {
        charge(change, fact, &own(fact), now)?;
    } else if let Some(notice) = said(change, &fact.call_id)? {
        join(change, fact, &notice, now)?;
    }
    Ok(known.is_none())
}

/// Returns how many notices may still wait for their calls.
pub(super) fn room_to_wait(change: &Transaction<'_>) -> rusqlite::Result<u64> {
    let count = "SELECT count(*) FROM billing_notice WHERE NOT is_taken";
    let waiting: i64 = change.prepare_cached(count)?.query_row([], |row| row.get(0))?;
    Ok(MAX_WAITING.saturating_sub(waiting.cast_unsigned()))
}

/// Takes a notice in; `room` is for notices whose calls are not in the books.
pub(super) fn notice(
    change: &Transaction<'_>,
    notice: &Notice,
    room: &mut u64,
    now: SystemTime,
) -> rusqlite::Result<Fate> {
    let find = "SELECT * FROM billing_fact WHERE call_id = ?1";
    let fact = Fact::all(change, find, [&notice.call_id])?.pop();
    if fact.is_none() && is_foreign(change, notice)? {
        return Ok(Fate::Foreign);
    }
    let Some(before) = said(change, &notice.call_id)? else {
        if fact.is_none() {
            if *room == 0 {
                return Ok(Fate::Crowded);
            }
            *room -= 1;
        }
        keep(change, notice, now)?;
        return fact.map_or(Ok(Fate::Waits), |fact| join(change, &fact, notice, now));
    };
    let run = fact.as_ref().map(|fact| &fact.run).or(before.run.as_ref());
    if before.run != notice.run {
        contradict(change, notice, run, Some(&before), now)?;
        return Ok(Fate::Conflicting);
    }
    match (before.is_provisional, notice.is_provisional) {
        // It tried again and came through, or says now what it gave up before, or what it cost.
        (true, false) if before.amount.is_zero() => {
            keep(change, notice, now)?;
            fact.map_or(Ok(Fate::Waits), |fact| join(change, &fact, notice, now))
        }
        (false, true) if notice.amount.is_zero() => Ok(Fate::Known),
        // The same figure comes as 4.9999999999999996e-05 from one door and as 5e-05 from another.
        _ if before.amount.0.abs_diff(notice.amount.0) <= 1 => Ok(Fate::Known),
        _ => {
            contradict(change, notice, run, Some(&before), now)?;
            Ok(Fate::Conflicting)
        }
    }
}

/// Whether it names other books than these. Where the call is known, whoever recorded it here has decided that.
fn is_foreign(change: &Transaction<'_>, notice: &Notice) -> rusqlite::Result<bool> {
    let Some(named) = &notice.deployment else { return Ok(false) };
    let ours: String = change.prepare_cached(DEPLOYMENT)?.query_row([], |row| row.get(0))?;
    Ok(ours != *named)
}

/// Makes a receipt of a fact and a notice, which must be of the same run.
fn join(
    change: &Transaction<'_>,
    fact: &Fact,
    notice: &Notice,
    now: SystemTime,
) -> rusqlite::Result<Fate> {
    if notice.run.as_ref().is_some_and(|run| *run != fact.run) {
        change.execute("DELETE FROM billing_notice WHERE call_id = ?1", [&notice.call_id])?;
        contradict(change, notice, Some(&fact.run), None, now)?;
        return Ok(Fate::Conflicting);
    }
    change
        .execute("UPDATE billing_notice SET is_taken = 1 WHERE call_id = ?1", [&notice.call_id])?;
    if !notice.is_charge_for(fact) {
        withdraw(change, fact)?;
        return Ok(Fate::Unpaid);
    }
    charge(change, fact, notice, now)?;
    Ok(Fate::New)
}

/// Removes the receipt of a call that turned out to have used tokens when what it cost was left open.
fn withdraw(change: &Transaction<'_>, fact: &Fact) -> rusqlite::Result<()> {
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
fn own(fact: &Fact) -> Notice {
    Notice {
        call_id: fact.call_id.clone(),
        source: Source::PriceTable,
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
fn charge(
    change: &Transaction<'_>,
    fact: &Fact,
    notice: &Notice,
    now: SystemTime,
) -> rusqlite::Result<()> {
    if !fact.is_billable() && notice.source == Source::PriceTable {
        return take_back(change, fact);
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
            ":amount": money(notice.amount),
            ":input": tokens(notice.input),
            ":output": tokens(notice.output),
            ":ended": millis(notice.ended),
            ":now": millis(now),
            ":unpriced": notice.amount.is_zero() && (fact.is_billable() || notice.has_tokens()),
        })?;
    change
        .prepare_cached("UPDATE billing_fact SET has_receipt = 1 WHERE call_id = ?1")?
        .execute([&fact.call_id])?;
    Ok(())
}

/// What was taken for lost, and charged for all that it had reserved, has used nothing. What somebody else has said of it
/// stays.
fn take_back(change: &Transaction<'_>, fact: &Fact) -> rusqlite::Result<()> {
    let taken = change
        .prepare_cached("DELETE FROM billing_receipt WHERE call_id = ?1 AND source = ?2")?
        .execute(params![fact.call_id, Source::PriceTable.as_str()])?;
    if taken > 0 {
        change
            .prepare_cached("UPDATE billing_fact SET has_receipt = 0 WHERE call_id = ?1")?
            .execute([&fact.call_id])?;
    }
    Ok(())
}

/// Keeps what contradicts what was said before, or names another run than ours; of each call the first some.
fn contradict(
    change: &Transaction<'_>,
    notice: &Notice,
    run: Option<&String>,
    before: Option<&Notice>,
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
            money(notice.amount),
            money(notice.amount).saturating_sub(money(charged)),
            notice.run,
            millis(now),
            MAX_CONFLICTS,
        ])?;
    Ok(())
}

fn write(change: &Transaction<'_>, fact: &Fact) -> rusqlite::Result<()> {
    let Fact { usage, .. } = fact;
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
            ":input": tokens(usage.input),
            ":output": tokens(usage.output),
            ":cache_read": tokens(usage.cache_read),
            ":cache_write": tokens(usage.cache_write),
            ":cache_write_1h": tokens(usage.cache_write_1h),
            ":reasoning": tokens(usage.reasoning),
            ":source": usage.source.as_str(),
            ":cost": money(fact.cost),
            ":reported": fact.reported_cost.map(money),
            ":started": millis(fact.started),
            ":settled": millis(fact.settled),
            ":billable": fact.is_billable(),
        })?;
    Ok(())
}

fn keep(change: &Transaction<'_>, notice: &Notice, now: SystemTime) -> rusqlite::Result<()> {
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
            money(notice.amount),
            tokens(notice.input),
            tokens(notice.output),
            millis(notice.ended),
            millis(now),
        ])?;
    Ok(())
}

/// What was said of a call so far.
fn said(change: &Transaction<'_>, call_id: &str) -> rusqlite::Result<Option<Notice>> {
    let find = "SELECT * FROM billing_notice WHERE call_id = ?1";
    change
        .prepare_cached(find)?
        .query_row([call_id], |row| {
            let ended = super::row::from_millis(row.get("ended")?);
            Ok(Notice {
                call_id: row.get("call_id")?,
                source: word(row, "source")?,
                run: row.get("run")?,
                deployment: None,
                account: None,
                model: None,
                is_provisional: row.get("is_failure")?,
                amount: dollars(row, "amount")?,
                input: count(row, "input")?,
                output: count(row, "output")?,
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
pub(super) const DEPLOYMENT: &str = "SELECT id FROM billing_deployment";
