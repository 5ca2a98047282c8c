//! From a workspace whose agent is gone to the outbox: the work, or that there is none, or what stays where it is.
//!
//! One statement to the outbox says all that has come of it. Whoever is cut off before has done nothing, and it is begun
//! again; whoever is cut off after has only to put away what the next run would replace, which the next one at the branch
//! does then.

mod away;
mod ignored;
mod special;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::extractor::Extractor;
use crate::base::{disk, tree};
use crate::delivery::outbox::{Desk, Job, Order, Plan, Words};
use crate::delivery::{self, Relay};
use crate::relay::extract::{Announced, Commands, OWN_REPOSITORY};
use crate::relay::{Artifacts, Sha};
use crate::sandbox::{self, spec::WORKSPACE};

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
    Work(Work),
    Nothing,
    /// Files, or commits on other branches.
    Other(&'static str),
}

/// What is on the branch.
struct Work {
    announced: Announced,
    /// Where it lies now.
    place: Artifacts,
    /// Why the workspace is kept beside it.
    rest: Option<String>,
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
    if desk.is_in_the_way() {
        return Ok(Taken::Left(put_away(relay, desk.clone()).await?));
    }
    let place = Artifacts::create(&desk.plan.artifacts)?;
    let commands = Commands::new(&desk.plan.state, WORKSPACE, OWN_REPOSITORY, relay.limits());
    let workspace = desk.workspace.clone();
    if let Err(error) = spawn_blocking(move || special::check(&workspace)).await? {
        let why = format!("{error:#}");
        tracing::warn!(run = desk.plan.facts.run, why, "git is not asked to take the work out");
        return Ok(Taken::Left(keep(relay, desk, why).await?));
    }
    let remove_ignored = ignored::remove(extractor, &place, (desk, &commands.ignored));
    let why = match look(relay, extractor, (desk, &commands), &place).await {
        Ok(Found::Work(work)) => {
            if work.rest.is_some() {
                remove_ignored.await;
            }
            let added = Box::pin(add(relay, desk, work, words));
            return Ok(Taken::Work(added.await?));
        }
        Ok(Found::Nothing) => {
            clear(relay, desk, place.clone()).await?;
            return Ok(Taken::Nothing);
        }
        Ok(Found::Other(what)) => what.to_owned(),
        Err(error) => {
            tracing::error!(run = desk.plan.facts.run, "cannot take the work out: {error:#}");
            let wait = is_ours(&error).then(|| delivery::wait_after(desk.attempts)).flatten();
            if let Some(wait) = wait {
                return Ok(Taken::Left(put_off(relay, desk, (wait, format!("{error:#}"))).await?));
            }
            format!("{error:#}")
        }
    };
    remove_ignored.await;
    Ok(Taken::Left(keep(relay, desk, why).await?))
}

async fn look(
    relay: &Arc<Relay>,
    extractor: &Extractor,
    (desk, commands): (&Desk, &Commands),
    place: &Artifacts,
) -> anyhow::Result<Found> {
    let facts = extractor.answer(place, &commands.facts).await?;
    let Some(announced) = Announced::parse(&facts, 0)? else {
        if !extractor.answer(place, &commands.elsewhere).await?.is_empty() {
            return Ok(Found::Other(ELSEWHERE));
        }
        let head = extractor.answer(place, &commands.head).await.unwrap_or_default();
        let head = Sha::parse(head.trim_ascii_end()).unwrap_or(desk.plan.state.start);
        let uncommitted = &commands.uncommitted;
        let uncommitted = extractor.answer_beside(place, uncommitted, Some(head)).await?;
        return Ok(if uncommitted.is_empty() { Found::Nothing } else { Found::Other(UNCOMMITTED) });
    };
    // A `HEAD` that names nothing is no failure.
    let head = extractor.answer(place, &commands.head).await.unwrap_or_default();
    let announced = announced.with_head(&head);
    let rest = rest(extractor, place, commands).await;
    if rest.is_none() {
        fill(extractor, place, commands).await?;
        return Ok(Found::Work(Work { announced, place: place.clone(), rest }));
    }
    // The workspace stays where it is, and what is delivered goes from beside it.
    let own = relay.artifacts()?;
    if let Err(error) = fill(extractor, &own, commands).await {
        own.discard()?;
        return Err(error);
    }
    Ok(Found::Work(Work { announced, place: own, rest }))
}

/// Puts the commits into their files.
async fn fill(extractor: &Extractor, place: &Artifacts, commands: &Commands) -> anyhow::Result<()> {
    // They are for people, and to be compared: without them the commits go as they are.
    let patches = extractor.fill(place, &place.patches(), &commands.patches).await;
    if let Err(error) = patches {
        tracing::warn!("the patches are not whole: {error:#}");
    }
    extractor.fill(place, &place.bundle(), &commands.bundle).await
}

/// What there may be beside the branch: commits on others, unless git can say that there are none. Files that are committed
/// nowhere are what every build leaves.
async fn rest(extractor: &Extractor, place: &Artifacts, commands: &Commands) -> Option<String> {
    match extractor.answer(place, &commands.elsewhere).await {
        Ok(commit) => (!commit.is_empty()).then(|| ELSEWHERE.to_owned()),
        Err(error) => Some(format!("{UNCLEAR}: {error:#}")),
    }
}

/// Writes down what is to be delivered, and in the same statement what stays.
async fn add(
    relay: &Arc<Relay>,
    desk: &Desk,
    work: Work,
    words: Option<Words>,
) -> anyhow::Result<Box<Job>> {
    let Plan { repository, state, facts, rules, host, .. } = desk.plan.clone();
    let Work { announced, place, rest } = work;
    let order = Order {
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
            let (job, left) = outbox.outbox().add_beside(&order, &desk, &why)?;
            return anyhow::Ok((job, Some(left)));
        }
        let job = outbox.add(order)?;
        let is_gone = if desk.is_own() { tree::remove(&desk.workspace) } else { Ok(()) };
        if let Err(error) = is_gone {
            // It goes with what came out of it.
            tracing::warn!(%error, relay = job.id, "a workspace that nobody needs is still there");
        }
        Ok((job, None))
    };
    let (job, left) = spawn_blocking(add).await??;
    if let Some(left) = left.filter(Desk::is_open)
        && let Err(error) = put_away(relay, left).await
    {
        // Whoever is next at the branch does it; and this is to be delivered.
        tracing::error!(relay = job.id, "what is beside the work is not put away: {error:#}");
    }
    Ok(Box::new(job))
}

async fn clear(relay: &Arc<Relay>, desk: &Desk, place: Artifacts) -> anyhow::Result<()> {
    let (relay, desk) = (relay.clone(), desk.clone());
    let clear = move || {
        relay.outbox().clear(&desk)?;
        Ok(place.discard()?)
    };
    spawn_blocking(clear).await?
}

/// Whether this machine is why the work did not come out, and not the work: then the same may come out later.
fn is_ours(error: &anyhow::Error) -> bool {
    disk::may_pass(error.as_ref())
        || error.chain().any(<dyn std::error::Error>::is::<sandbox::Error>)
}

/// Leaves everything where it is until the next attempt. No run begins at the branch meanwhile.
async fn put_off(
    relay: &Arc<Relay>,
    desk: &Desk,
    (wait, why): (Duration, String),
) -> anyhow::Result<Box<Desk>> {
    let (relay, desk) = (relay.clone(), desk.clone());
    let put_off = move || relay.outbox().put_desk_off(&desk, wait, &why);
    Ok(Box::new(spawn_blocking(put_off).await??))
}

/// Makes a workspace that was kept one that git can look into: its own user has it.
pub(super) async fn give_back(desk: &Desk) -> anyhow::Result<()> {
    if desk.left.is_none() || !desk.is_own() {
        return Ok(());
    }
    let workspace = desk.workspace.clone();
    Ok(spawn_blocking(move || away::give_back(&workspace)).await??)
}

/// Keeps a workspace, and says why.
async fn keep(relay: &Arc<Relay>, desk: &Desk, why: String) -> anyhow::Result<Box<Desk>> {
    let (outbox, desk) = (relay.clone(), desk.clone());
    let leave = move || outbox.outbox().leave(&desk, &desk.workspace, &why);
    let left = spawn_blocking(leave).await??;
    if left.is_open() { put_away(relay, left).await } else { Ok(Box::new(left)) }
}

/// Puts away what is left in a workspace that other runs come into. Nobody is locked out of it where that cannot be done, but
/// for as long as only the disk is why: then it stays as it is, and whoever is next at the branch does it.
async fn put_away(relay: &Arc<Relay>, desk: Desk) -> anyhow::Result<Box<Desk>> {
    let place = Artifacts::create(&desk.plan.artifacts)?;
    let put = away::put(&desk.workspace, &place).await;
    let mut why = desk.left.clone().unwrap_or_default();
    if let Err(error) = put {
        if disk::may_pass(error.as_ref()) {
            return Err(error.context("what is left in a workspace cannot be put away yet"));
        }
        tracing::error!(relay = desk.id, "a workspace cannot be kept: {error:#}");
        why = format!("not all of it can be kept: {error:#}; {why}");
    }
    let (relay, kept) = (relay.clone(), place.workspace());
    Ok(Box::new(spawn_blocking(move || relay.outbox().leave(&desk, &kept, &why)).await??))
}

/// What is said where there is nothing.
pub(super) const NOTHING: &str = "nothing was committed";

const ELSEWHERE: &str = "there are commits that are on other branches than the run's";

const UNCLEAR: &str = "nobody can tell whether there are commits on other branches than the run's";

const UNCOMMITTED: &str = "nothing was committed, and files are left";
