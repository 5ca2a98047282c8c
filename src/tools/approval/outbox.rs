//! The messages about questions, kept in the database until the receiver of the webhook has them, and the replies that
//! the receiver has sent.
//!
//! **Invariant:** a message has no arguments of a call, except the argument fields that the operator has listed.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};

use rusqlite::{Transaction, params};
use serde_json::json;
use tokio::sync::Notify;

use super::webhook::{REPLY_WINDOW, Webhook};
use super::{ApprovalRow, ApprovalState, format_unix_millis};

/// The outbox of one process.
#[derive(Debug, Default)]
pub struct Outbox {
    pub(super) webhook: RwLock<Option<Arc<Webhook>>>,
    /// Notified when a message is added.
    pub(super) added: Notify,
    /// True if the last message was not received, so that one outage is logged once.
    pub(super) is_failing: AtomicBool,
}

impl Outbox {
    /// Writes the message about a question, if there is a receiver. A full outbox writes none: the receiver has been
    /// away for thousands of questions.
    pub(super) fn add_message(
        &self,
        change: &Transaction<'_>,
        row: &ApprovalRow,
        now: i64,
    ) -> rusqlite::Result<()> {
        if self.webhook().is_none() {
            return Ok(());
        }
        let count = "SELECT count(*) FROM approval_message";
        let kept: u32 = change.prepare_cached(count)?.query_row([], |found| found.get(0))?;
        if kept >= MAX_MESSAGES {
            tracing::warn!(approval = row.id, "the webhook's outbox is full; a message is lost");
            return Ok(());
        }
        let is_open = row.state == ApprovalState::Pending;
        let expires = if is_open { row.not_after_ms } else { now + RESULT_LIFETIME_MS };
        let insert = "INSERT INTO approval_message (id, body, attempts, due, expires) VALUES (?1, ?2, 0, ?3, ?4)";
        let id = format!("msg_{}", uuid::Uuid::now_v7().simple());
        change.prepare_cached(insert)?.execute(params![
            id,
            message_body(row, now),
            now,
            expires
        ])?;
        Ok(())
    }

    pub(super) fn wake_sender(&self) {
        self.added.notify_one();
    }

    pub(super) fn webhook(&self) -> Option<Arc<Webhook>> {
        self.webhook.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Notes the id of a signed reply. Returns false if the reply was received before.
pub(super) fn insert_reply(change: &Transaction<'_>, id: &str, now: i64) -> rusqlite::Result<bool> {
    // An older reply is outside of the window of its signature, whichever of the two clocks is ahead.
    let window = i64::try_from(REPLY_WINDOW.as_millis()).unwrap_or(i64::MAX);
    let forget = "DELETE FROM approval_reply WHERE received < ?1";
    change.prepare_cached(forget)?.execute([now.saturating_sub(window.saturating_mul(4))])?;
    let insert = "INSERT INTO approval_reply (id, received) VALUES (?1, ?2) ON CONFLICT DO NOTHING";
    Ok(change.prepare_cached(insert)?.execute(params![id, now])? == 1)
}

/// Returns the message about a step of a question. It has no arguments: its receiver is not always who may approve.
fn message_body(row: &ApprovalRow, now: i64) -> String {
    let is_open = row.state == ApprovalState::Pending;
    let kind = if is_open { "approval.requested" } else { "approval.resolved" };
    let mut data = json!({
        "id": row.id,
        "state": row.state,
        "run": row.run,
        "agent": row.agent,
        "tool": row.tool,
        "rule": row.rule,
        "digest": row.digest,
        "evidence": row.evidence,
        "price_usd": row.price,
        "requested_at": format_unix_millis(row.requested_ms),
        "expires_at": format_unix_millis(row.not_after_ms),
    });
    if let Some(budget) = &row.budget {
        data["budget"] = json!(budget);
    }
    if !is_open {
        data["by"] = json!(row.by);
        data["raised"] = json!(row.raised);
    }
    json!({"type": kind, "timestamp": format_unix_millis(now), "data": data}).to_string()
}

/// The most messages of the outbox. Our choice: a receiver that is away for longer than that reads the list instead.
const MAX_MESSAGES: u32 = 10_000;

/// The time for which a message about a closed question is kept.
const RESULT_LIFETIME_MS: i64 = 60 * 60 * 1000;
