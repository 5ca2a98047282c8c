//! From a workspace whose agent is gone to the outbox: the work, or that there is none, or what stays where it is.
//!
//! One statement to the outbox says all that has come of it. Whoever is cut off before has done nothing, and it is begun
//! again; whoever is cut off after has only to put away what the next run would replace, which the next one at the branch
//! does then.

mod archive;
mod ignored_files;
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
use crate::relay::repo::extract_commands::{
    AnnouncedBranch, ExtractCommandSet, RELAY_REPOSITORY_TARGET,
};
use crate::relay::repo::{ArtifactDir, ObjectId};
use crate::sandbox::{self, spec::WORKSPACE_TARGET};

/// What has come of it.
pub(super) enum CollectOutcome {
    /// It is a row, and on this machine's disk.
    Work(Box<DeliveryJob>),
    Nothing,
    /// Something is there that the relay does not deliver.
    Left(Box<WorkspaceRow>),
}

/// What is in a workspace.
enum WorkspaceContent {
    Work(CollectedWork),
    Nothing,
    /// Files, or commits on other branches.
    Other(&'static str),
}

/// What is on the branch.
struct CollectedWork {
    announced: AnnouncedBranch,
    /// Where it lies now.
    place: ArtifactDir,
    /// Why the workspace is kept beside it.
    rest: Option<String>,
}

/// Takes out what is on the branch. What is not there, or does not come out, is kept with the workspace.
///
/// # Errors
/// The outbox or the disk cannot be used.
pub(super) async fn collect_work(
    relay: &Arc<DeliveryService>,
    extractor: &WorkExtractor,
    desk: &WorkspaceRow,
    words: Option<PullRequestText>,
) -> anyhow::Result<CollectOutcome> {
    if desk.needs_archiving() {
        return Ok(CollectOutcome::Left(archive_workspace(relay, desk.clone()).await?));
    }
    let place = ArtifactDir::create(&desk.plan.artifacts)?;
    let commands = ExtractCommandSet::new(
        &desk.plan.state,
        WORKSPACE_TARGET,
        RELAY_REPOSITORY_TARGET,
        relay.extract_limits(),
    );
    let workspace = desk.workspace.clone();
    if let Err(error) =
        spawn_blocking(move || special_files::check_special_files(&workspace)).await?
    {
        let why = format!("{error:#}");
        tracing::warn!(run = desk.plan.facts.run, why, "git is not asked to take the work out");
        return Ok(CollectOutcome::Left(retain_workspace(relay, desk, why).await?));
    }
    let remove_ignored =
        ignored_files::remove_ignored(extractor, &place, (desk, &commands.ignored));
    let why = match inspect_workspace(relay, extractor, (desk, &commands), &place).await {
        Ok(WorkspaceContent::Work(work)) => {
            if work.rest.is_some() {
                remove_ignored.await;
            }
            let added = Box::pin(enqueue_work(relay, desk, work, words));
            return Ok(CollectOutcome::Work(added.await?));
        }
        Ok(WorkspaceContent::Nothing) => {
            clear_workspace(relay, desk, place.clone()).await?;
            return Ok(CollectOutcome::Nothing);
        }
        Ok(WorkspaceContent::Other(what)) => what.to_owned(),
        Err(error) => {
            tracing::error!(run = desk.plan.facts.run, "cannot take the work out: {error:#}");
            let wait =
                is_host_failure(&error).then(|| delivery::retry_delay(desk.attempts)).flatten();
            if let Some(wait) = wait {
                return Ok(CollectOutcome::Left(
                    reschedule(relay, desk, (wait, format!("{error:#}"))).await?,
                ));
            }
            format!("{error:#}")
        }
    };
    remove_ignored.await;
    Ok(CollectOutcome::Left(retain_workspace(relay, desk, why).await?))
}

async fn inspect_workspace(
    relay: &Arc<DeliveryService>,
    extractor: &WorkExtractor,
    (desk, commands): (&WorkspaceRow, &ExtractCommandSet),
    place: &ArtifactDir,
) -> anyhow::Result<WorkspaceContent> {
    let facts = extractor.capture_output(place, &commands.facts).await?;
    let Some(announced) = AnnouncedBranch::parse(&facts, 0)? else {
        if !extractor.capture_output(place, &commands.elsewhere).await?.is_empty() {
            return Ok(WorkspaceContent::Other(COMMITS_ELSEWHERE_MESSAGE));
        }
        let head = extractor.capture_output(place, &commands.head).await.unwrap_or_default();
        let head = ObjectId::parse(head.trim_ascii_end()).unwrap_or(desk.plan.state.start);
        let uncommitted = &commands.uncommitted;
        let uncommitted =
            extractor.capture_output_with_head(place, uncommitted, Some(head)).await?;
        return Ok(if uncommitted.is_empty() {
            WorkspaceContent::Nothing
        } else {
            WorkspaceContent::Other(UNCOMMITTED_MESSAGE)
        });
    };
    // A `HEAD` that names nothing is no failure.
    let head = extractor.capture_output(place, &commands.head).await.unwrap_or_default();
    let announced = announced.with_head(&head);
    let rest = find_other_commits(extractor, place, commands).await;
    if rest.is_none() {
        export_commits(extractor, place, commands).await?;
        return Ok(WorkspaceContent::Work(CollectedWork { announced, place: place.clone(), rest }));
    }
    // The workspace stays where it is, and what is delivered goes from beside it.
    let own = relay.create_artifacts_dir()?;
    if let Err(error) = export_commits(extractor, &own, commands).await {
        own.discard()?;
        return Err(error);
    }
    Ok(WorkspaceContent::Work(CollectedWork { announced, place: own, rest }))
}

/// Puts the commits into their files.
async fn export_commits(
    extractor: &WorkExtractor,
    place: &ArtifactDir,
    commands: &ExtractCommandSet,
) -> anyhow::Result<()> {
    // They are for people, and to be compared: without them the commits go as they are.
    let patches = extractor.write_output(place, &place.patches_path(), &commands.patches).await;
    if let Err(error) = patches {
        tracing::warn!("the patches are not whole: {error:#}");
    }
    extractor.write_output(place, &place.bundle_path(), &commands.bundle).await
}

/// What there may be beside the branch: commits on others, unless git can say that there are none. Files that are committed
/// nowhere are what every build leaves.
async fn find_other_commits(
    extractor: &WorkExtractor,
    place: &ArtifactDir,
    commands: &ExtractCommandSet,
) -> Option<String> {
    match extractor.capture_output(place, &commands.elsewhere).await {
        Ok(commit) => (!commit.is_empty()).then(|| COMMITS_ELSEWHERE_MESSAGE.to_owned()),
        Err(error) => Some(format!("{COMMITS_UNKNOWN_MESSAGE}: {error:#}")),
    }
}

/// Writes down what is to be delivered, and in the same statement what stays.
async fn enqueue_work(
    relay: &Arc<DeliveryService>,
    desk: &WorkspaceRow,
    work: CollectedWork,
    words: Option<PullRequestText>,
) -> anyhow::Result<Box<DeliveryJob>> {
    let DeliveryPlan { repository, state, facts, rules, host, .. } = desk.plan.clone();
    let CollectedWork { announced, place, rest } = work;
    let order = DeliveryRequest {
        repository,
        state,
        announced,
        facts,
        rules: Some(rules),
        host: Some(host),
        artifacts: place.directory().to_owned(),
        pull_request: words,
    };
    let (outbox, desk) = (relay.clone(), desk.clone());
    let add = move || {
        if let Some(why) = rest {
            let (job, left) = outbox.outbox().add_keeping_workspace(&order, &desk, &why)?;
            return anyhow::Ok((job, Some(left)));
        }
        let job = outbox.enqueue(order)?;
        let is_gone =
            if desk.is_exclusive() { dir_tree::remove_tree(&desk.workspace) } else { Ok(()) };
        if let Err(error) = is_gone {
            // It goes with what came out of it.
            tracing::warn!(%error, relay = job.id, "a workspace that nobody needs is still there");
        }
        Ok((job, None))
    };
    let (job, left) = spawn_blocking(add).await??;
    if let Some(left) = left.filter(WorkspaceRow::needs_collection)
        && let Err(error) = archive_workspace(relay, left).await
    {
        // Whoever is next at the branch does it; and this is to be delivered.
        tracing::error!(relay = job.id, "what is beside the work is not put away: {error:#}");
    }
    Ok(Box::new(job))
}

async fn clear_workspace(
    relay: &Arc<DeliveryService>,
    desk: &WorkspaceRow,
    place: ArtifactDir,
) -> anyhow::Result<()> {
    let (relay, desk) = (relay.clone(), desk.clone());
    let clear = move || {
        relay.outbox().remove_workspace(&desk)?;
        Ok(place.discard()?)
    };
    spawn_blocking(clear).await?
}

/// Whether this machine is why the work did not come out, and not the work: then the same may come out later.
fn is_host_failure(error: &anyhow::Error) -> bool {
    disk::is_transient(error.as_ref())
        || error.chain().any(<dyn std::error::Error>::is::<sandbox::SandboxError>)
}

/// Leaves everything where it is until the next attempt. No run begins at the branch meanwhile.
async fn reschedule(
    relay: &Arc<DeliveryService>,
    desk: &WorkspaceRow,
    (wait, why): (Duration, String),
) -> anyhow::Result<Box<WorkspaceRow>> {
    let (relay, desk) = (relay.clone(), desk.clone());
    let put_off = move || relay.outbox().reschedule_workspace(&desk, wait, &why);
    Ok(Box::new(spawn_blocking(put_off).await??))
}

/// Makes a workspace that was kept one that git can look into: its own user has it.
pub(super) async fn restore_ownership(desk: &WorkspaceRow) -> anyhow::Result<()> {
    if desk.left.is_none() || !desk.is_exclusive() {
        return Ok(());
    }
    let workspace = desk.workspace.clone();
    Ok(spawn_blocking(move || archive::restore_ownership(&workspace)).await??)
}

/// Keeps a workspace, and says why.
async fn retain_workspace(
    relay: &Arc<DeliveryService>,
    desk: &WorkspaceRow,
    why: String,
) -> anyhow::Result<Box<WorkspaceRow>> {
    let (outbox, desk) = (relay.clone(), desk.clone());
    let leave = move || outbox.outbox().retain_workspace(&desk, &desk.workspace, &why);
    let left = spawn_blocking(leave).await??;
    if left.needs_collection() { archive_workspace(relay, left).await } else { Ok(Box::new(left)) }
}

/// Puts away what is left in a workspace that other runs come into. Nobody is locked out of it where that cannot be done, but
/// for as long as only the disk is why: then it stays as it is, and whoever is next at the branch does it.
async fn archive_workspace(
    relay: &Arc<DeliveryService>,
    desk: WorkspaceRow,
) -> anyhow::Result<Box<WorkspaceRow>> {
    let place = ArtifactDir::create(&desk.plan.artifacts)?;
    let put = archive::copy_or_move(&desk.workspace, &place).await;
    let mut why = desk.left.clone().unwrap_or_default();
    if let Err(error) = put {
        if disk::is_transient(error.as_ref()) {
            return Err(error.context("what is left in a workspace cannot be put away yet"));
        }
        tracing::error!(relay = desk.id, "a workspace cannot be kept: {error:#}");
        why = format!("not all of it can be kept: {error:#}; {why}");
    }
    let (relay, kept) = (relay.clone(), place.workspace_path());
    Ok(Box::new(
        spawn_blocking(move || relay.outbox().retain_workspace(&desk, &kept, &why)).await??,
    ))
}

/// What is said where there is nothing.
pub(super) const NO_WORK_MESSAGE: &str = "nothing was committed";

const COMMITS_ELSEWHERE_MESSAGE: &str =
    "there are commits that are on other branches than the run's";

const COMMITS_UNKNOWN_MESSAGE: &str =
    "nobody can tell whether there are commits on other branches than the run's";

const UNCOMMITTED_MESSAGE: &str = "nothing was committed, and files are left";
