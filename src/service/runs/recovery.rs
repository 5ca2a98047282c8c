//! What another process has left: each of its runs is brought to a definite end.
//!
//! A run that had not begun begins now. One that had begun has lost its gateway with the process, so it cannot go on:
//! what is left of it is taken away, its log is repaired and closed, its calls are booked, and it ends as interrupted:
//! at once, or, where its work is on its way to a branch, when that is there.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::usage_recorder::UsageRecorder;
use super::{RunService, RunSubmission, outcome};
use crate::relay::delivery;
use crate::service::store::{RunEnd, RunEventKind, RunFilter, RunPhase, RunRow};

impl RunService {
    /// Before anything new begins.
    pub(super) async fn recover_runs(&self) -> anyhow::Result<()> {
        self.report_newer_logs().await?;
        let rows = self.0.journal.unfinished_runs().await?;
        if rows.is_empty() {
            return Ok(());
        }
        tracing::info!(runs = rows.len(), "an earlier process has left runs");
        self.sweep_leftovers().await;
        let mut left = vec![];
        for row in rows {
            let (run, grant) = (row.id.clone(), row.grant.clone());
            let recovered = Box::pin(self.recover_run(row)).await;
            let recovered = recovered.with_context(|| format!("run `{run}`"))?;
            left.extend(recovered.map(|bill| (grant, bill)));
        }
        let left = delivery::interleave_by_owner(left, |(grant, _)| grant.clone());
        self.finish_pending(left.into_iter().map(|(_, bill)| bill).collect());
        Ok(())
    }

    /// Returns what has to be delivered before it can end, or has a log that cannot be closed yet. Whoever starts the service is told what cannot be written, and
    /// does not wait for it.
    async fn recover_run(&self, row: RunRow) -> anyhow::Result<Option<UsageRecorder>> {
        let feed = self.0.journal.resume_run(&row).await?;
        let wanted = self.0.journal.submission(&row.id).await?;
        let wanted: RunSubmission = serde_json::from_str(&wanted)?;
        let has_log = has_records(&self.audit_log_path(&row.id))?;
        let is_old = row.state == RunPhase::Queued && has_log;
        if is_old {
            tracing::warn!(
                run = row.id,
                "the run has begun before, by its audit log: the database is older than that, and the run is not begun again"
            );
        } else if row.state == RunPhase::Queued {
            let reserved = self.0.journal.reserved_money(&row.id).await?;
            // More may have been left than are allowed now: they wait for each other.
            self.spawn_run(wanted.with_reserved_cost(reserved), feed, None);
            return Ok(None);
        }
        let log = self.0.seal_log(&row.id).await;
        if let Err(error) = &log {
            tracing::error!(run = row.id, "the audit log cannot be closed yet: {error:#}");
        }
        let told = self.0.journal.stored_events(&row.id, RunEventKind::UsageReport).await?;
        let mut bill = self.0.usage_recorder(&feed).skipping_reported(&told);
        bill.try_record_new().await?;
        let (false, Ok(log)) = (self.0.has_pending_work(&row.id).await?, log) else {
            return Ok(Some(bill));
        };
        let ended = outcome::interrupted_end(None, &feed);
        let ended = RunEnd { log, ..ended };
        self.0.try_persist_end(&mut bill, &ended).await?;
        Ok(None)
    }

    /// Warns of audit logs whose runs are newer than the last run of the database, and not in it: the database was restored
    /// from a backup, and does not know what these runs have spent.
    async fn report_newer_logs(&self) -> anyhow::Result<()> {
        let newest =
            self.0.journal.list_runs(RunFilter { limit: 1, ..RunFilter::default() }).await?;
        let Some(newest) = newest.into_iter().next() else { return Ok(()) };
        let directory = self.0.settings.state_dir.join("audit");
        let newer = tokio::task::spawn_blocking(move || newer_runs(&directory, &newest.id));
        let mut logs = 0;
        // Of runs that came at once, the one that was accepted last may have a lower id than others.
        for run in newer.await?.context("the audit logs cannot be listed")? {
            logs += u32::from(self.0.journal.find_run(&run).await?.is_none());
        }
        if logs > 0 {
            tracing::warn!(
                logs,
                "audit logs are newer than every run in the database, as after the restore of a backup: \
                 `cogni-gateway billing record` takes them into the books, and grants that were revoked since are good again"
            );
        }
        Ok(())
    }

    async fn sweep_leftovers(&self) {
        match self.0.settings.leftover_sweeper().sweep_with_timeout(SWEEP_TIMEOUT).await {
            Ok(swept) => swept.log_items(),
            Err(error) => tracing::warn!("cannot sweep: {error:#}"),
        }
    }
}

/// Returns whether an audit log has a record. A log without one, of a process that died before it had written the first, is removed.
fn has_records(log: &Path) -> io::Result<bool> {
    match fs::metadata(log) {
        Ok(found) if found.len() > 0 => Ok(true),
        Ok(_) => fs::remove_file(log).map(|()| false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the runs with an audit log whose ids are above this one. Run ids sort by time, to the millisecond.
fn newer_runs(directory: &Path, newest: &str) -> io::Result<Vec<String>> {
    let mut runs = vec![];
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let run = name.to_str().and_then(|name| name.strip_suffix(".jsonl"));
        let is_newer = |run: &&str| run.starts_with("run-") && *run > newest;
        runs.extend(run.filter(is_newer).map(str::to_owned));
    }
    Ok(runs)
}

/// How long a start waits for directories of runs that are gone; the service's own sweep does the rest.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
