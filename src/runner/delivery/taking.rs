//! From a workspace whose agent is gone to the outbox: the work, or that there is none, or what stays where it is.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::Command;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::extractor::Extractor;
use crate::base::tree;
use crate::delivery::Relay;
use crate::delivery::outbox::{Desk, Job, Order, Plan, Words};
use crate::relay::Artifacts;
use crate::relay::extract::{Announced, Commands};
use crate::sandbox::spec::WORKSPACE;

/// What has come of it.
pub(super) enum Taken {
    /// It is a row, and on this machine's disk.
    Work(Box<Job>),
    Nothing,
    /// Something is there that the relay does not deliver.
    Left(Box<Desk>),
}

/// What is in a workspace.
enum Found {
    Work(Announced),
    Nothing,
    /// Files, or commits on other branches.
    Other(&'static str),
}

/// Takes out what is on the branch. What is not there, or does not come out, is kept with the workspace.
///
/// # Errors
/// The outbox or the disk cannot be used.
pub(super) async fn take_out(
    relay: &Arc<Relay>,
    extractor: &Extractor,
    desk: &Desk,
    words: Option<Words>,
) -> anyhow::Result<Taken> {
    let Plan { repository, state, facts, rules, host, artifacts, .. } = desk.plan.clone();
    let place = Artifacts::create(&artifacts)?;
    let commands = Commands::new(&state, WORKSPACE, relay.limits());
    let announced = match look(extractor, &place, &commands).await {
        Ok(Found::Work(announced)) => announced,
        Ok(Found::Nothing) => {
            clear(relay, desk, place).await?;
            return Ok(Taken::Nothing);
        }
        Ok(Found::Other(what)) => return Ok(Taken::Left(keep(relay, desk, what).await?)),
        Err(error) => {
            tracing::error!(run = facts.run, "cannot take the work out: {error:#}");
            let why = format!("{error:#}");
            return Ok(Taken::Left(keep(relay, desk, &why).await?));
        }
    };
    if has_more(extractor, &place, &commands).await {
        keep_aside(relay, desk).await?;
    }
    let order = Order {
        repository,
        state,
        announced,
        facts,
        rules: Some(rules),
        host: Some(host),
        artifacts,
        pull_request: words,
    };
    let (relay, desk) = (relay.clone(), desk.clone());
    let add = move || {
        let job = relay.add(order)?;
        if desk.is_own() {
            tree::remove(&desk.workspace)?;
        }
        Ok(Taken::Work(Box::new(job)))
    };
    spawn_blocking(add).await?
}

async fn look(
    extractor: &Extractor,
    place: &Artifacts,
    commands: &Commands,
) -> anyhow::Result<Found> {
    let facts = extractor.answer(place, &commands.facts).await?;
    let Some(announced) = Announced::parse(&facts, 0)? else {
        if !extractor.answer(place, &commands.elsewhere).await?.is_empty() {
            return Ok(Found::Other(ELSEWHERE));
        }
        let uncommitted = extractor.answer(place, &commands.uncommitted).await?;
        return Ok(if uncommitted.is_empty() { Found::Nothing } else { Found::Other(UNCOMMITTED) });
    };
    // A `HEAD` that names nothing is no failure.
    let head = extractor.answer(place, &commands.head).await.unwrap_or_default();
    // They are for people, and to be compared: without them the commits go as they are.
    let patches = extractor.fill(place, &place.patches(), &commands.patches).await;
    if let Err(error) = patches {
        tracing::warn!("the patches are not whole: {error:#}");
    }
    extractor.fill(place, &place.bundle(), &commands.bundle).await?;
    Ok(Found::Work(announced.with_head(&head)))
}

/// Whether there are commits beside those of the branch. Files that are committed nowhere are what every build leaves.
async fn has_more(extractor: &Extractor, place: &Artifacts, commands: &Commands) -> bool {
    let answer = extractor.answer(place, &commands.elsewhere).await;
    answer.is_ok_and(|commit| !commit.is_empty())
}

async fn clear(relay: &Arc<Relay>, desk: &Desk, place: Artifacts) -> anyhow::Result<()> {
    let (relay, desk) = (relay.clone(), desk.clone());
    let clear = move || {
        relay.outbox().clear(&desk)?;
        Ok(place.discard()?)
    };
    spawn_blocking(clear).await?
}

/// Keeps a workspace, and says why. One that other runs come into is copied.
async fn keep(relay: &Arc<Relay>, desk: &Desk, why: &str) -> anyhow::Result<Box<Desk>> {
    let kept = if desk.is_own() {
        desk.workspace.clone()
    } else {
        let kept = Artifacts::create(&desk.plan.artifacts)?.workspace();
        copy(&desk.workspace, &kept).await?;
        kept
    };
    let (relay, desk, why) = (relay.clone(), desk.clone(), why.to_owned());
    Ok(Box::new(spawn_blocking(move || relay.outbox().leave(&desk, &kept, &why)).await??))
}

/// Keeps a workspace whose branch is delivered, in a row of its own.
async fn keep_aside(relay: &Arc<Relay>, desk: &Desk) -> anyhow::Result<()> {
    let place = relay.artifacts()?;
    let (owner, plan, kept) = (relay.clone(), desk.plan.clone(), place.workspace());
    let plan = Plan { artifacts: place.directory().to_owned(), ..plan };
    let aside = spawn_blocking(move || {
        let aside = owner.outbox().begin(&plan, &kept)?;
        owner.outbox().leave(&aside, &kept, ELSEWHERE)
    });
    let aside = aside.await??;
    if desk.is_own() {
        return Ok(fs::rename(&desk.workspace, &aside.workspace)?);
    }
    copy(&desk.workspace, &aside.workspace).await
}

/// As it is: it follows no link, and runs nothing of what it copies. How much that may be is the workspace's own limit.
async fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("cp");
    command.args(["-a", "--"]).arg(from).arg(to).kill_on_drop(true);
    let copied = timeout(COPY, command.output()).await;
    let copied = copied.context("the workspace is too large to be kept")??;
    if !copied.status.success() {
        bail!("the workspace is not kept: {}", String::from_utf8_lossy(&copied.stderr).trim());
    }
    Ok(())
}

/// What is said where there is nothing.
pub(super) const NOTHING: &str = "nothing was committed";

const ELSEWHERE: &str = "there are commits that are on other branches than the run's";

const UNCOMMITTED: &str = "nothing was committed, and files are left";

/// A workspace has some gigabytes at most.
const COPY: Duration = Duration::from_mins(10);
