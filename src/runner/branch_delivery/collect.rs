//! The collection of work from a workspace whose agent is gone. The outcome is written to the outbox: the work, no
//! work, or a workspace that is retained.
//!
//! The outcome is committed in one SQL statement. If the process dies before that statement, the collection starts
//! over. If the process dies after the statement, only the archiving of the workspace is missing. The next run at the
//! branch archives the workspace.

mod archive;
mod inspection;
mod special_files;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::extractor::WorkExtractor;
use crate::base::{dir_tree, disk};
use crate::relay::delivery::outbox::{
    DeliveryJob, DeliveryPlan, DeliveryRequest, PullRequestText, WorkspaceRow,
};
use crate::relay::delivery::{self, DeliveryService};
use crate::relay::repo::ArtifactDir;
use crate::relay::repo::extract_commands::AnnouncedBranch;
use crate::sandbox;
use inspection::{WorkspaceContent, WorkspaceInspection};

/// The outcome of a collection.
pub(super) enum CollectOutcome {
    /// The work is a job of the outbox, and its files are on this machine's disk.
    Work(Box<DeliveryJob>),
    Nothing,
    /// The workspace is retained, because it holds something that the relay cannot deliver, or cannot collect yet.
    Retained(Box<WorkspaceRow>),
}

/// Collects the commits of the run's branch. Retains the workspace if it holds other work, or if git fails.
///
/// # Errors
/// Returns an error if the outbox or the disk cannot be used.
pub(super) async fn collect_work(
    relay: &Arc<DeliveryService>,
    extractor: &WorkExtractor,
    row: &WorkspaceRow,
    words: Option<PullRequestText>,
) -> anyhow::Result<CollectOutcome> {
    // 1. An earlier process has committed the outcome and then died. Only the archiving is missing.
    if row.needs_archiving() {
        return Ok(CollectOutcome::Retained(archive_workspace(relay, row.clone()).await?));
    }
    let artifacts = ArtifactDir::create(&row.plan.artifacts)?;
    // 2. Git must not hang on a pipe or read a file outside of the workspace, so the workspace is checked before git
    //    runs.
    let workspace = row.workspace.clone();
    if let Err(error) =
        spawn_blocking(move || special_files::check_special_files(&workspace)).await?
    {
        let why = format!("{error:#}");
        tracing::warn!(run = row.plan.facts.run, why, "the work is not collected");
        return Ok(CollectOutcome::Retained(retain_workspace(relay, row, why).await?));
    }
    let mut inspection =
        WorkspaceInspection::new(extractor, (row, &artifacts), relay.extract_limits());
    let found = inspection.inspect().await;
    if !matches!(found, Ok(WorkspaceContent::Work { .. })) {
        // Nothing is delivered, so what git has printed about commits is not kept.
        artifacts.remove_work()?;
    }
    let why = match found {
        Ok(WorkspaceContent::Work { announced, rest: None }) => {
            let added = Box::pin(enqueue_work(relay, row, (announced, artifacts, None), words));
            return Ok(CollectOutcome::Work(added.await?));
        }
        Ok(WorkspaceContent::Work { announced, rest }) => {
            // 3. `artifacts` will hold the retained workspace, so the delivered commits get a directory of their own.
            let delivered_artifacts = relay.create_artifacts_dir()?;
            if let Err(error) = artifacts.move_work_to(&delivered_artifacts) {
                delivered_artifacts.discard()?;
                return Err(error.into());
            }
            // Ignored files are removed only from a workspace that is retained.
            inspection.remove_ignored_files().await;
            let added =
                Box::pin(enqueue_work(relay, row, (announced, delivered_artifacts, rest), words));
            return Ok(CollectOutcome::Work(added.await?));
        }
        Ok(WorkspaceContent::Nothing) => {
            clear_workspace(relay, row, artifacts.clone()).await?;
            return Ok(CollectOutcome::Nothing);
        }
        Ok(WorkspaceContent::Undeliverable(reason)) => reason.to_owned(),
        Err(error) => {
            tracing::error!(run = row.plan.facts.run, "cannot collect the work: {error:#}");
            // 4. An error of this machine, such as a full disk, may pass, so the collection is tried again later. An
            //    error of the work itself would come again, so the workspace is retained for a person.
            let wait =
                is_host_failure(&error).then(|| delivery::retry_delay(row.attempts)).flatten();
            if let Some(wait) = wait {
                return Ok(CollectOutcome::Retained(
                    reschedule(relay, row, (wait, format!("{error:#}"))).await?,
                ));
            }
            format!("{error:#}")
        }
    };
    inspection.remove_ignored_files().await;
    Ok(CollectOutcome::Retained(retain_workspace(relay, row, why).await?))
}

/// Adds the work to the outbox and, in the same statement, the reason for a workspace that is retained beside the work.
async fn enqueue_work(
    relay: &Arc<DeliveryService>,
    row: &WorkspaceRow,
    (announced, artifacts, rest): (AnnouncedBranch, ArtifactDir, Option<String>),
    words: Option<PullRequestText>,
) -> anyhow::Result<Box<DeliveryJob>> {
    let DeliveryPlan { repository, state, facts, rules, host, .. } = row.plan.clone();
    let request = DeliveryRequest {
        repository,
        state,
        announced,
        facts,
        rules: Some(rules),
        host: Some(host),
        artifacts: artifacts.directory().to_owned(),
        pull_request: words,
    };
    let (outbox, row) = (relay.clone(), row.clone());
    let add = move || {
        if let Some(why) = rest {
            let (job, left) = outbox.outbox().add_keeping_workspace(&request, &row, &why)?;
            return anyhow::Ok((job, Some(left)));
        }
        let job = outbox.enqueue(request)?;
        // The workspace is removed after the statement, so that no work is lost if this process dies in between.
        let is_gone =
            if row.is_exclusive() { dir_tree::remove_tree(&row.workspace) } else { Ok(()) };
        if let Err(error) = is_gone {
            // The workspace is removed later, together with the artifacts of the job.
            tracing::warn!(%error, relay = job.id, "cannot remove a collected workspace");
        }
        Ok((job, None))
    };
    let (job, left) = spawn_blocking(add).await??;
    if let Some(left) = left.filter(WorkspaceRow::needs_collection)
        && let Err(error) = archive_workspace(relay, left).await
    {
        // The next run at the branch archives the workspace. The delivery of this work does not depend on the archive.
        tracing::error!(relay = job.id, "cannot archive the workspace: {error:#}");
    }
    Ok(Box::new(job))
}

async fn clear_workspace(
    relay: &Arc<DeliveryService>,
    row: &WorkspaceRow,
    artifacts: ArtifactDir,
) -> anyhow::Result<()> {
    let (relay, row) = (relay.clone(), row.clone());
    let clear = move || {
        relay.outbox().remove_workspace(&row)?;
        Ok(artifacts.discard()?)
    };
    spawn_blocking(clear).await?
}

/// Returns true if this machine caused the error, and not the work. Then a later collection may succeed.
fn is_host_failure(error: &anyhow::Error) -> bool {
    disk::is_transient(error.as_ref())
        || error.chain().any(<dyn std::error::Error>::is::<sandbox::SandboxError>)
}

/// Leaves everything as it is until the next attempt. No run begins at the branch before that attempt.
async fn reschedule(
    relay: &Arc<DeliveryService>,
    row: &WorkspaceRow,
    (wait, why): (Duration, String),
) -> anyhow::Result<Box<WorkspaceRow>> {
    let (relay, row) = (relay.clone(), row.clone());
    let reschedule_row = move || relay.outbox().reschedule_workspace(&row, wait, &why);
    Ok(Box::new(spawn_blocking(reschedule_row).await??))
}

/// Gives a retained workspace back to its own user, so that git can read the workspace as that user.
pub(super) async fn restore_ownership(row: &WorkspaceRow) -> anyhow::Result<()> {
    if row.left.is_none() || !row.is_exclusive() {
        return Ok(());
    }
    let workspace = row.workspace.clone();
    Ok(spawn_blocking(move || archive::restore_ownership(&workspace)).await??)
}

/// Retains a workspace with a reason. Archives the workspace if other runs use its path.
async fn retain_workspace(
    relay: &Arc<DeliveryService>,
    row: &WorkspaceRow,
    why: String,
) -> anyhow::Result<Box<WorkspaceRow>> {
    let (outbox, row) = (relay.clone(), row.clone());
    let retain_row = move || outbox.outbox().retain_workspace(&row, &row.workspace, &why);
    let left = spawn_blocking(retain_row).await??;
    if left.needs_collection() { archive_workspace(relay, left).await } else { Ok(Box::new(left)) }
}

/// Archives the leftover content of a workspace that other runs use, too. A permanent failure is recorded as part of
/// the reason, and does not block the workspace's next run.
///
/// # Errors
/// Returns an error if the disk has a temporary failure, such as a full disk. Then the workspace stays as it is, and
/// the next run at the branch tries again.
async fn archive_workspace(
    relay: &Arc<DeliveryService>,
    row: WorkspaceRow,
) -> anyhow::Result<Box<WorkspaceRow>> {
    let artifacts = ArtifactDir::create(&row.plan.artifacts)?;
    let archived = archive::copy_or_move(&row.workspace, &artifacts).await;
    let mut why = row.left.clone().unwrap_or_default();
    if let Err(error) = archived {
        if disk::is_transient(error.as_ref()) {
            return Err(error.context("the workspace cannot be archived yet"));
        }
        tracing::error!(relay = row.id, "cannot archive a workspace: {error:#}");
        why = format!("not all of the workspace can be kept: {error:#}; {why}");
    }
    let (relay, archived_path) = (relay.clone(), artifacts.workspace_path());
    Ok(Box::new(
        spawn_blocking(move || relay.outbox().retain_workspace(&row, &archived_path, &why))
            .await??,
    ))
}

/// The message for a workspace without work.
pub(super) const NO_WORK_MESSAGE: &str = "nothing was committed";
