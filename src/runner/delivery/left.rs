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

use super::extractor::Extractor;
use super::taking::{self, Taken};
use crate::delivery::outbox::{self, Desk, Plan};
use crate::delivery::{self, Delivered, Relay};
use crate::relay::repository::Repository;
use crate::relay::{self, Lease};
use crate::runner::directory::Directory;
use crate::runner::sweep::{Engine, Fate, Found, Kind, Sweep};
use crate::sandbox::spec::{Access, Limits, Root, Stamp, UID, Workspace};
use crate::sandbox::{self, Driver, Owner, RunSpec, embedded, name_of};

/// Takes out what was left at a branch, for whoever has it.
///
/// # Errors
/// Something of it may still run, it cannot come out yet, or the outbox does not work.
pub(super) async fn take_out_at(
    relay: &Arc<Relay>,
    repository: &Repository,
    lease: &Lease,
) -> anyhow::Result<()> {
    let (owner, place, key) = (relay.clone(), repository.clone(), lease.branch().key().clone());
    for desk in spawn_blocking(move || owner.outbox().desks_at(&place, &key)).await?? {
        let taken = Box::pin(take_out(relay, &desk)).await?;
        if let Taken::Left(desk) = taken
            && desk.due.is_some()
        {
            let (id, why) = (desk.id, desk.left.unwrap_or_default());
            return Err(delivery::Error::Waiting { id, why }.into());
        }
    }
    Ok(())
}

/// Takes out whatever was left and is due, but for branches that a run is at. What does not come out now is logged.
///
/// # Errors
/// The outbox does not work.
pub async fn take_out_left(relay: &Arc<Relay>) -> anyhow::Result<()> {
    let owner = relay.clone();
    let desks = spawn_blocking(move || owner.outbox().desks()).await??;
    let due = desks.into_iter().filter(|desk| desk.is_open() && desk.is_due());
    for desk in delivery::in_turn(due.collect(), |desk| desk.plan.grant.clone()) {
        match Box::pin(take_out_free(relay, &desk.id)).await {
            // Its run has ended since they were listed, and has taken it out itself.
            Err(error) if is_gone(&error) => (),
            Err(error) => {
                tracing::warn!(relay = desk.id, "what a run has left is not taken out: {error:#}");
            }
            Ok(_) => (),
        }
    }
    Ok(())
}

fn is_gone(error: &anyhow::Error) -> bool {
    let found = error.downcast_ref();
    matches!(found, Some(delivery::Error::Outbox(outbox::Error::Unknown(_))))
}

/// Takes out what a run has left, if it has.
///
/// # Errors
/// Something of it may still run, or the outbox does not work.
pub async fn of_run(relay: &Arc<Relay>, run: &str) -> anyhow::Result<()> {
    let owner = relay.clone();
    let desks = spawn_blocking(move || owner.outbox().desks()).await??;
    let is_its = |desk: &Desk| desk.plan.facts.run == run && desk.is_open();
    for desk in desks.into_iter().filter(is_its) {
        match Box::pin(take_out_free(relay, &desk.id)).await {
            // Who was at the branch has taken it out meanwhile.
            Err(error) if is_gone(&error) => (),
            taken => drop(taken?),
        }
    }
    Ok(())
}

/// Takes up a row because somebody asks for it, or what is in a workspace. `None` where somebody else is at its branch.
///
/// # Errors
/// There is no such row, or it cannot be taken up here.
pub async fn retry(
    relay: &Arc<Relay>,
    id: &str,
    new_rules: bool,
) -> anyhow::Result<Option<Delivered>> {
    let (owner, known) = (relay.clone(), id.to_owned());
    let desk = spawn_blocking(move || owner.outbox().desk(&known)).await?;
    if desk.is_err() {
        return Ok(Box::pin(relay.retry(id, new_rules)).await?);
    }
    let taken = match Box::pin(take_out_free(relay, id)).await {
        // Who was at the branch has taken it out meanwhile; the work may have a row of the same name.
        Err(error) if is_gone(&error) => return Ok(Box::pin(relay.retry(id, new_rules)).await?),
        taken => taken?,
    };
    match taken {
        Some((_, Taken::Work(job))) => {
            match Box::pin(relay.retry(&job.id, new_rules)).await {
                // Its rules are not so old.
                Err(delivery::Error::OnItsWay) => Ok(Box::pin(relay.retry(&job.id, false)).await?),
                retried => Ok(retried?),
            }
        }
        Some((_, Taken::Left(desk))) => Ok(Some(Delivered::left(&desk))),
        Some((desk, Taken::Nothing)) => Ok(Some(Delivered::nothing(&desk, taking::NOTHING))),
        None => Ok(None),
    }
}

/// `None` where somebody else is at the branch.
async fn take_out_free(relay: &Arc<Relay>, id: &str) -> anyhow::Result<Option<(Desk, Taken)>> {
    let (owner, id) = (relay.clone(), id.to_owned());
    let taken = spawn_blocking(move || {
        let Plan { repository, state, .. } = owner.outbox().desk(&id)?.plan;
        let lease = owner.lease(&repository, state.branch.key())?;
        // It may have been cleared until then.
        Ok((owner.outbox().desk(&id)?, lease))
    });
    let (desk, lease) = match taken.await? {
        Err(delivery::Error::Relay(relay::Error::Busy { .. })) => return Ok(None),
        taken => taken?,
    };
    let taken = Box::pin(take_out(relay, &desk)).await?;
    drop(lease);
    Ok(Some((desk, taken)))
}

async fn take_out(relay: &Arc<Relay>, desk: &Desk) -> anyhow::Result<Taken> {
    end(&desk.plan).await.context("something of an earlier run at this branch may still run")?;
    let Plan { run_dir, facts, .. } = &desk.plan;
    tracing::info!(run = facts.run, relay = desk.id, "taking out what a run has left");
    let owner = Owner::this().context("`/proc` cannot be read")?;
    let name = format!("left-{}", desk.id);
    let directory = Directory::create(run_dir, &name, &owner)?;
    taking::give_back(desk).await?;
    let spec = RunSpec {
        run: name,
        root: Root::Host,
        argv: vec![],
        uid: user_of(&desk.workspace),
        env: BTreeMap::new(),
        limits: Limits::default(),
        grace: Duration::ZERO,
        workspace: Workspace::Directory { path: desk.workspace.clone(), access: Access::ReadOnly },
        mounts: vec![],
        volumes: vec![],
        socket_dir: directory.socket_dir(),
        init: None,
        has_gateway: false,
    };
    let order = sandbox::Order {
        spec,
        stamp: Stamp { owner, run_dir: directory.parent(), deadline: SystemTime::now() + LONGEST },
        directory: directory.path().to_owned(),
    };
    let driver = Driver::Embedded(embedded::Settings::default());
    let owner = relay.clone();
    let extractor = spawn_blocking(move || Extractor::of_relay(&driver, &order, &owner)).await??;
    let taken = Box::pin(taking::take_out(relay, &extractor, desk, None)).await?;
    if let Taken::Work(job) = &taken {
        relay.found(job).await?;
    }
    Ok(taken)
}

/// The user that has worked there. A directory that is root's own was never given to a sandbox.
fn user_of(workspace: &Path) -> u32 {
    let found = fs::symlink_metadata(workspace).map(|found| found.uid());
    found.ok().filter(|uid| *uid != 0).unwrap_or(UID)
}

/// Takes away what is left of the sandbox.
async fn end(plan: &Plan) -> anyhow::Result<()> {
    let sweep = Sweep {
        docker_socket: plan.docker_socket.clone(),
        run_dir: plan.run_dir.clone(),
        apply: true,
        all: false,
    };
    let swept = sweep.sweep().await?;
    if let Engine::Failed(error) = swept.engine {
        return Err(error);
    }
    let own = name_of(&plan.facts.run);
    let is_there = |found: &&Found| match &found.fate {
        Fate::Removed | Fate::Elsewhere(_) => false,
        // It may be the resident sandbox that it was in.
        Fate::Stuck(_) if found.kind == Kind::Container => true,
        _ => found.name.starts_with(&own),
    };
    match swept.found.iter().find(is_there) {
        Some(Found { name, fate, .. }) => bail!("`{name}` is there: {fate:?}"),
        None => Ok(()),
    }
}

/// All that git is given to take work out.
const LONGEST: Duration = Duration::from_hours(1);
