//! The end of a run: its calls end first, then its records are closed, and then its name can be used again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::{RunClosingState, RunManager, RunManagerShared};
use crate::base::task_group::ShutdownOutcome;
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::registry::PerWorkerGateways;
use crate::gateway::process::run_audit::finish_run;
use crate::gateway::run::control::RunControlState;
use crate::telemetry::metrics;

/// The delay before the first retry of writing the end of a run's records. The delay doubles with each retry.
const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The largest delay between two retries.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

impl RunManager {
    /// Closes a run. New calls are refused at once; open calls may finish within the drain timeout and are then
    /// aborted. After that, the process closes the run's records, and removes the run's metrics some minutes later.
    ///
    /// The closing goes on if the caller stops waiting. If the records cannot be closed, for example because the disk
    /// is full, the process retries in the background until the write succeeds or the process ends.
    ///
    /// # Errors
    /// Returns an error if this process serves one run only, the run is not open, or its records cannot be closed at
    /// once.
    pub async fn close_run(&self, run: &str) -> anyhow::Result<ShutdownOutcome> {
        self.check_can_open_runs()?;
        self.start_close(run)?.await.context("closing the run was given up")?
    }

    /// Starts closing a run, and returns a receiver of the result. Must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if the run is not open.
    pub(in crate::gateway::process) fn start_close(
        &self,
        run: &str,
    ) -> anyhow::Result<oneshot::Receiver<anyhow::Result<ShutdownOutcome>>> {
        let (host, name) = (Arc::clone(&self.0), run.to_owned());
        let gateways = {
            // One lock covers both changes: until its records are closed, a run is always seen as open or as closing.
            let mut closing = host.lock_closing();
            let gateways = host.registry.remove(run);
            let gateways = gateways.ok_or_else(|| anyhow!("run `{run}` is not open"))?;
            closing.insert(name.clone(), RunClosingState::Draining);
            gateways
        };
        let (result_sender, closed) = oneshot::channel();
        // A task of the process, not of the caller: the closing must not stop with a request that is dropped.
        self.0.tasks.spawn_task(async move {
            let first = Arc::clone(&host).close_gateways(Arc::clone(&gateways)).await;
            // The state is set before the caller gets the result. A caller that polls after an error sees
            // `WriteFailed`, and a caller whose run is closed can open the run's name again.
            if first.is_ok() {
                // The last owner of the gateways unlocks the audit log, so the gateways are dropped before the caller
                // is notified.
                drop(gateways);
                host.lock_closing().remove(&name);
                let _receiver_is_gone = result_sender.send(first);
            } else {
                host.lock_closing().insert(name.clone(), RunClosingState::WriteFailed);
                let _receiver_is_gone = result_sender.send(first);
                host.retry_writing_end(&gateways).await;
                host.lock_closing().remove(&name);
            }
        });
        Ok(closed)
    }

    /// Returns the progress of closing a run; `None` if the run is open, closed or unknown.
    pub fn closing_state(&self, run: &str) -> Option<RunClosingState> {
        self.0.lock_closing().get(run).copied()
    }

    /// Ends the calls of a run. New calls are refused at once, and open calls may finish within the drain timeout. The
    /// run's records stay open, so the caller must [close](Self::close_run) the run afterwards.
    pub(in crate::gateway::process) async fn end_run_calls(
        &self,
        gateway: &RunGateway,
    ) -> ShutdownOutcome {
        self.0.end_calls(gateway).await
    }

    /// Closes a run that was opened and never served. Blocks on the disk.
    ///
    /// # Errors
    /// Returns an error if the run is not open, or if its records cannot be closed.
    pub(in crate::gateway::process) fn close_unserved_run(&self, run: &str) -> anyhow::Result<()> {
        let gateways = self.0.registry.remove(run);
        let gateways = gateways.ok_or_else(|| anyhow!("run `{run}` is not open"))?;
        self.0.close_unserved(&gateways)
    }
}

impl RunManagerShared {
    async fn close_gateways(
        self: Arc<Self>,
        gateways: PerWorkerGateways,
    ) -> anyhow::Result<ShutdownOutcome> {
        let run = &gateways[0].run;
        let drained = self.end_calls(&gateways[0]).await;
        let name = run.identity.run.clone();
        tokio::task::spawn_blocking(move || self.finish_run_records(&gateways)).await??;
        tracing::info!(run = name, ?drained, "the run is closed");
        Ok(drained)
    }

    /// Refuses new calls of a run, and waits for open calls within the drain timeout.
    async fn end_calls(&self, RunGateway { run, tasks, .. }: &RunGateway) -> ShutdownOutcome {
        // The state comes first: after this line no call can start, so the number of open calls only falls.
        run.control.set_state(RunControlState::Draining);
        // Connections of a shared listener belong to the process, not to the run. Their calls learn from the run that
        // the time is up.
        let cut = async {
            tasks.abort_token().cancelled().await;
            run.control.abort_calls();
            // This branch never wins. It only runs beside the shutdown, until the last call has ended.
            std::future::pending().await
        };
        tokio::select! {
            drained = tasks.shut_down(self.drain_timeout) => drained,
            never = cut => never,
        }
    }

    /// Retries writing the end of a run's records until the write succeeds or the process ends.
    async fn retry_writing_end(&self, gateways: &PerWorkerGateways) {
        let RunGateway { run, metrics, .. } = &*gateways[0];
        let mut delay = INITIAL_RETRY_DELAY;
        loop {
            // If the process ends during the delay, one last attempt is made at once.
            let is_last =
                self.tasks.shutdown_token().run_until_cancelled(sleep(delay)).await.is_none();
            let records = Arc::clone(run);
            let written = tokio::task::spawn_blocking(move || records.audit.write_and_sync()).await;
            metrics.set_audit_lag(&run.audit.lag());
            let name = &run.identity.run;
            match written.map_err(anyhow::Error::from).and_then(|result| Ok(result?)) {
                Ok(()) => return tracing::info!(run = name, "the end of the audit log is written"),
                Err(error) if is_last => {
                    tracing::error!(run = name, "the end of the audit log is lost: {error:#}");
                    return;
                }
                Err(_) => delay = (delay * 2).min(MAX_RETRY_DELAY),
            }
        }
    }

    /// Closes a run that no client could call yet. Blocks on the disk.
    pub(super) fn close_unserved(&self, gateways: &PerWorkerGateways) -> anyhow::Result<()> {
        gateways[0].run.control.set_state(RunControlState::Draining);
        gateways[0].tasks.shutdown_token().cancel();
        self.finish_run_records(gateways)
    }

    /// Closes the records of a run whose calls have ended. Blocks on the disk.
    fn finish_run_records(&self, gateways: &PerWorkerGateways) -> anyhow::Result<()> {
        let RunGateway { run, metrics, access_log, .. } = &*gateways[0];
        access_log.write_repeats();
        let name = &run.identity.run;
        // The operator's handle goes first: no change may be recorded behind the final record.
        self.lock_opened().remove(name);
        let finished = finish_run(run);
        metrics.set_audit_lag(&run.audit.lag());
        // The series stay for a while, so that Prometheus scrapes the final values.
        self.metrics.schedule_removal(name, Instant::now() + metrics::SERIES_RETENTION);
        finished
    }
}
