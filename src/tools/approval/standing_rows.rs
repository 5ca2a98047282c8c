//! The rows of standing approvals, as the stores read and write them within their transactions.

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, named_params, params};
use serde::Serialize;

use super::ApprovalRow;
use super::standing::{
    ApprovalScope, MAX_PROPOSALS_PER_RUN, StandingAnswer, StandingApproval, StandingGrant,
    StandingOffer, StandingOutcome, StandingState, standing_id,
};
use crate::llm::budget::Nanodollars;

/// Makes the standing approval of an answer whose scope is wider than one call. The caller has checked the scope. Returns false
/// if too many approvals are in force.
pub(super) fn insert_answered(
    change: &Transaction<'_>,
    (row, offer): (&ApprovalRow, &StandingOffer),
    answer: &StandingAnswer,
    (by, reason): (&str, Option<&str>),
    now: i64,
) -> rusqlite::Result<bool> {
    let StandingAnswer { terms, owner, account } = answer;
    expire_due(change, now)?;
    if count_granted(change)? >= MAX_GRANTED {
        return Ok(false);
    }
    let standing = StandingApproval {
        id: standing_id(&row.id),
        state: StandingState::Granted,
        scope: terms.scope,
        key: offer.key.clone(),
        digest: offer.digest.clone(),
        run: row.run.clone(),
        owner: Some(owner.clone()),
        account: account.clone(),
        agent: row.agent.clone(),
        tool: row.tool.clone(),
        rules: vec![row.rule.clone()],
        definition: row.definition.clone(),
        arguments: None,
        evidence: row.evidence.clone(),
        price: row.price,
        created_ms: now,
        not_after_ms: terms.not_after_ms,
        max_uses: terms.max_uses,
        used: 0,
        granted_ms: Some(now),
        by: Some(by.to_owned()),
        reason: reason.map(str::to_owned),
        revoked_by: None,
    };
    insert_row(change, &standing)?;
    Ok(true)
}

/// Ends the approvals for single runs that match a condition on `?1`.
pub(super) fn end_run_approvals(
    change: &Transaction<'_>,
    (condition, value): (&str, &str),
) -> rusqlite::Result<()> {
    let end = format!(
        "UPDATE standing_approval SET state = 'expired', arguments = NULL WHERE {condition} AND state = 'granted' AND scope = 'run'"
    );
    change.prepare_cached(&end)?.execute([value]).map(drop)
}

/// Deletes the closed standing approvals that were made before a time.
pub(super) fn forget_before(
    change: &Transaction<'_>,
    (before, now): (i64, i64),
) -> rusqlite::Result<()> {
    expire_due(change, now)?;
    let delete =
        "DELETE FROM standing_approval WHERE created < ?1 AND state NOT IN ('proposed', 'granted')";
    change.execute(delete, [before]).map(drop)
}

/// Returns true if a grant was revoked. The request of a grant may be under way for seconds, and its answer then counts no
/// more.
pub(super) fn is_revoked(change: &Transaction<'_>, grant: &str) -> rusqlite::Result<bool> {
    let find = "SELECT 1 FROM grants WHERE id = ?1 AND revoked IS NOT NULL";
    change.prepare_cached(find)?.exists([grant])
}

pub(super) fn write_grant(
    change: &Transaction<'_>,
    id: &str,
    grant: &StandingGrant,
    now: i64,
) -> rusqlite::Result<StandingOutcome> {
    let StandingGrant { digest, terms, by, reason } = grant;
    if is_revoked(change, by)? {
        return Ok(StandingOutcome::GrantRevoked);
    }
    expire_due(change, now)?;
    let Some(row) = find_row(change, id)? else { return Ok(StandingOutcome::Unknown) };
    if row.digest != *digest {
        return Ok(StandingOutcome::OtherDigest);
    }
    if row.state != StandingState::Proposed {
        return Ok(StandingOutcome::Closed(row.state));
    }
    if terms.scope > row.scope {
        return Ok(StandingOutcome::ScopeTooWide);
    }
    if count_granted(change)? >= MAX_GRANTED {
        return Ok(StandingOutcome::Full);
    }
    change.execute(
        "UPDATE standing_approval SET state = 'granted', scope = ?2, not_after = ?3, max_uses = ?4, granted = ?5,
             granted_by = ?6, reason = ?7 WHERE id = ?1",
        params![id, terms.scope.as_str(), terms.not_after_ms, terms.max_uses, now, by, reason],
    )?;
    changed_row(change, id)
}

/// Returns the outcome with the row as the same transaction has changed it.
pub(super) fn changed_row(change: &Transaction<'_>, id: &str) -> rusqlite::Result<StandingOutcome> {
    let row = find_row(change, id)?;
    Ok(row.map_or(StandingOutcome::Unknown, |row| StandingOutcome::Changed(Box::new(row))))
}

/// Closes what is open and whose time is over, and notes the time: no later process lives before it.
pub(super) fn expire_due(change: &Transaction<'_>, now: i64) -> rusqlite::Result<()> {
    let note = "UPDATE approval_clock SET latest = ?1 WHERE latest < ?1";
    change.prepare_cached(note)?.execute([now])?;
    let expire = "UPDATE standing_approval SET state = 'expired', arguments = NULL
                  WHERE state IN ('proposed', 'granted') AND not_after <= ?1";
    change.prepare_cached(expire)?.execute([now]).map(drop)
}

/// Returns true if a run, the owner of its run, or all runs together have no place for a proposal.
pub(super) fn is_full_for(
    change: &Transaction<'_>,
    row: &StandingApproval,
) -> rusqlite::Result<bool> {
    let count = |query: &str, value: Option<&str>| {
        change.prepare_cached(query)?.query_row([value], |found| found.get::<_, u32>(0))
    };
    let of_run = "SELECT count(*) FROM standing_approval WHERE run = ?1";
    let of_owner = "SELECT count(*) FROM standing_approval WHERE state = 'proposed' AND ?1 IS NOT NULL AND owner = ?1";
    let of_all = "SELECT count(*) FROM standing_approval WHERE state = 'proposed' AND ?1 IS NULL";
    Ok(count(of_run, Some(&row.run))? >= MAX_PROPOSALS_PER_RUN
        || count(of_owner, row.owner.as_deref())? >= MAX_OPEN_PROPOSALS_PER_GRANT
        || count(of_all, None)? >= MAX_OPEN_PROPOSALS)
}

fn count_granted(change: &Transaction<'_>) -> rusqlite::Result<u32> {
    let count = "SELECT count(*) FROM standing_approval WHERE state = 'granted'";
    change.prepare_cached(count)?.query_row([], |found| found.get(0))
}

pub(super) fn find_proposed(
    view: &Connection,
    key: &str,
    now: i64,
) -> rusqlite::Result<Option<String>> {
    let find = "SELECT id FROM standing_approval WHERE call_key = ?1 AND state = 'proposed' AND not_after > ?2";
    view.prepare_cached(find)?.query_row(params![key, now], |row| row.get(0)).optional()
}

pub(super) fn find_row(view: &Connection, id: &str) -> rusqlite::Result<Option<StandingApproval>> {
    let query = format!("SELECT {COLUMNS} FROM standing_approval WHERE id = ?1");
    view.prepare_cached(&query)?.query_row([id], read_row).optional()
}

pub(super) fn insert_row(change: &Transaction<'_>, row: &StandingApproval) -> rusqlite::Result<()> {
    let price = i64::try_from(row.price.0).unwrap_or(i64::MAX);
    change.execute(
        "INSERT INTO standing_approval (id, state, scope, call_key, digest, run, owner, account, agent, tool, rules, definition, arguments, evidence, price, created, not_after, max_uses, granted, granted_by, reason)
         VALUES (:id, :state, :scope, :key, :digest, :run, :owner, :account, :agent, :tool, :rules, :definition, :arguments, :evidence, :price, :created, :not_after, :max_uses, :granted, :granted_by, :reason)",
        named_params! {
            ":id": row.id,
            ":state": row.state.as_str(),
            ":scope": row.scope.as_str(),
            ":key": row.key,
            ":digest": row.digest,
            ":run": row.run,
            ":owner": row.owner,
            ":account": row.account,
            ":agent": row.agent,
            ":tool": row.tool,
            ":rules": to_json(&row.rules),
            ":definition": row.definition,
            ":arguments": row.arguments,
            ":evidence": to_json(&row.evidence),
            ":price": price,
            ":created": row.created_ms,
            ":not_after": row.not_after_ms,
            ":max_uses": row.max_uses,
            ":granted": row.granted_ms,
            ":granted_by": row.by,
            ":reason": row.reason,
        },
    )?;
    Ok(())
}

pub(super) fn read_row(row: &Row<'_>) -> rusqlite::Result<StandingApproval> {
    let odd = |index, what: &'static str| {
        rusqlite::Error::FromSqlConversionFailure(index, Type::Text, what.into())
    };
    let (state, scope): (String, String) = (row.get("state")?, row.get("scope")?);
    let state = StandingState::ALL.into_iter().find(|known| known.as_str() == state);
    let scope = ApprovalScope::ALL.into_iter().find(|known| known.as_str() == scope);
    let (rules, evidence): (String, String) = (row.get("rules")?, row.get("evidence")?);
    let price: i64 = row.get("price")?;
    Ok(StandingApproval {
        id: row.get("id")?,
        state: state.ok_or_else(|| odd(1, "no state of a standing approval"))?,
        scope: scope.ok_or_else(|| odd(2, "no scope"))?,
        key: row.get("call_key")?,
        digest: row.get("digest")?,
        run: row.get("run")?,
        owner: row.get("owner")?,
        account: row.get("account")?,
        agent: row.get("agent")?,
        tool: row.get("tool")?,
        rules: serde_json::from_str(&rules).map_err(|_| odd(10, "no list of rules"))?,
        definition: row.get("definition")?,
        arguments: row.get("arguments")?,
        evidence: serde_json::from_str(&evidence).map_err(|_| odd(13, "no map of evidence"))?,
        price: Nanodollars(price.max(0).cast_unsigned()),
        created_ms: row.get("created")?,
        not_after_ms: row.get("not_after")?,
        max_uses: row.get("max_uses")?,
        used: row.get("used")?,
        granted_ms: row.get("granted")?,
        by: row.get("granted_by")?,
        reason: row.get("reason")?,
        revoked_by: row.get("revoked_by")?,
    })
}

pub(super) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("the value has string keys")
}

pub(super) const COLUMNS: &str = "id, state, scope, call_key, digest, run, owner, account, agent, tool, rules, definition, arguments, evidence, price, created, not_after, max_uses, used, granted, granted_by, reason, revoked_by";

/// The most open proposals of the runs of one grant. Our choice, as for questions: a person reads no more with care.
const MAX_OPEN_PROPOSALS_PER_GRANT: u32 = 128;

/// The most open proposals of a service. Our choice: each may hold arguments of 16 KiB on disk.
const MAX_OPEN_PROPOSALS: u32 = 4096;

/// The most standing approvals in force. Our choice: more of them are a rule.
const MAX_GRANTED: u32 = 4096;
