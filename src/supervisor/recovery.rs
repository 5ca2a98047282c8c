//! What another process has left: each of its runs is brought to a definite end.
//!
//! A run that had not begun begins now. One that had begun has lost its gateway with the process, so it cannot go on:
//! what is left of it is taken away, its log is repaired and closed, its calls are booked, and it ends as interrupted:
//! at once, or, where its work is on its way to a branch, when that is there.

use std::time::Duration;

use anyhow::Context;

use super::bill::Bill;
use super::{Supervisor, Wanted, ending};
use crate::audit::seal::Seal;
use crate::journal::{Ended, Kind, Row, State};

impl Supervisor {
    /// Before anything new begins.
    pub(super) async fn recover(&self) -> anyhow::Result<()> {
        let rows = self.0.journal.open_rows().await?;
        if rows.is_empty() {
            return Ok(());
        }
        tracing::info!(runs = rows.len(), "an earlier process has left runs");
        self.sweep().await;
        let mut left = vec![];
        for row in rows {
            let run = row.id.clone();
            let recovered = Box::pin(self.recover_one(row)).await;
            left.extend(recovered.with_context(|| format!("run `{run}`"))?);
        }
        self.see_through(left);
        Ok(())
    }

    /// Returns what has to be delivered before it can end. Whoever starts the service is told what cannot be written, and
    /// does not wait for it.
    async fn recover_one(&self, row: Row) -> anyhow::Result<Option<Bill>> {
        let feed = self.0.journal.resume(&row).await?;
        let wanted = self.0.journal.wanted(&row.id).await?;
        let wanted: Wanted = serde_json::from_str(&wanted)?;
        if row.state == State::Queued {
            // More may have been left than are allowed now: they wait for each other.
            self.conduct(wanted, feed, None);
            return Ok(None);
        }
        if let Err(error) = self.close_log(&wanted, &row.id).await {
            tracing::error!(run = row.id, "the audit log cannot be closed: {error:#}");
        }
        let told = self.0.journal.saved(&row.id, Kind::UsageReport).await?;
        let mut bill = self.0.bill(&feed).after(&told);
        bill.try_take().await?;
        if self.0.has_work(&row.id).await? {
            return Ok(Some(bill));
        }
        let ended = ending::interrupted(None, &feed);
        let ended = Ended { log: self.0.seal(&row.id).await, ..ended };
        self.0.try_end(&mut bill, &ended).await?;
        Ok(None)
    }

    /// Settles what was open, as carefully as can be told.
    async fn close_log(&self, wanted: &Wanted, run: &str) -> anyhow::Result<()> {
        let log = self.audit_log(run);
        if !log.exists() {
            return Ok(());
        }
        if Seal::of(&log, run, &self.public_key()).is_ok() {
            return Ok(());
        }
        let config = wanted.config(run, &self.0.settings, &self.0.config.load());
        self.0.seats.finish_abandoned(config).await
    }

    async fn sweep(&self) {
        match self.0.settings.sweep().sweep_within(PATIENCE).await {
            Ok(swept) => swept.log(),
            Err(error) => tracing::warn!("cannot sweep: {error:#}"),
        }
    }
}

/// How long a start waits for directories of runs that are gone; the service's own sweep does the rest.
const PATIENCE: Duration = Duration::from_secs(5);
