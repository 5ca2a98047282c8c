//! The delivery of messages about questions to the receiver of the webhook.
//!
//! 1. The transaction that asks, answers or closes a question writes the message into the [`outbox`](super::outbox).
//! 2. One task of the service sends the messages that are due, and deletes those that were received.
//! 3. A message that was not received is sent again, later each time, until its time or its attempts are over.
//!
//! A crash between the receipt and the deletion sends a message twice, with the same id.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use rusqlite::{Connection, params};
use tokio_util::sync::CancellationToken;

use super::store::ApprovalStore;
use super::to_unix_millis;
use super::webhook::Webhook;
use crate::base::db::DatabaseError;

/// A message that is due.
struct DueMessage {
    id: String,
    body: String,
    attempts: u32,
    expires_ms: i64,
}

impl ApprovalStore {
    /// Sets the receiver of messages about later steps, or removes it.
    pub fn set_webhook(&self, webhook: Option<Arc<Webhook>>) {
        *self.outbox.webhook.write().unwrap_or_else(PoisonError::into_inner) = webhook;
        self.outbox.wake_sender();
    }

    /// Returns the receiver of messages.
    pub fn webhook(&self) -> Option<Arc<Webhook>> {
        self.outbox.webhook()
    }

    /// Sends the messages that are due, until `stop`.
    pub async fn deliver_messages(&self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let sent = stop.run_until_cancelled(self.deliver_due()).await;
            if let Some(Err(error)) = sent {
                tracing::error!(%error, "the webhook's outbox cannot be read or written");
            }
            tokio::select! {
                () = tokio::time::sleep(SEND_INTERVAL) => (),
                () = self.outbox.added.notified() => (),
                () = stop.cancelled() => (),
            }
        }
    }

    /// Sends the messages that are due now.
    async fn deliver_due(&self) -> Result<(), DatabaseError> {
        let Some(webhook) = self.outbox.webhook() else { return Ok(()) };
        loop {
            // An empty outbox costs a read only.
            let now = self.now_ms();
            let due = self.database.read_committed(move |view| due_messages(view, now)).await?;
            if due.is_empty() {
                return Ok(());
            }
            let (due, expired): (Vec<_>, Vec<_>) =
                due.into_iter().partition(|message| message.expires_ms > now);
            for message in expired {
                self.delete_message(message.id).await?;
            }
            let sending =
                due.iter().map(|message| webhook.send_message(&message.id, &message.body));
            let results = join_all(sending).await;
            for (message, result) in due.into_iter().zip(results) {
                self.log_result(&message, result.as_ref().err().map(String::as_str));
                self.settle_message(message, result.is_ok()).await?;
            }
        }
    }

    /// Deletes a message that was received or was tried too often. Sets the time of the next attempt of any other.
    async fn settle_message(
        &self,
        message: DueMessage,
        is_received: bool,
    ) -> Result<(), DatabaseError> {
        let attempts = message.attempts + 1;
        if is_received || attempts >= MAX_ATTEMPTS {
            return self.delete_message(message.id).await;
        }
        let due = to_unix_millis(self.read_time() + retry_delay(attempts));
        let update = "UPDATE approval_message SET attempts = ?2, due = ?3 WHERE id = ?1";
        self.database
            .write_in_transaction(move |change| {
                change.prepare_cached(update)?.execute(params![message.id, attempts, due])
            })
            .await?;
        Ok(())
    }

    async fn delete_message(&self, id: String) -> Result<(), DatabaseError> {
        let delete = "DELETE FROM approval_message WHERE id = ?1";
        self.database
            .write_in_transaction(move |change| change.prepare_cached(delete)?.execute([id]))
            .await?;
        Ok(())
    }

    fn log_result(&self, message: &DueMessage, error: Option<&str>) {
        let was_failing = self.outbox.is_failing.swap(error.is_some(), Ordering::Relaxed);
        match error {
            Some(error) if !was_failing => {
                tracing::warn!(
                    error,
                    message = message.id,
                    "the receiver of the approvals' webhook does not take messages; they are sent again"
                );
            }
            None if was_failing => tracing::info!("the approvals' webhook takes messages again"),
            _ => {}
        }
    }
}

fn due_messages(view: &Connection, now: i64) -> rusqlite::Result<Vec<DueMessage>> {
    let find = "SELECT id, body, attempts, expires FROM approval_message WHERE due <= ?1 ORDER BY due, id LIMIT ?2";
    let read = |row: &rusqlite::Row<'_>| {
        Ok(DueMessage {
            id: row.get(0)?,
            body: row.get(1)?,
            attempts: row.get(2)?,
            expires_ms: row.get(3)?,
        })
    };
    view.prepare_cached(find)?.query_map(params![now, MAX_PARALLEL], read)?.collect()
}

/// Returns the time until the next attempt, after a number of failed ones.
fn retry_delay(attempts: u32) -> Duration {
    let delay = FIRST_RETRY_DELAY.saturating_mul(1 << attempts.saturating_sub(1).min(10));
    delay.min(MAX_RETRY_DELAY)
}

/// The delay before the second attempt. Each further delay is twice as long. Our choice.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(2);

/// The longest delay between two attempts. Our choice: a question is open for half an hour by default.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(5);

/// The most attempts for one message: about an hour with the delays above.
const MAX_ATTEMPTS: u32 = 20;

/// The interval between two looks for messages that are due again.
const SEND_INTERVAL: Duration = Duration::from_secs(1);

/// The most messages that are sent at the same time.
const MAX_PARALLEL: u32 = 16;
