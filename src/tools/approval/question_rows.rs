//! The rows of questions, as the store reads and writes them within its transactions.

use std::collections::BTreeMap;

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, named_params, params};
use serde::de::DeserializeOwned;

use super::standing::{StandingAnswer, StandingOffer};
use super::standing_rows::{self, to_json};
use super::{ApprovalRow, ApprovalState, outbox};
use crate::llm::budget::{Nanodollars, RaiseError, SpendingLimits};

/// A person's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalDecision {
    pub is_approved: bool,
    /// The digest of the call that the person has seen.
    pub digest: String,
    /// The grant that answers.
    pub by: String,
    pub reason: Option<String>,
    /// The limits that the person raises, for a question about a budget.
    pub raise: Option<SpendingLimits>,
    /// The standing approval that the answer makes; `None` if the answer is for one call.
    pub standing: Option<StandingAnswer>,
    /// The id of the signed reply that the answer came in; it counts once.
    pub reply: Option<String>,
}

/// The outcome of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecisionOutcome {
    /// The answer counts. The row has the new state.
    Decided(Box<ApprovalRow>),
    /// The question has another digest.
    OtherDigest,
    /// The answer does not raise the limits as the question needs it.
    WrongRaise(RaiseError),
    /// The answer raises limits, or must, and the question says otherwise.
    RaiseMismatch,
    /// The answer has a scope that the question does not offer.
    ScopeNotOffered,
    /// Too many standing approvals are in force.
    TooManyStanding,
    /// The signed reply was received before.
    Replayed,
    /// The grant that answers was revoked.
    GrantRevoked,
    /// The question was closed before.
    Closed(ApprovalState),
    Unknown,
}

pub(super) fn insert_row(change: &Transaction<'_>, row: &ApprovalRow) -> rusqlite::Result<bool> {
    let count = "SELECT count(*) FROM approval WHERE run = ?1";
    let asked: u32 = change.query_row(count, [&row.run], |found| found.get(0))?;
    if asked >= MAX_QUESTIONS_PER_RUN {
        return Ok(false);
    }
    let evidence = serde_json::to_string(&row.evidence).unwrap_or_default();
    let price = i64::try_from(row.price.0).unwrap_or(i64::MAX);
    change.execute(
        "INSERT INTO approval (id, run, account, agent, tool, rule, definition, policy, digest, arguments, evidence, price, state, requested, not_after, budget, standing)
         VALUES (:id, :run, :account, :agent, :tool, :rule, :definition, :policy, :digest, :arguments, :evidence, :price, 'pending', :requested, :not_after, :budget, :standing)",
        named_params! {
            ":id": row.id,
            ":run": row.run,
            ":account": row.account,
            ":agent": row.agent,
            ":tool": row.tool,
            ":rule": row.rule,
            ":definition": row.definition,
            ":policy": row.policy,
            ":digest": row.digest,
            ":arguments": row.arguments,
            ":evidence": evidence,
            ":price": price,
            ":requested": row.requested_ms,
            ":not_after": row.not_after_ms,
            ":budget": row.budget.as_ref().map(to_json),
            ":standing": row.standing.as_ref().map(to_json),
        },
    )?;
    Ok(true)
}

pub(super) fn write_decision(
    change: &Transaction<'_>,
    id: &str,
    decision: &ApprovalDecision,
    now: i64,
) -> rusqlite::Result<DecisionOutcome> {
    // 1. A signed reply counts once, whatever it says. The row is read and changed in the same transaction, so that no
    //    other step comes between.
    if let Some(reply) = &decision.reply
        && !outbox::insert_reply(change, reply, now)?
    {
        return Ok(DecisionOutcome::Replayed);
    }
    if standing_rows::is_revoked(change, &decision.by)? {
        return Ok(DecisionOutcome::GrantRevoked);
    }
    let Some(row) = find_row(change, id)? else { return Ok(DecisionOutcome::Unknown) };
    if row.digest != decision.digest {
        return Ok(DecisionOutcome::OtherDigest);
    }
    if row.state != ApprovalState::Pending {
        return Ok(DecisionOutcome::Closed(row.state));
    }
    // 2. An answer that comes too late is no answer, even if the waiting call has not noticed the time yet.
    if row.not_after_ms <= now {
        return Ok(DecisionOutcome::Closed(ApprovalState::Expired));
    }
    // 3. A yes to a budget says how far it is raised; every other answer raises nothing.
    match (&row.budget, &decision.raise) {
        (Some(budget), Some(raise)) if decision.is_approved => {
            if let Err(error) = budget.limits.check_raise(raise, budget.limit) {
                return Ok(DecisionOutcome::WrongRaise(error));
            }
        }
        (Some(_), None) if decision.is_approved => return Ok(DecisionOutcome::RaiseMismatch),
        (_, Some(_)) => return Ok(DecisionOutcome::RaiseMismatch),
        (_, None) => {}
    }
    // 4. A yes for more than this call is a standing approval of its own.
    let standing = match (&row.standing, &decision.standing) {
        (offer, None) => offer.clone(),
        (Some(offer), Some(answer))
            if decision.is_approved && offer.scopes.contains(&answer.terms.scope) =>
        {
            let words = (decision.by.as_str(), decision.reason.as_deref());
            if !standing_rows::insert_answered(change, (&row, offer), answer, words, now)? {
                return Ok(DecisionOutcome::TooManyStanding);
            }
            Some(StandingOffer { answered: Some(answer.terms.scope), ..offer.clone() })
        }
        (_, Some(_)) => return Ok(DecisionOutcome::ScopeNotOffered),
    };
    // 5. The arguments of a denied call are not needed any more.
    let ApprovalDecision { is_approved, by, reason, raise, .. } = decision;
    let raised = raise.as_ref().map(to_json);
    let (state, arguments) = if *is_approved {
        (ApprovalState::Approved, row.arguments)
    } else {
        (ApprovalState::Denied, None)
    };
    change.execute(
        "UPDATE approval SET state = ?2, arguments = ?3, resolved = ?4, decided_by = ?5, reason = ?6, raised = ?7, standing = ?8
         WHERE id = ?1",
        params![id, state.as_str(), arguments, now, by, reason, raised, standing.as_ref().map(to_json)],
    )?;
    // The row exists: this transaction has just changed it.
    let decided = find_row(change, id)?;
    Ok(decided.map_or(DecisionOutcome::Unknown, |row| DecisionOutcome::Decided(Box::new(row))))
}

/// Closes the open questions that match a condition on `?1`, and returns them. A person's answer stays in the row.
pub(super) fn close_rows(
    change: &Transaction<'_>,
    (condition, value): (&str, &str),
    (state, reason): (ApprovalState, &str),
    now: i64,
) -> rusqlite::Result<Vec<ApprovalRow>> {
    let close = format!(
        "UPDATE approval SET state = ?2, arguments = NULL, resolved = coalesce(resolved, ?3), reason = coalesce(reason, ?4)
         WHERE {condition} AND state IN ('pending', 'approved') RETURNING {COLUMNS}"
    );
    let mut close = change.prepare_cached(&close)?;
    let closed = close.query_map(params![value, state.as_str(), now, reason], read_row)?;
    closed.collect()
}

pub(super) fn find_row(view: &Connection, id: &str) -> rusqlite::Result<Option<ApprovalRow>> {
    let query = format!("SELECT {COLUMNS} FROM approval WHERE id = ?1");
    view.prepare_cached(&query)?.query_row([id], read_row).optional()
}

pub(super) fn read_row(row: &Row<'_>) -> rusqlite::Result<ApprovalRow> {
    let odd = |index, what: &'static str| {
        rusqlite::Error::FromSqlConversionFailure(index, Type::Text, what.into())
    };
    let state: String = row.get("state")?;
    let state = ApprovalState::ALL.into_iter().find(|known| known.as_str() == state);
    let evidence: String = row.get("evidence")?;
    let evidence: BTreeMap<String, String> =
        serde_json::from_str(&evidence).map_err(|_| odd(8, "no map of evidence"))?;
    let price: i64 = row.get("price")?;
    Ok(ApprovalRow {
        id: row.get("id")?,
        run: row.get("run")?,
        account: row.get("account")?,
        agent: row.get("agent")?,
        tool: row.get("tool")?,
        rule: row.get("rule")?,
        definition: row.get("definition")?,
        policy: row.get("policy")?,
        digest: row.get("digest")?,
        arguments: row.get("arguments")?,
        evidence,
        price: Nanodollars(price.max(0).cast_unsigned()),
        state: state.ok_or_else(|| odd(11, "no state of a question"))?,
        requested_ms: row.get("requested")?,
        not_after_ms: row.get("not_after")?,
        resolved_ms: row.get("resolved")?,
        by: row.get("decided_by")?,
        reason: row.get("reason")?,
        call: row.get("call")?,
        budget: read_json(row, "budget")?,
        raised: read_json(row, "raised")?,
        standing: read_json(row, "standing")?,
    })
}

fn read_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let Some(text) = row.get::<_, Option<String>>(column)? else { return Ok(None) };
    let index = row.as_ref().column_index(column)?;
    let read = serde_json::from_str(&text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(index, Type::Text, error.into())
    });
    read.map(Some)
}

pub(super) const COLUMNS: &str = "id, run, account, agent, tool, rule, definition, policy, digest, arguments, evidence, price, state, requested, not_after, resolved, decided_by, reason, call, budget, raised, standing";

/// The most questions of a run. Our choice: a person answers no more with care.
pub const MAX_QUESTIONS_PER_RUN: u32 = 256;
