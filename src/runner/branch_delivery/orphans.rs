//! What runs have left in their workspaces whose processes were killed.
//!
//! Whoever has a branch knows that no run goes on there: the work is taken out as at a run's end, once it is certain that
//! nothing of the sandbox still runs.

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
    MountAccess, OwnerLabels, RootSource, SANDBOX_UID, SandboxLimits, WorkspaceMount,
};
use crate::sandbox::{self, OwnerProcess, SandboxDriver, SandboxSpec, embedded, sandbox_name};

/// Takes out what was left at a branch, for whoever has it.
///
/// # Errors
/// Something of it may still run, it cannot come out yet, or the outbox does not work.
pub(super) async fn recover_at_branch(
    relay: &Arc<DeliveryService>,
    repository: &RepositoryUrl,
    lease: &BranchLease,
) -> anyhow::Result<()> {
    let (owner, place, key) = (relay.clone(), repository.clone(), lease.branch().key().clone());
    for desk in spawn_blocking(move || owner.outbox().workspaces_at(&place, &key)).await?? {
        let taken = Box::pin(recover_workspace(relay, &desk)).await?;
        if let CollectOutcome::Left(desk) = taken
            && desk.due.is_some()
        {
            let (id, why) = (desk.id, desk.left.unwrap_or_default());
            return Err(delivery::DeliveryError::Waiting { id, why }.into());
        }
    }
    Ok(())
}

/// Takes out whatever was left and is due, but for branches that a run is at. What does not come out now is logged.
///
/// # Errors
/// The outbox does not work.
pub async fn recover_all(relay: &Arc<DeliveryService>) -> anyhow::Result<()> {
    let owner = relay.clone();
    let desks = spawn_blocking(move || owner.outbox().workspaces()).await??;
    let due = desks.into_iter().filter(|desk| desk.needs_collection() && desk.is_due());
    for desk in delivery::interleave_by_owner(due.collect(), |desk| desk.plan.grant.clone()) {
        match Box::pin(recover_unleased(relay, &desk.id)).await {
            // Its run has ended since they were listed, and has taken it out itself.
            Err(error) if is_unknown_job(&error) => (),
            Err(error) => {
                tracing::warn!(relay = desk.id, "what a run has left is not taken out: {error:#}");
            }
            Ok(_) => (),
        }
    }
    Ok(())
}

fn is_unknown_job(error: &anyhow::Error) -> bool {
    let found = error.downcast_ref();
    matches!(found, Some(delivery::DeliveryError::Outbox(outbox::OutboxError::Unknown(_))))
}

/// Takes out what a run has left, if it has.
///
/// # Errors
/// Something of it may still run, or the outbox does not work.
pub async fn recover_for_run(relay: &Arc<DeliveryService>, run: &str) -> anyhow::Result<()> {
    let owner = relay.clone();
    let desks = spawn_blocking(move || owner.outbox().workspaces()).await??;
    let is_its = |desk: &WorkspaceRow| desk.plan.facts.run == run && desk.needs_collection();
    for desk in desks.into_iter().filter(is_its) {
        match Box::pin(recover_unleased(relay, &desk.id)).await {
            // Who was at the branch has taken it out meanwhile.
            Err(error) if is_unknown_job(&error) => (),
            taken => drop(taken?),
        }
    }
    Ok(())
}

/// Takes up a row because somebody asks for it, or what is in a workspace. `None` where somebody else is at its branch.
///
/// # Errors
/// There is no such row, or it cannot be taken up here.
pub async fn retry_delivery(
    relay: &Arc<DeliveryService>,
    id: &str,
    new_rules: bool,
) -> anyhow::Result<Option<DeliveryStatus>> {
    let (owner, known) = (relay.clone(), id.to_owned());
    let desk = spawn_blocking(move || owner.outbox().workspace(&known)).await?;
    if desk.is_err() {
        return Ok(Box::pin(relay.retry_delivery(id, new_rules)).await?);
    }
    let taken = match Box::pin(recover_unleased(relay, id)).await {
        // Who was at the branch has taken it out meanwhile; the work may have a row of the same name.
        Err(error) if is_unknown_job(&error) => {
            return Ok(Box::pin(relay.retry_delivery(id, new_rules)).await?);
        }
        taken => taken?,
    };
    match taken {
        Some((_, CollectOutcome::Work(job))) => {
            match Box::pin(relay.retry_delivery(&job.id, new_rules)).await {
                // Its rules are not so old.
                Err(delivery::DeliveryError::OnItsWay) => {
                    Ok(Box::pin(relay.retry_delivery(&job.id, false)).await?)
                }
                retried => Ok(retried?),
            }
        }
        Some((_, CollectOutcome::Left(desk))) => Ok(Some(DeliveryStatus::from_workspace(&desk))),
        Some((desk, CollectOutcome::Nothing)) => {
            Ok(Some(DeliveryStatus::no_work(&desk, collect::NO_WORK_MESSAGE)))
        }
        None => Ok(None),
    }
}

/// `None` where somebody else is at the branch.
async fn recover_unleased(
    relay: &Arc<DeliveryService>,
    id: &str,
) -> anyhow::Result<Option<(WorkspaceRow, CollectOutcome)>> {
    let (owner, id) = (relay.clone(), id.to_owned());
    let taken = spawn_blocking(move || {
        let DeliveryPlan { repository, state, .. } = owner.outbox().workspace(&id)?.plan;
        let lease = owner.try_lease_branch(&repository, state.branch.key())?;
        // It may have been cleared until then.
        Ok((owner.outbox().workspace(&id)?, lease))
    });
    let (desk, lease) = match taken.await? {
        Err(delivery::DeliveryError::Relay(repo::RepoError::Busy { .. })) => return Ok(None),
        taken => taken?,
    };
    let taken = Box::pin(recover_workspace(relay, &desk)).await?;
    drop(lease);
    Ok(Some((desk, taken)))
}

async fn recover_workspace(
    relay: &Arc<DeliveryService>,
    desk: &WorkspaceRow,
) -> anyhow::Result<CollectOutcome> {
    remove_sandbox(&desk.plan)
        .await
        .context("something of an earlier run at this branch may still run")?;
    let DeliveryPlan { run_dir, facts, .. } = &desk.plan;
    tracing::info!(run = facts.run, relay = desk.id, "taking out what a run has left");
    let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
    let name = format!("left-{}", desk.id);
    let directory = RunDirectory::create(run_dir, &name, &owner)?;
    collect::restore_ownership(desk).await?;
    let spec = SandboxSpec {
        run: name,
        root: RootSource::Host,
        argv: vec![],
        uid: workspace_user(&desk.workspace),
        env: BTreeMap::new(),
        limits: SandboxLimits::default(),
        grace: Duration::ZERO,
        workspace: WorkspaceMount::Directory {
            path: desk.workspace.clone(),
            access: MountAccess::ReadOnly,
        },
        mounts: vec![],
        volumes: vec![],
        socket_dir: directory.socket_dir(),
        init: None,
        has_gateway: false,
    };
    let order = sandbox::SandboxRequest {
        spec,
        stamp: OwnerLabels {
            owner,
            run_dir: directory.parent(),
            deadline: SystemTime::now() + MAX_COLLECT_TIME,
        },
        directory: directory.path().to_owned(),
    };
    let driver = SandboxDriver::Embedded(embedded::EmbeddedDriverConfig::default());
    let owner = relay.clone();
    let extractor =
        spawn_blocking(move || WorkExtractor::for_delivery(&driver, &order, &owner)).await??;
    let taken = Box::pin(collect::collect_work(relay, &extractor, desk, None)).await?;
    if let CollectOutcome::Work(job) = &taken {
        relay.log_late_extraction(job).await?;
    }
    Ok(taken)
}

/// The user that has worked there. A directory that is root's own was never given to a sandbox.
fn workspace_user(workspace: &Path) -> u32 {
    let found = fs::symlink_metadata(workspace).map(|found| found.uid());
    found.ok().filter(|uid| *uid != 0).unwrap_or(SANDBOX_UID)
}

/// Takes away what is left of the sandbox.
async fn remove_sandbox(plan: &DeliveryPlan) -> anyhow::Result<()> {
    let sweep = LeftoverSweeper {
        docker_socket: plan.docker_socket.clone(),
        run_dir: plan.run_dir.clone(),
        apply: true,
        all: false,
    };
    let swept = sweep.sweep().await?;
    if let EngineSweepStatus::Failed(error) = swept.engine {
        return Err(error);
    }
    let own = sandbox_name(&plan.facts.run);
    let is_there = |found: &&SweepItem| match &found.fate {
        SweepOutcome::Removed | SweepOutcome::Elsewhere(_) => false,
        // It may be the resident sandbox that it was in.
        SweepOutcome::Stuck(_) if found.kind == LeftoverKind::Container => true,
        _ => found.name.starts_with(&own),
    };
    match swept.found.iter().find(is_there) {
        Some(SweepItem { name, fate, .. }) => bail!("`{name}` is there: {fate:?}"),
        None => Ok(()),
    }
}

/// All that git is given to take work out.
const MAX_COLLECT_TIME: Duration = Duration::from_hours(1);
