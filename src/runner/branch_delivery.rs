//! The delivery of a run's work to a branch. The branch is checked out into the workspace before the agent starts.
//! After the agent's processes are gone, the agent's commits are collected and delivered.
//!
//! A separate sandbox collects the commits. That sandbox mounts the workspace read-only, runs none of the agent's
//! processes, and cannot reach the run's gateway, which is closed at that time. An error of the delivery does not
//! change the result of the run itself.
//!
//! **Invariant:** the outbox names the workspace from before the agent starts until the work is collected, or until it
//! is known that there is no work. So a later process finds the workspace, even if this process is killed.

mod collect;
mod extractor;
mod orphans;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::conversation::MODEL_VARIABLE;
use crate::base::dir_tree;
use crate::gateway::run::AgentRun;
use crate::relay::delivery::outbox::{self, DeliveryPlan, WorkspaceRow};
use crate::relay::delivery::rules::ReviewRules;
use crate::relay::delivery::statement::RunFacts;
use crate::relay::delivery::{DeliveryError, DeliveryService, DeliveryStatus, LeasedBranch};
use crate::relay::github::pull_request::change_summary::MAX_ASKED_CHARS;
use crate::relay::repo::mirror::{CommitAuthor, FileOwner};
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{self, ArtifactDir, BranchKey};
use crate::runner::agents::AgentDefinition;
use crate::sandbox::spec::{MountAccess, WorkspaceMount};
use crate::sandbox::{self, SandboxDriver, SandboxSpec};

pub use orphans::{recover_all, recover_for_run, retry_delivery};

use collect::CollectOutcome;
use extractor::WorkExtractor;

/// The branch that a run's work is for. When the run begins, [`DeliveryTarget::acquire`] takes the branch's lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchRequest {
    pub repository: RepositoryUrl,
    pub key: BranchKey,
    /// The branch that the work is based on. `None` means the default branch.
    pub base: Option<String>,
    /// True if a pull request is opened after the run has ended successfully.
    pub pull_request: bool,
    /// The title for a new pull request. `None` means that the commits give the title.
    pub title: Option<String>,
    /// The user's request, for the pull request. Empty if the pull request does not show the request.
    pub asked: String,
    /// The grant that the stored work counts against, if the run uses a grant.
    pub grant: Option<String>,
}

/// The branch that receives a run's work. The run holds the branch's lease as long as the target lives.
#[derive(Clone)]
pub struct DeliveryTarget {
    service: Arc<DeliveryService>,
    branch: BranchRequest,
    leased_branch: LeasedBranch,
    /// The author of the commits.
    agent: String,
    /// The rules that the commits are checked against.
    rules: ReviewRules,
    /// The directory that holds the workspace and the collected work.
    artifacts: ArtifactDir,
}

/// A branch, as the outbox names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBranchRef {
    pub repository: String,
    pub branch_key: String,
}

/// A branch target with the outbox's row of its workspace. The agent is about to work in the workspace, or has worked.
#[derive(Debug)]
pub(super) struct TrackedWorkspace {
    target: DeliveryTarget,
    row: Box<WorkspaceRow>,
}

/// The outcome of the delivery, as the run's result reports it.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum DeliveryReport {
    Delivered(DeliveryStatus),
    /// The run has no branch, has no work to deliver, or its delivery failed.
    NotDelivered {
        #[serde(skip_serializing_if = "Option::is_none")]
        branch: Option<String>,
        why: String,
        /// The ID for `cogni-gateway relay`, if work remains in the workspace.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// False if work was not delivered.
        #[serde(skip)]
        is_well: bool,
    },
    /// The run has no delivery; the word is the reason.
    Skipped {
        skipped: &'static str,
    },
}

impl DeliveryTarget {
    /// Takes the branch's lease and fetches the branch's state from the remote. Waits up to `patience` until the branch
    /// is free. The commits carry the agent's name by default, and the agent's rules apply in addition to this host's.
    ///
    /// If `cancel` is cancelled, the git calls that read the remote are killed, and the lease is released before this
    /// function returns. What collects or delivers an earlier run's work goes on to its end first.
    ///
    /// # Errors
    /// Returns an error if another run holds the branch, if the remote cannot be reached, or if `cancel` was cancelled.
    pub async fn acquire(
        service: Arc<DeliveryService>,
        branch: BranchRequest,
        agent: Option<&AgentDefinition>,
        patience: Duration,
        cancel: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let BranchRequest { repository, key, base, .. } = &branch;
        let leased = service.lease_branch(repository, key, patience);
        let leased = cancel.run_until_cancelled(leased).await;
        let (mirror, lease) = leased.ok_or(DeliveryError::Cancelled)??;
        // Work that an earlier run left at the branch is recovered before the branch is opened. So this run starts from
        // that work.
        Box::pin(orphans::recover_at_branch(&service, repository, &lease)).await?;
        let opened = service.open_branch(repository, (mirror, lease), base.as_deref(), cancel);
        let leased_branch = Box::pin(opened).await?;
        let rules = service.rules_for(agent.and_then(|agent| agent.relay.as_ref()));
        let agent = agent.map_or("agent", |agent| &agent.name).to_owned();
        let artifacts = service.new_artifacts_dir();
        Ok(Self { service, branch, leased_branch, agent, rules, artifacts })
    }

    pub(super) fn branch(&self) -> &BranchRequest {
        &self.branch
    }

    /// Returns the branch's repository and key, as the outbox names the branch.
    pub(super) fn branch_ref(&self) -> StoredBranchRef {
        let branch_key = self.leased_branch.state.branch.key().as_str().to_owned();
        StoredBranchRef { repository: self.branch.repository.canonical_key(), branch_key }
    }

    /// Gives the sandbox a workspace with the branch checked out. The workspace is in the artifact directory, because
    /// the run's directory is removed with the run. Blocks.
    pub(super) fn prepare_sandbox(&self, spec: &mut SandboxSpec) -> anyhow::Result<()> {
        if spec.workspace != WorkspaceMount::None {
            bail!("a run with a repository has a workspace of its own; give no other");
        }
        ArtifactDir::create(self.artifacts.directory())?;
        let path = self.artifacts.workspace_path();
        self.checkout_into(&path, spec.uid, spec.limits.max_workspace)?;
        spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        Ok(())
    }

    /// Removes the workspace of a run that does not start, so that no agent has worked there. Blocks.
    pub(super) fn discard_workspace(&self) {
        if let Err(error) = self.artifacts.clone().discard() {
            tracing::warn!(%error, "cannot remove the workspace of a run that did not start");
        }
    }

    /// Records the workspace in the outbox before the agent starts. Blocks.
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
            repository: self.branch.repository.clone(),
            state: self.leased_branch.state.clone(),
            facts: RunFacts {
                run: order.spec.run.clone(),
                agent: self.agent.clone(),
                image: order.spec.root.to_string(),
                policy: policy.to_owned(),
                ..RunFacts::default()
            },
            rules: self.rules.clone(),
            host: self.service.host_context(),
            artifacts: self.artifacts.directory().to_owned(),
            run_dir: order.labels.run_dir.clone(),
            docker_socket: match driver {
                SandboxDriver::Docker { socket } => socket.clone(),
                // An empty path never exists, so a later sweep for this row asks no engine.
                SandboxDriver::Embedded(_) => PathBuf::new(),
            },
            grant: self.branch.grant.clone(),
        };
        // A long-running sandbox has its workspace elsewhere, so the artifact directory may not exist yet.
        ArtifactDir::create(&plan.artifacts)?;
        let row = self.service.outbox().register_workspace(&plan, path)?;
        Ok(TrackedWorkspace { target: self, row: Box::new(row) })
    }

    /// Checks the branch out for the sandbox's user, into a directory that does not exist yet. Blocks.
    ///
    /// # Errors
    /// Returns an error if the checkout takes more than `max_workspace` bytes, or if the checkout fails.
    pub(super) fn checkout_into(
        &self,
        workspace: &Path,
        uid: u32,
        max_workspace: u64,
    ) -> anyhow::Result<()> {
        let LeasedBranch { mirror, lease, state } = &self.leased_branch;
        // The mirror measures the checkout before any file is written, so that a huge branch never fills the disk.
        mirror.measure_checkout(state, max_workspace)?;
        let owner = FileOwner { uid, gid: uid };
        let author = CommitAuthor { name: self.agent.clone(), email: "agent@sandbox".to_owned() };
        let fed = mirror.checkout_workspace(lease, state, workspace, (owner, &author));
        fed.with_context(|| format!("the workspace for `{}` cannot be filled", state.branch))?;
        // Line endings and keywords can make a file larger than its object in git, and the workspace holds the history,
        // too. So the real size is checked as well.
        if dir_tree::disk_usage(workspace, max_workspace)? > max_workspace {
            dir_tree::remove_tree(workspace)?;
            let what = format!("more than {max_workspace} bytes with its history");
            return Err(
                repo::RepoError::CheckoutTooLarge { branch: state.branch.clone(), what }.into()
            );
        }
        Ok(())
    }
}

impl TrackedWorkspace {
    /// Collects the work and delivers it, as far as both are possible now. An error becomes part of the report.
    pub(super) async fn deliver(
        &self,
        driver: &SandboxDriver,
        order: &sandbox::SandboxRequest,
        source: FinishedRun<'_>,
    ) -> DeliveryReport {
        let DeliveryTarget { service, branch, leased_branch, .. } = &self.target;
        // The row was written before the run, when the costs were not known.
        let mut row = self.row.clone();
        row.plan.facts.spent = source.run.ledger.spent_amount();
        // A failed run still delivers its commits, but asks no person to review them.
        let words = (branch.pull_request && source.is_ok).then(|| outbox::PullRequestText {
            title: branch.title.clone().unwrap_or_default(),
            // The outbox's row keeps no more of the request than the pull request shows.
            asked: branch.asked.chars().take(MAX_ASKED_CHARS + 1).collect(),
            model: order.spec.env.get(MODEL_VARIABLE).cloned().unwrap_or_default(),
            ..source.text
        });
        let delivering = async {
            let extractor = WorkExtractor::for_delivery(driver, order, service)?;
            match Box::pin(collect::collect_work(service, &extractor, &row, words)).await? {
                CollectOutcome::Work(job) => {
                    let (lease, audit) = (&leased_branch.lease, &source.run.audit);
                    let delivered = service.deliver_with_cancel(
                        source.detach_delivery,
                        job.request,
                        lease,
                        audit,
                    );
                    Ok(DeliveryReport::Delivered(Box::pin(delivered).await?))
                }
                CollectOutcome::Nothing => Ok(DeliveryReport::no_work(&row)),
                CollectOutcome::Retained(row) => Ok(DeliveryReport::work_left(&row)),
            }
        };
        let done: anyhow::Result<_> = delivering.await;
        done.unwrap_or_else(|error| {
            tracing::error!(run = order.spec.run, "cannot deliver the run's work: {error:#}");
            let (branch, id) = (Some(leased_branch.state.branch.to_string()), Some(row.id.clone()));
            DeliveryReport::NotDelivered { branch, why: format!("{error:#}"), id, is_well: false }
        })
    }
}

/// The run that made the work. The run's processes are gone.
pub(super) struct FinishedRun<'a> {
    pub(super) run: &'a AgentRun,
    /// True if the run succeeded. A failed run gets no pull request.
    pub(super) is_ok: bool,
    pub(super) text: outbox::PullRequestText,
    /// Stops waiting for the delivery, once the delivery is in the outbox.
    pub(super) detach_delivery: &'a CancellationToken,
}

impl fmt::Debug for DeliveryTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeliveryTarget")
            .field("branch", &self.leased_branch.state.branch)
            .finish_non_exhaustive()
    }
}

impl DeliveryReport {
    /// Returns the report of a run with a repository but without a branch.
    pub fn skipped_without_branch() -> Self {
        let why =
            "the run has no branch: give `--branch-key` or `--work-item`, or `--branch-by-state`";
        Self::NotDelivered { branch: None, why: why.to_owned(), id: None, is_well: true }
    }

    /// Returns true if every commit was delivered, or if there was no commit to deliver.
    pub fn is_complete(&self) -> bool {
        match self {
            Self::Delivered(delivered) => delivered.is_complete(),
            Self::NotDelivered { is_well, .. } => *is_well,
            Self::Skipped { .. } => true,
        }
    }

    fn no_work(row: &WorkspaceRow) -> Self {
        let branch = Some(row.plan.state.branch.to_string());
        Self::NotDelivered {
            branch,
            why: collect::NO_WORK_MESSAGE.to_owned(),
            id: None,
            is_well: true,
        }
    }

    fn work_left(row: &WorkspaceRow) -> Self {
        let branch = Some(row.plan.state.branch.to_string());
        let left = row.left.as_deref().unwrap_or_default();
        let kept = format!("{left}; the workspace is kept in `{}`", row.workspace.display());
        let why = match row.due {
            Some(_) => format!("{kept}, and the collection is tried again"),
            None => kept,
        };
        Self::NotDelivered { branch, why, id: Some(row.id.clone()), is_well: false }
    }

    /// Returns the report of a run without a branch key, with the reason as a code for programs.
    pub fn skipped_without_key() -> Self {
        Self::Skipped { skipped: "no_branch_key" }
    }
}
