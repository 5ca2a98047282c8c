//! The background tasks of a process: flushing audit logs, and closing idle upstream connections.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::base::task_group::TaskGroup;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::UpstreamClient;

/// Writes out what is buffered, until the run ends.
pub(super) fn spawn_flush_loop(run: Arc<AgentRun>, tasks: &TaskGroup) {
    let closing = tasks.shutdown_token().clone();
    tasks.spawn_task(async move { flush_until(&run, &closing).await });
}

/// Writes out what is buffered of a run, until `end`.
pub(super) async fn flush_until(run: &AgentRun, end: &CancellationToken) {
    let flush = async {
        loop {
            run.audit.wait_for_data().await;
            sleep(FLUSH_INTERVAL).await;
            run.audit.flush_buffered();
        }
    };
    end.run_until_cancelled(flush).await;
}

/// Closes connections that nobody has used for too long, until the process ends.
pub(super) fn spawn_idle_closer(upstream: Arc<UpstreamClient>, tasks: &TaskGroup) {
    let closing = tasks.shutdown_token().clone();
    tasks.spawn_task(async move {
        closing.run_until_cancelled(upstream.close_idle_connections()).await;
    });
}

/// How late a record may reach the kernel when nothing pushes it out before.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
