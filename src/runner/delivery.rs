//! A run's way to a branch: its workspace is filled before the agent comes, and what it has committed is taken out and
//! delivered when its processes are gone.
//!
//! The taking out is done by a sandbox of its own, which has the workspace read-only, nothing of the agent's running in it,
//! and no way to the run's gateway, which is closed by then. Nothing that has gone wrong here changes how the run itself has ended.
//!
//! **Invariant:** from before the agent comes until the work is out of it, or there was none, the outbox names the
//! workspace: whoever is killed meanwhile, it is found.

mod extractor;
mod left;
mod taking;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::residents::kept::Line;
use crate::base::tree;
use crate::catalog::Entry;
use crate::delivery::outbox::{self, Desk, Plan};
use crate::delivery::rules::Rules;
use crate::delivery::statement::Facts;
use crate::delivery::{Begun, Delivered, Relay};
use crate::relay::mirror::{Author, Owner};
use crate::relay::repository::Repository;
use crate::relay::{self, Artifacts, BranchKey};
use crate::run::Run;
use crate::sandbox::spec::{Access, Workspace};
use crate::sandbox::{self, Driver, RunSpec};

pub use left::{of_run, retry, take_out_left};

use extractor::Extractor;
use taking::Taken;

/// A branch that the run's work is for. It is the run's for as long as this lives.
#[derive(Clone)]
pub struct Target {
    relay: Arc<Relay>,
    repository: Repository,
    begun: Begun,
    /// Whether there is to be a pull request, too.
    wants_pull_request: bool,
    /// Who the commits are by.
    agent: String,
    /// What they will be judged by.
    rules: Rules,
    /// Where what comes out is to lie.
    place: Artifacts,
    /// The grant that allows the run, where one was asked for.
    grant: Option<String>,
}

/// A branch whose agent is about to work, or has worked.
#[derive(Debug)]
pub(super) struct Posted {
    target: Target,
    desk: Box<Desk>,
}

/// What has become of the work, as the result tells it.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Relayed {
    Delivered(Delivered),
    /// There was nothing to deliver, or it did not come out.
    Not {
        #[serde(skip_serializing_if = "Option::is_none")]
        branch: Option<String>,
        why: String,
        /// For `cogni-gateway relay`, where something is left in the workspace.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// Whether there is anything that somebody would miss.
        #[serde(skip)]
        is_well: bool,
    },
    /// Nothing was to be delivered, by a word for why.
    Skipped {
        skipped: &'static str,
    },
}

impl Target {
    /// Makes the branch the run's, and finds out where it stands.
    ///
    /// # Errors
    /// Another run has the branch, or the remote cannot be asked.
    pub async fn begin(
        relay: Arc<Relay>,
        repository: Repository,
        key: &BranchKey,
        base: Option<&str>,
    ) -> anyhow::Result<Self> {
        Box::pin(Self::begin_within(relay, repository, key, base, Duration::ZERO)).await
    }

    /// The same, for whoever waits so long until the branch is free.
    ///
    /// # Errors
    /// As [`Target::begin`].
    pub async fn begin_within(
        relay: Arc<Relay>,
        repository: Repository,
        key: &BranchKey,
        base: Option<&str>,
        patience: Duration,
    ) -> anyhow::Result<Self> {
        let (mirror, lease) = relay.take_branch(&repository, key, patience).await?;
        // So that this run builds on it, and finds nothing else in its workspace.
        Box::pin(left::take_out_at(&relay, &repository, &lease)).await?;
        let begun = Box::pin(relay.begin_at(&repository, (mirror, lease), base)).await?;
        let (agent, rules, place) = ("agent".to_owned(), relay.rules(None), relay.place());
        Ok(Self {
            relay,
            repository,
            begun,
            wants_pull_request: false,
            agent,
            rules,
            place,
            grant: None,
        })
    }

    /// What is kept of the work counts for this grant.
    #[must_use]
    pub fn of_grant(self, grant: &str) -> Self {
        Self { grant: Some(grant.to_owned()), ..self }
    }

    /// With a pull request, once the run is over and was ok.
    #[must_use]
    pub fn with_pull_request(self, wanted: bool) -> Self {
        Self { wants_pull_request: wanted, ..self }
    }

    /// Whose the commits are, where the agent does not say otherwise, and whose rules they are judged by beside this host's.
    #[must_use]
    pub fn by(self, agent: &Entry) -> Self {
        let rules = self.relay.rules(agent.relay.as_ref());
        Self { agent: agent.name.clone(), rules, ..self }
    }

    /// The branch, for whoever asks the outbox about it.
    pub(super) fn line(&self) -> Line {
        let branch_key = self.begun.state.branch.key().as_str().to_owned();
        Line { repository: self.repository.key(), branch_key }
    }

    /// Gives the sandbox a workspace with the branch checked out. It is beside what comes out of it, and not in the run's
    /// directory, which goes with the run. Blocks.
    pub(super) fn prepare(&self, spec: &mut RunSpec) -> anyhow::Result<()> {
        if spec.workspace != Workspace::None {
            bail!("a run with a repository has a workspace of its own; give no other");
        }
        Artifacts::create(self.place.directory())?;
        let path = self.place.workspace();
        self.feed(&path, spec.uid, spec.limits.max_workspace)?;
        spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        Ok(())
    }

    /// The run does not begin, and nobody was in its workspace. Blocks.
    pub(super) fn abandon(&self) {
        if let Err(error) = self.place.clone().discard() {
            tracing::warn!(%error, "the workspace of a run that has not begun stays");
        }
    }

    /// Writes down that the agent is about to come. Blocks.
    pub(super) fn post(
        self,
        order: &sandbox::Order,
        driver: &Driver,
        policy: &str,
    ) -> anyhow::Result<Posted> {
        let Workspace::Directory { path, .. } = &order.spec.workspace else {
            bail!("a run with a repository has no workspace");
        };
        let plan = Plan {
            repository: self.repository.clone(),
            state: self.begun.state.clone(),
            facts: Facts {
                run: order.spec.run.clone(),
                agent: self.agent.clone(),
                image: order.spec.root.to_string(),
                policy: policy.to_owned(),
                ..Facts::default()
            },
            rules: self.rules.clone(),
            host: self.relay.host(),
            artifacts: self.place.directory().to_owned(),
            run_dir: order.stamp.run_dir.clone(),
            docker_socket: match driver {
                Driver::Docker { socket } => socket.clone(),
                Driver::Embedded(_) => PathBuf::new(),
            },
            grant: self.grant.clone(),
        };
        Artifacts::create(&plan.artifacts)?;
        let desk = self.relay.outbox().begin(&plan, path)?;
        Ok(Posted { target: self, desk: Box::new(desk) })
    }

    /// Checks the branch out in a directory that is not there yet, for the sandbox's user, unless that takes more than
    /// `max_workspace`. Blocks.
    pub(super) fn feed(
        &self,
        workspace: &Path,
        uid: u32,
        max_workspace: u64,
    ) -> anyhow::Result<()> {
        let Begun { mirror, lease, state } = &self.begun;
        mirror.measure_checkout(state, max_workspace)?;
        let owner = Owner { uid, gid: uid };
        let author = Author { name: self.agent.clone(), email: "agent@sandbox".to_owned() };
        let fed = mirror.feed(lease, state, workspace, (owner, &author));
        fed.with_context(|| format!("the workspace for `{}` cannot be filled", state.branch))?;
        // Ends of lines and keywords make a file larger than git has it; and its history is there, too.
        if tree::measure(workspace, max_workspace)? > max_workspace {
            tree::remove(workspace)?;
            let what = format!("more than {max_workspace} bytes with its history");
            return Err(relay::Error::Large { branch: state.branch.clone(), what }.into());
        }
        Ok(())
    }
}

impl Posted {
    /// Takes the work out and delivers it, as far as that can be done now.
    pub(super) async fn deliver(
        &self,
        driver: &Driver,
        order: &sandbox::Order,
        source: Source<'_>,
    ) -> Relayed {
        let Target { relay, begun, wants_pull_request, .. } = &self.target;
        let mut desk = self.desk.clone();
        desk.plan.facts.spent = source.run.ledger.spent();
        let words = (*wants_pull_request && source.is_ok).then_some(source.words);
        let delivering = async {
            let extractor = Extractor::of_relay(driver, order, relay)?;
            match Box::pin(taking::take_out(relay, &extractor, &desk, words)).await? {
                Taken::Work(job) => {
                    let (lease, audit) = (&begun.lease, &source.run.audit);
                    let delivered = relay.deliver_until(source.leave, job.order, lease, audit);
                    Ok(Relayed::Delivered(Box::pin(delivered).await?))
                }
                Taken::Nothing => Ok(Relayed::nothing(&desk)),
                Taken::Left(desk) => Ok(Relayed::left(&desk)),
            }
        };
        let done: anyhow::Result<_> = delivering.await;
        done.unwrap_or_else(|error| {
            tracing::error!(run = order.spec.run, "cannot relay: {error:#}");
            let (branch, id) = (Some(begun.state.branch.to_string()), Some(desk.id.clone()));
            Relayed::Not { branch, why: format!("{error:#}"), id, is_well: false }
        })
    }
}

/// The run that the work comes from, whose processes are gone.
pub(super) struct Source<'a> {
    pub(super) run: &'a Run,
    /// Only then somebody is asked to look at it.
    pub(super) is_ok: bool,
    pub(super) words: outbox::Words,
    /// What is in the outbox by then is not waited for any longer.
    pub(super) leave: &'a CancellationToken,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("branch", &self.begun.state.branch).finish_non_exhaustive()
    }
}

impl Relayed {
    /// Why a run with a repository has no branch.
    pub fn skipped() -> Self {
        let why = "it has no branch: give `--branch-key` or `--work-item`, or `--branch-by-state`";
        Self::Not { branch: None, why: why.to_owned(), id: None, is_well: true }
    }

    /// Whether all that was committed is where it belongs.
    pub fn is_well(&self) -> bool {
        match self {
            Self::Delivered(delivered) => delivered.is_well(),
            Self::Not { is_well, .. } => *is_well,
            Self::Skipped { .. } => true,
        }
    }

    fn nothing(desk: &Desk) -> Self {
        let branch = Some(desk.plan.state.branch.to_string());
        Self::Not { branch, why: taking::NOTHING.to_owned(), id: None, is_well: true }
    }

    fn left(desk: &Desk) -> Self {
        let branch = Some(desk.plan.state.branch.to_string());
        let left = desk.left.as_deref().unwrap_or_default();
        let kept = format!("{left}; the workspace is kept in `{}`", desk.workspace.display());
        let why = match desk.due {
            Some(_) => format!("{kept}, and is tried again"),
            None => kept,
        };
        Self::Not { branch, why, id: Some(desk.id.clone()), is_well: false }
    }

    /// The same, for programs.
    pub fn without_key() -> Self {
        Self::Skipped { skipped: "no_branch_key" }
    }
}
