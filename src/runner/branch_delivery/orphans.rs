//! The recovery of work in the workspaces of runs whose process was killed.
//!
//! The holder of a branch's lease knows that no run uses the branch. So the lease's holder collects the work as at a
//! run's end, after it is certain that no process of the sandbox still runs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use tokio::task::spawn_blocking;

use super::collect::{self, CollectOutcome};
use super::extractor::WorkExtractor;
use crate::relay::delivery::outbox::{self, DeliveryPlan, WorkspaceRow};
use crate::relay::delivery::{self, DeliveryService, DeliveryStatus};
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{self, BranchLease};
use crate::runner::directory::RunDirectory;
use crate::runner::sweep::{
    EngineSweepStatus, LeftoverKind, LeftoverSweeper, SweepItem, SweepOutcome,
};
use crate::sandbox::spec::{
    MountAccess, OwnerLabels, RootSource, SANDBOX_UID, SandboxLimits, SandboxTask, WorkspaceMount,
};
use crate::sandbox::{
    self, OwnerProcess, SandboxDriver, SandboxSpec, container_mark, embedded, sandbox_name,
};

/// Collects the leftover work at a branch, on behalf of the holder of the branch's lease.
///
/// # Errors
/// Returns an error if a process of an earlier run may still run, if the work cannot be collected yet, or if the outbox
/// cannot be used.
pub(super) async fn recover_at_branch(
    relay: &Arc<DeliveryService>,
    repository: &RepositoryUrl,
    lease: &BranchLease,
) -> anyhow::Result<()> {
    let (service, url, key) = (relay.clone(), repository.clone(), lease.branch().key().clone());
    for row in spawn_blocking(move || service.outbox().workspaces_at(&url, &key)).await?? {
        let outcome = Box::pin(recover_workspace(relay, &row)).await?;
        // A rescheduled collection still needs the branch as it is. A workspace that is retained for good does not.
        if let CollectOutcome::Retained(row) = outcome
            && row.due.is_some()
        {
            let (id, why) = (row.id, row.left.unwrap_or_default());
            return Err(delivery::DeliveryError::Waiting { id, why }.into());
        }
    }
    Ok(())
}

/// Collects all leftover work that is due, except at branches that another run holds. Logs each failed collection.
///
/// # Errors
/// Returns an error if the outbox cannot be used.
pub async fn recover_all(relay: &Arc<DeliveryService>) -> anyhow::Result<()> {
    let service = relay.clone();
    let rows = spawn_blocking(move || service.outbox().workspaces()).await??;
    let due = rows.into_iter().filter(|row| row.needs_collection() && row.is_due());
    for row in delivery::interleave_by_owner(due.collect(), |row| row.plan.grant.clone()) {
        match Box::pin(recover_unleased(relay, &row.id)).await {
            // The run has ended since the list was read, and has collected the work itself.
            Err(error) if is_unknown_job(&error) => (),
            Err(error) => {
                tracing::warn!(relay = row.id, "cannot collect a run's leftover work: {error:#}");
            }
            Ok(_) => (),
        }
    }
    Ok(())
}

fn is_unknown_job(error: &anyhow::Error) -> bool {
    let found = error.downcast_ref();
    matches!(found, Some(delivery::DeliveryError::Outbox(outbox::OutboxError::NoSuchDelivery(_))))
}

/// Collects the leftover work of a run, if there is any.
///
/// # Errors
/// Returns an error if a process of the run may still run, or if the outbox cannot be used.
pub async fn recover_for_run(relay: &Arc<DeliveryService>, run: &str) -> anyhow::Result<()> {
    let service = relay.clone();
    let rows = spawn_blocking(move || service.outbox().workspaces()).await??;
    let is_of_run = |row: &WorkspaceRow| row.plan.facts.run == run && row.needs_collection();
    for row in rows.into_iter().filter(is_of_run) {
        match Box::pin(recover_unleased(relay, &row.id)).await {
            // The branch's holder has collected the work since the list was read.
            Err(error) if is_unknown_job(&error) => (),
            recovered => drop(recovered?),
        }
    }
    Ok(())
}

/// Retries a delivery, or the collection of a workspace, at an operator's request. Returns `None` if another run holds
/// the workspace's branch.
///
/// # Errors
/// Returns an error if no delivery and no workspace has the ID, or if the retry fails.
pub async fn retry_delivery(
    relay: &Arc<DeliveryService>,
    id: &str,
    new_rules: bool,
) -> anyhow::Result<Option<DeliveryStatus>> {
    let (service, known) = (relay.clone(), id.to_owned());
    let workspace = spawn_blocking(move || service.outbox().workspace(&known)).await?;
    // 1. An ID that names no workspace is that of a delivery.
    if workspace.is_err() {
        return Ok(Box::pin(relay.retry_delivery(id, new_rules)).await?);
    }
    let recovered = match Box::pin(recover_unleased(relay, id)).await {
        // 2. The branch's holder has collected the work since the lookup. A delivery of the same ID may exist now.
        Err(error) if is_unknown_job(&error) => {
            return Ok(Box::pin(relay.retry_delivery(id, new_rules)).await?);
        }
        recovered => recovered?,
    };
    match recovered {
        Some((_, CollectOutcome::Work(job))) => {
            match Box::pin(relay.retry_delivery(&job.id, new_rules)).await {
                // 3. The job was made a moment ago with the current rules, so new rules do not apply.
                Err(delivery::DeliveryError::InProgress) => {
                    Ok(Box::pin(relay.retry_delivery(&job.id, false)).await?)
                }
                retried => Ok(retried?),
            }
        }
        Some((_, CollectOutcome::Retained(workspace))) => {
            Ok(Some(DeliveryStatus::from_workspace(&workspace)))
        }
        Some((workspace, CollectOutcome::Nothing)) => {
            Ok(Some(DeliveryStatus::no_work(&workspace, collect::NO_WORK_MESSAGE)))
        }
        None => Ok(None),
    }
}

/// Takes the branch's lease and recovers a workspace. Returns `None` if another holder has the lease.
async fn recover_unleased(
    relay: &Arc<DeliveryService>,
    id: &str,
) -> anyhow::Result<Option<(WorkspaceRow, CollectOutcome)>> {
    let (service, id) = (relay.clone(), id.to_owned());
    let lookup = spawn_blocking(move || {
        let DeliveryPlan { repository, state, .. } = service.outbox().workspace(&id)?.plan;
        let lease = service.try_lease_branch(&repository, state.branch.key())?;
        // The row is read again under the lease: another holder may have cleared the workspace before.
        Ok((service.outbox().workspace(&id)?, lease))
    });
    let (row, lease) = match lookup.await? {
        Err(delivery::DeliveryError::Relay(repo::RepoError::BranchInUse { .. })) => {
            return Ok(None);
        }
        found => found?,
    };
    let outcome = Box::pin(recover_workspace(relay, &row)).await?;
    drop(lease);
    Ok(Some((row, outcome)))
}

async fn recover_workspace(
    relay: &Arc<DeliveryService>,
    row: &WorkspaceRow,
) -> anyhow::Result<CollectOutcome> {
    // 1. No process of the killed run may write to the workspace while git reads it.
    remove_sandbox(&row.plan)
        .await
        .context("a process of an earlier run at this branch may still exist")?;
    let DeliveryPlan { run_dir, facts, .. } = &row.plan;
    tracing::info!(run = facts.run, relay = row.id, "collecting a run's leftover work");
    // 2. The collecting sandbox gets a run directory of its own, as the run's directory is removed.
    let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
    let name = format!("left-{}", row.id);
    let directory = RunDirectory::create(run_dir, &name, &owner)?;
    collect::restore_ownership(row).await?;
    let spec = SandboxSpec {
        run: name,
        root: RootSource::Host,
        argv: vec![],
        uid: workspace_user(&row.workspace),
        env: BTreeMap::new(),
        limits: SandboxLimits::default(),
        grace: Duration::ZERO,
        workspace: WorkspaceMount::Directory {
            path: row.workspace.clone(),
            access: MountAccess::ReadOnly,
        },
        mounts: vec![],
        volumes: vec![],
        socket_dir: directory.socket_dir(),
        init: None,
        has_tunnels: false,
        task: SandboxTask::Commands,
    };
    let request = sandbox::SandboxRequest {
        spec,
        labels: OwnerLabels {
            owner,
            run_dir: directory.parent(),
            deadline: SystemTime::now() + MAX_COLLECT_TIME,
        },
        directory: directory.path().to_owned(),
    };
    // 3. The row does not store the run's driver; the embedded driver needs no engine and no image.
    let driver = SandboxDriver::Embedded(embedded::EmbeddedDriverConfig::default());
    let service = relay.clone();
    let extractor =
        spawn_blocking(move || WorkExtractor::for_delivery(&driver, &request, &service)).await??;
    let outcome = Box::pin(collect::collect_work(relay, &extractor, row, None)).await?;
    if let CollectOutcome::Work(job) = &outcome {
        // The run's audit log is closed, so the collection is recorded in the row's own log.
        relay.log_late_extraction(job).await?;
    }
    Ok(outcome)
}

/// Returns the user that worked in the workspace. A directory of root was never given to a sandbox, so its user is the
/// default user.
fn workspace_user(workspace: &Path) -> u32 {
    let found = fs::symlink_metadata(workspace).map(|found| found.uid());
    found.ok().filter(|uid| *uid != 0).unwrap_or(SANDBOX_UID)
}

/// Removes the leftovers of the run's sandbox.
///
/// # Errors
/// Returns an error if a leftover of the sandbox remains, or if the engine cannot be asked for a container that may be the
/// sandbox.
async fn remove_sandbox(plan: &DeliveryPlan) -> anyhow::Result<()> {
    let sweep = LeftoverSweeper {
        docker_socket: plan.docker_socket.clone(),
        run_dir: plan.run_dir.clone(),
        apply: true,
        all: false,
    };
    let swept = sweep.sweep().await?;
    // The container of a dead run, or a long-running sandbox of a dead process, has a marked directory until the engine
    // has removed the container. So the engine does not matter to machines that use the embedded driver alone.
    let may_be_container = |item: &SweepItem| {
        matches!(item.outcome, SweepOutcome::RemoveFailed(_))
            && container_mark::exists(&plan.run_dir.join(&item.name))
    };
    if let EngineSweepStatus::Failed(error) = swept.engine
        && swept.found.iter().any(may_be_container)
    {
        return Err(error);
    }
    let own = sandbox_name(&plan.facts.run);
    let is_there = |found: &&SweepItem| match &found.outcome {
        SweepOutcome::Removed | SweepOutcome::OtherInstallation(_) => false,
        // The container may be the long-running sandbox that the run was in, whose name does not contain the run's ID.
        SweepOutcome::RemoveFailed(_) if found.kind == LeftoverKind::Container => true,
        _ => found.name.starts_with(&own),
    };
    match swept.found.iter().find(is_there) {
        Some(SweepItem { name, outcome, .. }) => bail!("`{name}` is there: {outcome:?}"),
        None => Ok(()),
    }
}

/// The maximum time of one recovered collection (our choice).
const MAX_COLLECT_TIME: Duration = Duration::from_hours(1);
