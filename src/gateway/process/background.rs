//! The background tasks of a process: flushing audit logs, and closing idle upstream connections.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::base::task_group::TaskGroup;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::UpstreamClient;

/// Starts a task that writes out a run's buffered audit records until the run ends.
pub(super) fn spawn_flush_loop(run: Arc<AgentRun>, tasks: &TaskGroup) {
    let closing = tasks.shutdown_token().clone();
    tasks.spawn_task(async move { flush_until(&run, &closing).await });
}

/// Writes out a run's buffered audit records until `end` is cancelled.
pub(super) async fn flush_until(run: &AgentRun, end: &CancellationToken) {
    let flush = async {
        loop {
            // The loop sleeps while the buffer is empty. The delay then collects several records for one write.
            run.audit.wait_for_data().await;
            sleep(FLUSH_INTERVAL).await;
            run.audit.flush_buffered();
        }
    };
    end.run_until_cancelled(flush).await;
}

/// Starts a task that closes idle upstream connections until the process ends.
pub(super) fn spawn_idle_closer(upstream: Arc<UpstreamClient>, tasks: &TaskGroup) {
    let closing = tasks.shutdown_token().clone();
    tasks.spawn_task(async move {
        closing.run_until_cancelled(upstream.close_idle_connections()).await;
    });
}

/// The longest time that a record waits for its write to the kernel, unless another write takes it along before.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
