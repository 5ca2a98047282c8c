//! Brings the runs of an earlier process to a definite end.
//!
//! A run that had not begun is queued again, unless a client had cancelled the run. A run that had begun lost its gateway with the process, so the run cannot
//! continue. The service removes the run's leftovers, repairs and closes its audit log, records its calls, and ends the
//! run as interrupted. If the run's work is being delivered, the run ends after the delivery.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tokio::time::Instant;

use super::execute::RunFailure;
use super::queued_run::QueuedRun;
use super::run_queue::GrantRunLimits;
use super::usage_recorder::UsageRecorder;
use super::{RunService, outcome};
use crate::relay::delivery;
use crate::service::store::{EventFeed, RunEnd, RunEventKind, RunFilter, RunPhase, RunRow};

impl RunService {
    /// Recovers the unfinished runs of an earlier process. The caller does so before any new run begins.
    pub(super) async fn recover_runs(&self) -> anyhow::Result<()> {
        self.report_newer_logs().await?;
        let rows = self.0.run_store.unfinished_runs().await?;
        if rows.is_empty() {
            return Ok(());
        }
        tracing::info!(runs = rows.len(), "an earlier process left unfinished runs");
        self.sweep_leftovers().await;
        let mut left = vec![];
        for row in rows {
            let (run, grant) = (row.id.clone(), row.grant.clone());
            let recovered = Box::pin(self.recover_run(row)).await;
            let recovered = recovered.with_context(|| format!("run `{run}`"))?;
            left.extend(recovered.map(|bill| (grant, bill)));
        }
        // One grant with many deliveries must not delay the deliveries of the other grants.
        let left = delivery::interleave_by_owner(left, |(grant, _)| grant.clone());
        self.finish_pending(left.into_iter().map(|(_, bill)| bill).collect());
        Ok(())
    }

    /// Recovers one run. Returns its recorder if the run's work must be delivered first, or if its audit log cannot be
    /// closed yet. If the billing store or the run store cannot be written, the start of the service fails with the error.
    async fn recover_run(&self, row: RunRow) -> anyhow::Result<Option<UsageRecorder>> {
        let feed = self.0.run_store.resume_run(&row).await?;
        let has_log = has_records(&self.audit_log_path(&row.id))?;
        // A queued run has no records by definition. If there are some, the database was restored from a backup, and a
        // second start would do the work twice.
        let is_old = row.state == RunPhase::Queued && has_log;
        if is_old {
            tracing::warn!(
                run = row.id,
                "the run has begun before, by its audit log: the database is older than that, and the run is not begun again"
            );
        } else if row.state == RunPhase::Queued && row.cancelled_ms.is_some() {
            let mut bill = self.0.usage_recorder(&feed);
            self.0
                .try_persist_end(&mut bill, &self.0.run_end(Err(RunFailure::Cancelled), &feed))
                .await?;
            return Ok(None);
        } else if row.state == RunPhase::Queued {
            self.queue_again(&row, feed).await;
            return Ok(None);
        }
        // From here on, the run had begun. Its log is closed first, because closing settles the calls that are recorded
        // next.
        let log = self.0.seal_log(&row.id).await;
        if let Err(error) = &log {
            tracing::error!(run = row.id, "the audit log cannot be closed yet: {error:#}");
        }
        let told = self.0.run_store.stored_events(&row.id, RunEventKind::UsageReport).await?;
        let mut bill = self.0.usage_recorder(&feed).skipping_reported(&told);
        bill.try_record_new().await?;
        // The run ends here only if no delivery is pending and its log is sealed; otherwise the background task ends
        // the run.
        let (false, Ok(log)) = (self.0.has_pending_work(&row.id).await?, log) else {
            return Ok(Some(bill));
        };
        let ended = match row.cancelled_ms {
            Some(_) => self.0.run_end(Err(RunFailure::Cancelled), &feed),
            None => outcome::interrupted_end(None, &feed),
        };
        let ended = RunEnd { log, ..ended };
        self.0.try_persist_end(&mut bill, &ended).await?;
        Ok(None)
    }

    /// Puts a run that had not begun back into the queue. The time for which the run has waited already counts.
    async fn queue_again(&self, row: &RunRow, feed: EventFeed) {
        // A grant that is not in the database has no limits: the service requires no grants, or did so.
        let terms = self.0.grants.find_grant(&row.grant).await.map(|grant| grant.terms);
        let limits = terms
            .map_or_else(|_| GrantRunLimits::default(), |terms| GrantRunLimits::from_terms(&terms));
        let created = Duration::from_millis(row.created_ms.max(0).cast_unsigned());
        let since = UNIX_EPOCH + created;
        let waited = SystemTime::now().duration_since(since).unwrap_or_default();
        let entry = self.0.queue.enqueue_recovered((&row.grant, &row.id), limits, since);
        let max_wait = self.0.settings.max_queue_wait;
        // The run could not begin while the service was down, so a free place is offered to the run before its time ends.
        let left = max_wait.saturating_sub(waited).max(MIN_WAIT_AFTER_START.min(max_wait));
        let wait_ends = Instant::now() + left;
        self.spawn_run(QueuedRun { entry, feed, wait_ends }, None);
    }

    /// Warns about audit logs whose runs are newer than the database's last run and not in the database. Such a
    /// database was restored from a backup, and lacks the spending of these runs.
    async fn report_newer_logs(&self) -> anyhow::Result<()> {
        let newest =
            self.0.run_store.list_runs(RunFilter { limit: 1, ..RunFilter::default() }).await?;
        let Some(newest) = newest.into_iter().next() else { return Ok(()) };
        let directory = self.0.settings.audit_dir();
        let newer = tokio::task::spawn_blocking(move || newer_runs(&directory, &newest.id));
        let mut logs = 0;
        // Runs of the same millisecond may have ids in another order than their rows, so each run is looked up.
        for run in newer.await?.context("the audit logs cannot be listed")? {
            logs += u32::from(self.0.run_store.find_run(&run).await?.is_none());
        }
        if logs > 0 {
            tracing::warn!(
                logs,
                "audit logs are newer than every run in the database, as after the restore of a backup: \
                 `cogni-gateway billing record` takes them into the billing store, and grants that were revoked after the backup are valid again"
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

/// Returns true if an audit log has a record. An empty log, which a process left that died before its first record, is
/// removed.
fn has_records(log: &Path) -> io::Result<bool> {
    match fs::metadata(log) {
        Ok(found) if found.len() > 0 => Ok(true),
        Ok(_) => fs::remove_file(log).map(|()| false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the runs that have an audit log and an id above `newest`. Run ids sort by time, to the millisecond.
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

/// The minimum time that a waiting run of an earlier process has for its turn. Our choice.
const MIN_WAIT_AFTER_START: Duration = Duration::from_mins(1);

/// The maximum time that a start waits for the sweep: for the answers of an engine, and for the removal of leftover run
/// directories. Our choice; the service's periodic sweep does the rest.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
