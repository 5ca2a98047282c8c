//! Deletes expired state: leftovers of delivered work, audit logs and recorded calls for which the operator set a
//! retention time, and the records of a grant's oldest runs.
//!
//! **Invariant:** an audit log or a recorded call is deleted only after its run is forgotten, and a log only if no stored
//! work refers to it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::RunServiceInner;
use crate::relay::delivery::outbox::{self, DeliveryOutbox};
use crate::relay::delivery::{DeliveryService, OUTBOX_FILE, sweep};
use crate::service::billing::store::{DeletedCalls, OldRuns};

impl RunServiceInner {
    /// Deletes all state that is expired at `now`, a trusted time. State that cannot be deleted now is tried again at the next purge.
    pub(super) async fn purge_expired(&self, now: SystemTime, stop: &CancellationToken) {
        if let Some(relay) = self.relay.load_full()
            && let Err(error) = self.sweep_relay(relay, now).await
        {
            tracing::error!("cannot remove expired relay state: {error:#}");
        }
        // A time that reaches further back than the clock can express makes nothing old.
        let subtract = |age| now.checked_sub(age);
        if let Some(before) = self.settings.audit_retention.and_then(subtract)
            && let Err(error) = self.purge_logs(before).await
        {
            tracing::error!("cannot remove old audit logs: {error:#}");
        }
        if let Some(before) = self.settings.billing_retention.and_then(subtract) {
            // A shutdown may interrupt the deletion between two runs; the next process continues.
            let deleted = stop.run_until_cancelled(Box::pin(self.delete_calls(before))).await;
            if let Some(Err(error)) = deleted {
                tracing::error!("cannot delete old calls from the billing records: {error:#}");
            }
        }
    }

    /// Removes the records of the oldest ended runs of each grant that keeps more than it may. A failure is logged: the
    /// next end and the next maintenance try again.
    pub(super) async fn remove_excess_records(&self) {
        let max_kept_bytes = self.settings.max_kept_bytes;
        match self.run_store.remove_records_beyond(max_kept_bytes).await {
            Ok(0) => (),
            Ok(runs) => tracing::info!(
                runs,
                max_kept_bytes,
                "removed outputs, results and events of the oldest runs of a grant"
            ),
            Err(error) => tracing::error!(%error, "cannot remove records of old runs"),
        }
    }

    /// Deletes the calls of runs that are forgotten and whose last call was before `before`.
    async fn delete_calls(&self, before: SystemTime) -> anyhow::Result<()> {
        let (mut deleted, mut after) = (DeletedCalls::default(), None);
        loop {
            // Page by page, so that the memory is bounded however many runs the billing store has.
            let OldRuns { runs, next } = self.billing.old_runs(before, after).await?;
            let remembered = self.run_store.known_ids(runs.clone()).await?;
            for run in runs.iter().filter(|run| !remembered.contains(*run)) {
                deleted += self.billing.delete_run(run, before).await?;
            }
            after = next;
            if after.is_none() {
                break;
            }
        }
        if deleted.calls > 0 {
            self.billing.shrink().await?;
            let DeletedCalls { calls, unreceipted, unpriced, conflicting } = deleted;
            tracing::info!(calls, "deleted calls that are older than `serve.billing_retention`");
            if deleted.has_flagged() {
                tracing::warn!(
                    unreceipted,
                    unpriced,
                    conflicting,
                    "among the deleted calls were some that were flagged"
                );
            }
        }
        Ok(())
    }

    async fn sweep_relay(
        &self,
        relay: Arc<DeliveryService>,
        now: SystemTime,
    ) -> anyhow::Result<()> {
        let (state, age) = (self.settings.state_dir.clone(), self.settings.retention);
        let sweep = move || {
            let kept = relay.expire_retained(now)?;
            anyhow::Ok((kept, sweep::sweep_relay_state(&state, relay.outbox(), age, now)?))
        };
        let (kept, swept) = spawn_blocking(sweep).await??;
        if kept > 0 {
            tracing::warn!(
                kept,
                "removed retained work that was held, failed or left longer ago than its maximum age"
            );
        }
        let sweep::RelaySweepReport { delivered, works, mirrors } = swept;
        if delivered + works + mirrors > 0 {
            tracing::info!(delivered, works, mirrors, "removed expired relay state");
        }
        Ok(())
    }

    async fn purge_logs(&self, before: SystemTime) -> anyhow::Result<()> {
        let (state, relay) = (&self.settings.state_dir, self.relay.load_full());
        if relay.is_none() && state.join(OUTBOX_FILE).exists() {
            tracing::warn!(
                "no audit log is removed: without a relay, the service cannot check which work is still stored"
            );
            return Ok(());
        }
        let directory = state.join("audit");
        let mut old = spawn_blocking(move || logs_older_than(&directory, before)).await??;
        // Three filters, in this order: the log is old enough, the run store has forgotten its run, and the outbox has no
        // work of its run.
        let mut kept = HashSet::new();
        for name in old.keys() {
            if self.run_store.find_run(name).await?.is_some() {
                kept.insert(name.clone());
            }
        }
        old.retain(|name, _| !kept.contains(name));
        if let Some(relay) = relay {
            old = spawn_blocking(move || unreferenced_logs(old, relay.outbox())).await??;
        }
        let logs = old.len();
        let gone = move || old.into_values().flatten().try_for_each(fs::remove_file);
        spawn_blocking(gone).await??;
        if logs > 0 {
            tracing::info!(logs, "removed audit logs that are older than `serve.audit_retention`");
        }
        Ok(())
    }
}

/// Audit logs by their owner, a run or a delivery in the outbox. Each log has its side files from a crash with it.
type LogsByOwner = HashMap<String, Vec<PathBuf>>;

/// Returns the logs that no work in the outbox refers to: neither as a delivery, nor as the run of a delivery or of a
/// workspace. Blocks.
fn unreferenced_logs(
    mut logs: LogsByOwner,
    outbox: &DeliveryOutbox,
) -> Result<LogsByOwner, outbox::OutboxError> {
    let mut known = HashSet::new();
    for row in outbox.workspaces()? {
        known.extend([row.id, row.plan.facts.run]);
    }
    for job in outbox.list_jobs(false)? {
        known.extend([job.id, job.request.facts.run]);
    }
    logs.retain(|name, _| !known.contains(name));
    Ok(logs)
}

/// Returns the logs whose last write was before `before`.
fn logs_older_than(directory: &Path, before: SystemTime) -> anyhow::Result<LogsByOwner> {
    let mut old = LogsByOwner::new();
    let entries = fs::read_dir(directory);
    for entry in entries.with_context(|| format!("`{}`", directory.display()))? {
        let entry = entry?;
        let file = entry.file_name();
        let Some((name, _)) = file.to_str().and_then(|file| file.split_once(".jsonl")) else {
            continue;
        };
        let written = entry.metadata().and_then(|found| found.modified());
        match written {
            Ok(written) if written < before => {
                old.entry(name.to_owned()).or_default().push(entry.path());
            }
            // A log that disappears between the listing and the check needs no removal.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => (),
        }
    }
    Ok(old)
}
