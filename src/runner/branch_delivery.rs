//! A run's way to a branch: its workspace is filled before the agent comes, and what it has committed is taken out and
//! delivered when its processes are gone.
//!
//! The taking out is done by a sandbox of its own, which has the workspace read-only, nothing of the agent's running in it,
//! and no way to the run's gateway, which is closed by then. Nothing that has gone wrong here changes how the run itself has ended.
//!
//! **Invariant:** from before the agent comes until the work is out of it, or there was none, the outbox names the
//! workspace: whoever is killed meanwhile, it is found.

mod collect;
mod extractor;
mod orphans;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::long_running::workspace_store::StoredBranchRef;
use crate::base::dir_tree;
use crate::gateway::run::AgentRun;
use crate::relay::delivery::outbox::{self, DeliveryPlan, WorkspaceRow};
use crate::relay::delivery::rules::ReviewRules;
use crate::relay::delivery::statement::RunFacts;
use crate::relay::delivery::{DeliveryService, DeliveryStatus, LeasedBranch};
use crate::relay::repo::mirror::{CommitAuthor, FileOwner};
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{self, ArtifactDir, BranchKey};
use crate::runner::agents::AgentDefinition;
use crate::sandbox::spec::{MountAccess, WorkspaceMount};
use crate::sandbox::{self, SandboxDriver, SandboxSpec};

pub use orphans::{recover_all, recover_for_run, retry_delivery};

use collect::CollectOutcome;
use extractor::WorkExtractor;

/// A branch that the run's work is for. It is the run's for as long as this lives.
#[derive(Clone)]
pub struct DeliveryTarget {
    relay: Arc<DeliveryService>,
    repository: RepositoryUrl,
    begun: LeasedBranch,
    /// Whether there is to be a pull request, too.
    wants_pull_request: bool,
    /// Who the commits are by.
    agent: String,
    /// What they will be judged by.
    rules: ReviewRules,
    /// Where what comes out is to lie.
    place: ArtifactDir,
    /// The grant that allows the run, where one was asked for.
    grant: Option<String>,
}

/// A branch whose agent is about to work, or has worked.
#[derive(Debug)]
pub(super) struct TrackedWorkspace {
    target: DeliveryTarget,
    desk: Box<WorkspaceRow>,
}

/// What has become of the work, as the result tells it.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum DeliveryReport {
    Delivered(DeliveryStatus),
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

impl DeliveryTarget {
    /// Makes the branch the run's, and finds out where it stands.
    ///
    /// # Errors
    /// Another run has the branch, or the remote cannot be asked.
    pub async fn acquire(
        relay: Arc<DeliveryService>,
        repository: RepositoryUrl,
        key: &BranchKey,
        base: Option<&str>,
    ) -> anyhow::Result<Self> {
        Box::pin(Self::acquire_with_timeout(relay, repository, key, base, Duration::ZERO)).await
    }

    /// The same, for whoever waits so long until the branch is free.
    ///
    /// # Errors
    /// As [`DeliveryTarget::acquire`].
    pub async fn acquire_with_timeout(
        relay: Arc<DeliveryService>,
        repository: RepositoryUrl,
        key: &BranchKey,
        base: Option<&str>,
        patience: Duration,
    ) -> anyhow::Result<Self> {
        let (mirror, lease) = relay.lease_branch(&repository, key, patience).await?;
        // So that this run builds on it, and finds nothing else in its workspace.
        Box::pin(orphans::recover_at_branch(&relay, &repository, &lease)).await?;
        let begun = Box::pin(relay.open_branch(&repository, (mirror, lease), base)).await?;
        let (agent, rules, place) =
            ("agent".to_owned(), relay.rules_for(None), relay.new_artifacts_dir());
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
    pub fn for_grant(self, grant: &str) -> Self {
        Self { grant: Some(grant.to_owned()), ..self }
    }

    /// With a pull request, once the run is over and was ok.
    #[must_use]
    pub fn with_pull_request(self, wanted: bool) -> Self {
        Self { wants_pull_request: wanted, ..self }
    }

    /// Whose the commits are, where the agent does not say otherwise, and whose rules they are judged by beside this host's.
    #[must_use]
    pub fn for_agent(self, agent: &AgentDefinition) -> Self {
        let rules = self.relay.rules_for(agent.relay.as_ref());
        Self { agent: agent.name.clone(), rules, ..self }
    }

    /// The branch, for whoever asks the outbox about it.
    pub(super) fn branch_ref(&self) -> StoredBranchRef {
        let branch_key = self.begun.state.branch.key().as_str().to_owned();
        StoredBranchRef { repository: self.repository.canonical_key(), branch_key }
    }

    /// Gives the sandbox a workspace with the branch checked out. It is beside what comes out of it, and not in the run's
    /// directory, which goes with the run. Blocks.
    pub(super) fn prepare_sandbox(&self, spec: &mut SandboxSpec) -> anyhow::Result<()> {
        if spec.workspace != WorkspaceMount::None {
            bail!("a run with a repository has a workspace of its own; give no other");
        }
        ArtifactDir::create(self.place.directory())?;
        let path = self.place.workspace_path();
        self.checkout_into(&path, spec.uid, spec.limits.max_workspace)?;
        spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        Ok(())
    }

    /// The run does not begin, and nobody was in its workspace. Blocks.
    pub(super) fn discard_workspace(&self) {
        if let Err(error) = self.place.clone().discard() {
            tracing::warn!(%error, "the workspace of a run that has not begun stays");
        }
    }

    /// Writes down that the agent is about to come. Blocks.
    pub(super) fn register_workspace(
        self,
        order: &sandbox::SandboxRequest,
        driver: &SandboxDriver,
        policy: &str,
    ) -> anyhow::Result<TrackedWorkspace> {
        let WorkspaceMount::Directory { path, .. } = &order.spec.workspace else {
            bail!("a run with a repository has no workspace");
        };
        let plan = DeliveryPlan {
            repository: self.repository.clone(),
            state: self.begun.state.clone(),
            facts: RunFacts {
                run: order.spec.run.clone(),
                agent: self.agent.clone(),
                image: order.spec.root.to_string(),
                policy: policy.to_owned(),
                ..RunFacts::default()
            },
            rules: self.rules.clone(),
            host: self.relay.host_context(),
            artifacts: self.place.directory().to_owned(),
            run_dir: order.stamp.run_dir.clone(),
            docker_socket: match driver {
                SandboxDriver::Docker { socket } => socket.clone(),
                SandboxDriver::Embedded(_) => PathBuf::new(),
            },
            grant: self.grant.clone(),
        };
        ArtifactDir::create(&plan.artifacts)?;
        let desk = self.relay.outbox().register_workspace(&plan, path)?;
        Ok(TrackedWorkspace { target: self, desk: Box::new(desk) })
    }

    /// Checks the branch out in a directory that is not there yet, for the sandbox's user, unless that takes more than
    /// `max_workspace`. Blocks.
    pub(super) fn checkout_into(
        &self,
        workspace: &Path,
        uid: u32,
        max_workspace: u64,
    ) -> anyhow::Result<()> {
        let LeasedBranch { mirror, lease, state } = &self.begun;
        mirror.measure_checkout(state, max_workspace)?;
        let owner = FileOwner { uid, gid: uid };
        let author = CommitAuthor { name: self.agent.clone(), email: "agent@sandbox".to_owned() };
        let fed = mirror.checkout_workspace(lease, state, workspace, (owner, &author));
        fed.with_context(|| format!("the workspace for `{}` cannot be filled", state.branch))?;
        // Ends of lines and keywords make a file larger than git has it; and its history is there, too.
        if dir_tree::disk_usage(workspace, max_workspace)? > max_workspace {
            dir_tree::remove_tree(workspace)?;
            let what = format!("more than {max_workspace} bytes with its history");
            return Err(repo::RepoError::Large { branch: state.branch.clone(), what }.into());
        }
        Ok(())
    }
}

impl TrackedWorkspace {
    /// Takes the work out and delivers it, as far as that can be done now.
    pub(super) async fn deliver(
        &self,
        driver: &SandboxDriver,
        order: &sandbox::SandboxRequest,
        source: FinishedRun<'_>,
    ) -> DeliveryReport {
        let DeliveryTarget { relay, begun, wants_pull_request, .. } = &self.target;
        let mut desk = self.desk.clone();
        desk.plan.facts.spent = source.run.ledger.spent_amount();
        let words = (*wants_pull_request && source.is_ok).then_some(source.words);
        let delivering = async {
            let extractor = WorkExtractor::for_delivery(driver, order, relay)?;
            match Box::pin(collect::collect_work(relay, &extractor, &desk, words)).await? {
                CollectOutcome::Work(job) => {
                    let (lease, audit) = (&begun.lease, &source.run.audit);
                    let delivered =
                        relay.deliver_with_cancel(source.leave, job.order, lease, audit);
                    Ok(DeliveryReport::Delivered(Box::pin(delivered).await?))
                }
                CollectOutcome::Nothing => Ok(DeliveryReport::no_work(&desk)),
                CollectOutcome::Left(desk) => Ok(DeliveryReport::work_left(&desk)),
            }
        };
        let done: anyhow::Result<_> = delivering.await;
        done.unwrap_or_else(|error| {
            tracing::error!(run = order.spec.run, "cannot relay: {error:#}");
            let (branch, id) = (Some(begun.state.branch.to_string()), Some(desk.id.clone()));
            DeliveryReport::Not { branch, why: format!("{error:#}"), id, is_well: false }
        })
    }
}

/// The run that the work comes from, whose processes are gone.
pub(super) struct FinishedRun<'a> {
    pub(super) run: &'a AgentRun,
    /// Only then somebody is asked to look at it.
    pub(super) is_ok: bool,
    pub(super) words: outbox::PullRequestText,
    /// What is in the outbox by then is not waited for any longer.
    pub(super) leave: &'a CancellationToken,
}

impl fmt::Debug for DeliveryTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("branch", &self.begun.state.branch).finish_non_exhaustive()
    }
}

impl DeliveryReport {
    /// Why a run with a repository has no branch.
    pub fn skipped_without_branch() -> Self {
        let why = "it has no branch: give `--branch-key` or `--work-item`, or `--branch-by-state`";
        Self::Not { branch: None, why: why.to_owned(), id: None, is_well: true }
    }

    /// Whether all that was committed is where it belongs.
    pub fn is_complete(&self) -> bool {
        match self {
            Self::Delivered(delivered) => delivered.is_complete(),
            Self::Not { is_well, .. } => *is_well,
            Self::Skipped { .. } => true,
        }
    }

    fn no_work(desk: &WorkspaceRow) -> Self {
        let branch = Some(desk.plan.state.branch.to_string());
        Self::Not { branch, why: collect::NO_WORK_MESSAGE.to_owned(), id: None, is_well: true }
    }

    fn work_left(desk: &WorkspaceRow) -> Self {
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
    pub fn skipped_without_key() -> Self {
        Self::Skipped { skipped: "no_branch_key" }
    }
}
