//! Durable delivery of a run's work, from this machine's disk to its branch and its pull request.
//!
//! Each step is done first, then written into the outbox, then recorded in the run's audit log. If the process ends in
//! between, the next process that claims the row finds the step done, or does the step again. Each step can be
//! repeated: quarantine makes the same commits, the push states where the branch was, and the forge is searched for the
//! pull request before a new pull request is opened.
//!
//! The [`outbox`] stores how far each work has come, and the [`rules`] that the work is reviewed by. [`repo`] does the
//! git part, and [`forge`](crate::relay::github) opens the pull request. A [`statement`] says what this machine
//! attests.
//!
//! The run's audit log records what happens while that log is open. Later steps are recorded in the row's own log
//! ([`job_audit_log`]).
//!
//! **Invariant:** work that is not delivered is kept, with the command line that brings the work into a clone.

mod fair_order;
mod git_steps;
mod host_context;
pub mod job_audit_log;
pub mod outbox;
mod resume;
pub mod rules;
mod run_job;
pub mod statement;
mod stop;
pub mod sweep;
pub mod sweep_clock;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::base::host_reach::HostReach;
use crate::base::secret::SecretString;
use crate::relay::git::OutboundConfig;
use crate::relay::github::client::{GithubClient, GithubError};
use crate::relay::github::credential::ForgeCredential;
use crate::relay::repo::artifact::RetentionLimits;
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{
    self, ArtifactDir, BranchKey, BranchLease, BranchState, GitProgram, ObjectId, RepoMirror,
    SandboxBranch, extract_commands, review,
};
use crate::telemetry::audit::{self, AuditLog, AuditSigningKey, delivery_records as event};
pub use fair_order::interleave_by_owner;
use outbox::{
    DeliveryJob, DeliveryOutbox, DeliveryRequest, DeliveryStep, HostContext, VerdictKind,
    WorkspaceRow,
};
use rules::{AgentReviewRules, ReviewRules};
pub use stop::retry_delay;

/// The settings and credentials that a [`DeliveryService`] is made from.
pub struct DeliveryConfig {
    /// The directory of the mirrors, the leases, the outbox and the work that came out of sandboxes.
    pub state: PathBuf,
    pub review: review::RelayConfig,
    /// The committer of the commits that the relay rewrites, and of its notes, as `Name <email>`.
    pub committer: String,
    pub access: Option<ForgeAccess>,
    /// The proxy and certificate settings that git uses to reach remotes.
    pub network: OutboundConfig,
    /// The seed of the key that signs statements and audit logs. A generated key that lives as long as this process is
    /// used if the seed is absent.
    pub signing_key: Option<SecretString>,
    /// Credentials of this host. No work that is delivered may contain any of them.
    pub known_secrets: Vec<KnownSecret>,
}

/// One credential of this host.
#[derive(Clone, Debug)]
pub struct KnownSecret {
    /// The name of the environment variable that holds the credential.
    pub name: &'static str,
    pub secret: SecretString,
}

/// The client and the credential that reach a forge.
#[derive(Debug)]
pub struct ForgeAccess {
    pub api: GithubClient,
    pub credential: ForgeCredential,
}

/// The relay of this machine, which delivers the work of all runs.
pub struct DeliveryService {
    settings: DeliveryConfig,
    git: GitProgram,
    outbox: DeliveryOutbox,
    key: AuditSigningKey,
}

/// A branch that one run holds exclusively as long as this value lives, and the branch's state at the run's begin.
#[derive(Clone, Debug)]
pub struct LeasedBranch {
    pub mirror: RepoMirror,
    pub lease: BranchLease,
    pub state: BranchState,
}

/// The delivery status of a run's work, as results and `cogni-gateway relay` display it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeliveryStatus {
    /// The delivery's ID, an argument of `cogni-gateway relay`.
    pub id: String,
    #[serde(serialize_with = "serialize_branch")]
    pub branch: SandboxBranch,
    pub step: &'static str,
    pub verdict: Option<&'static str>,
    /// The reasons why a person has to look at the work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// The commit that the branch points to, or would point to after a push.
    pub head: Option<ObjectId>,
    pub is_pushed: bool,
    pub pull_request_url: Option<String>,
    /// The reason why the delivery is not further.
    pub why: Option<String>,
    /// The command line that brings work into a clone. Present only if the branch does not have the work.
    pub apply: Option<String>,
    /// The directory to inspect, if something remains in the workspace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace: Option<PathBuf>,
    /// The result of publishing the statement beside the commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statement: Option<String>,
    /// The path of the row's own audit log, if anything was done after the run's log was closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<PathBuf>,
}

/// The reason why no delivery status can be returned. Work that is in the outbox stays there in spite of such an error.
#[derive(Debug, thiserror::Error)]
pub enum DeliveryError {
    #[error(transparent)]
    Outbox(#[from] outbox::OutboxError),
    #[error(transparent)]
    Relay(#[from] repo::RepoError),
    #[error(transparent)]
    GitHub(#[from] GithubError),
    #[error(transparent)]
    Audit(#[from] audit::AuditError),
    #[error(
        "cannot use the review rules of this work: another version wrote them, or there are too many; bring the work into a clone with `cogni-gateway relay apply`"
    )]
    Rules(#[from] review::RelayConfigError),
    #[error(
        "cannot check this work for the secret `{name}`: its value has changed since the work was collected, or is not set here; set `{name}` to the old value, or review the work again with today's secrets, with `--new-rules`"
    )]
    UnknownSecret { name: String },
    #[error(
        "cannot deliver `{id}`: its branch has moved on since its run began; bring the work into a clone with `cogni-gateway relay apply`"
    )]
    BranchAdvanced { id: String },
    #[error(
        "delivery `{id}` of an earlier run must reach this branch first, and cannot be delivered now: {why}; try again later, or run `cogni-gateway relay retry {id}`"
    )]
    Waiting { id: String, why: String },
    #[error(
        "cannot apply new rules: this delivery is still in progress; new rules are for work that is held or has failed"
    )]
    InProgress,
    #[error("the caller was cancelled while its branch was read")]
    Cancelled,
    #[error("a task of the relay was cancelled or has panicked")]
    TaskFailed(#[from] tokio::task::JoinError),
}

impl DeliveryService {
    /// Opens the relay's state directory: finds git, opens the outbox, and prepares the signing key. Blocks.
    ///
    /// # Errors
    /// Returns an error if git cannot be found, if the outbox cannot be opened, or if the signing key is not valid.
    pub fn open(settings: DeliveryConfig) -> Result<Self, DeliveryError> {
        let git = GitProgram::find(&settings.state.join("home")).map_err(repo::RepoError::from)?;
        // Every git process of this relay gets the same proxy and certificate settings.
        let git = git.with_network(settings.network.clone());
        let outbox = DeliveryOutbox::open(&settings.state.join(OUTBOX_FILE))?;
        let key = AuditSigningKey::new(settings.signing_key.as_ref())?;
        Ok(Self { settings, git, outbox, key })
    }

    pub fn outbox(&self) -> &DeliveryOutbox {
        &self.outbox
    }

    /// Returns the directory of the state that outlives a run.
    pub fn state_dir(&self) -> &Path {
        &self.settings.state
    }

    /// Returns this machine's git, for callers that collect work from a workspace.
    pub fn git(&self) -> &GitProgram {
        &self.git
    }

    /// Returns the limits on what may come out of a sandbox.
    pub fn extract_limits(&self) -> &extract_commands::ExtractLimits {
        &self.settings.review.extract
    }

    /// Returns the limits on work that is held, has failed or was left.
    pub fn retention_limits(&self) -> &RetentionLimits {
        &self.settings.review.kept
    }

    /// Returns the reason why no further run with a branch may begin, because too much work is retained. Checks the
    /// limits of `grant`, if there is one, and then the limits of this host. Returns `None` if a run may begin. Blocks.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub fn retention_full_reason(
        &self,
        grant: Option<&str>,
    ) -> Result<Option<String>, DeliveryError> {
        let limits = &self.settings.review.kept;
        let of_grant =
            grant.map(|grant| (Some(grant), "this grant", limits.grant_works, limits.grant_bytes));
        let checks = of_grant.into_iter().chain([(None, "this host", limits.works, limits.bytes)]);
        // The grant's own limits come first: the message then says that the grant is full, and not the host.
        for (grant, owner, max_works, max_bytes) in checks {
            let retained = self.outbox.retained_totals(grant)?;
            if retained.works >= max_works || retained.bytes >= max_bytes {
                return Ok(Some(format!(
                    "{owner} keeps {} works that are held, have failed or are left over, with {} bytes; {max_works} and {max_bytes} are allowed",
                    retained.works, retained.bytes
                )));
            }
        }
        Ok(None)
    }

    /// Removes retained work that is older at `now` than the settings allow, and returns the number of removed items. Blocks.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub fn expire_retained(&self, now: SystemTime) -> Result<usize, DeliveryError> {
        match now.checked_sub(self.settings.review.kept.age) {
            Some(before) => Ok(self.outbox.expire_retained(before)?),
            // The age reaches further back than the clock can express, so nothing is that old.
            None => Ok(0),
        }
    }

    /// Returns the rules that review an agent's work if the agent's run begins now: this host's, tightened by
    /// `agent_rules`.
    pub fn rules_for(&self, agent_rules: Option<&AgentReviewRules>) -> ReviewRules {
        ReviewRules::new(&self.settings.review.policy, agent_rules)
    }

    /// Warns the operator of agent rules that have no effect because this host's own rule is stricter.
    pub fn warn_ineffective_rules(&self, agent: &str, agent_rules: Option<&AgentReviewRules>) {
        let idle = agent_rules
            .map(|agent_rules| agent_rules.policy.ineffective_rules(&self.settings.review.policy))
            .unwrap_or_default();
        if !idle.is_empty() {
            let rules = idle.join(", ");
            tracing::warn!(
                agent,
                rules,
                "these rules of the agent have no effect: this host's rules are stricter"
            );
        }
    }

    /// Returns the rules that review a row. A row of an earlier version has no rules, and gets this host's present
    /// ones.
    fn rules_for_request(&self, request: &DeliveryRequest) -> ReviewRules {
        request.rules.clone().unwrap_or_else(|| self.rules_for(None))
    }

    /// Stores new review rules in a row: this host's present rules, with the agent's rules of the row. Also stores this
    /// host's present secrets, and keeps the row's committer. Only an operator asks for new rules. Blocks.
    ///
    /// # Errors
    /// Returns an error if the branch already has the work, if the row's rules cannot be parsed, or if the outbox does
    /// not work.
    fn renew_rules(&self, job: &DeliveryJob) -> Result<DeliveryJob, DeliveryError> {
        let rules =
            self.rules_for_request(&job.request).with_host_policy(&self.settings.review.policy)?;
        // The committer stays: another one would give the same work another commit ID.
        let committer = self.committer_for(&job.request).to_owned();
        let host = HostContext { committer, ..self.host_context() };
        Ok(self.outbox.set_rules(job, rules, host)?)
    }

    /// Leases a branch for a run, as soon as no other run holds the branch. The run then calls
    /// [`open_branch`](DeliveryService::open_branch).
    ///
    /// # Errors
    /// Returns an error if another run holds the branch for longer than `max_wait`.
    pub async fn lease_branch(
        self: &Arc<Self>,
        repository: &RepositoryUrl,
        key: &BranchKey,
        max_wait: Duration,
    ) -> Result<(RepoMirror, BranchLease), DeliveryError> {
        let (relay, url) = (self.clone(), repository.clone());
        let mirror = tokio::task::spawn_blocking(move || relay.open_mirror(&url)).await??;
        let lease = mirror.lease_with_timeout(key, max_wait).await?;
        Ok((mirror, lease))
    }

    /// Delivers the work that earlier runs have left undelivered at a branch, so that this run builds on that work.
    /// Then fetches the branch and returns its state. If `cancel` is cancelled, a delivery under way goes on to its end,
    /// and the git calls that fetch the branch are killed.
    ///
    /// # Errors
    /// Returns [`DeliveryError::Waiting`] if earlier work cannot be delivered now: commits of a run that begins without
    /// that work would be in its way. Also returns an error if the remote or the outbox cannot be read.
    pub async fn open_branch(
        self: &Arc<Self>,
        repository: &RepositoryUrl,
        (mirror, lease): (RepoMirror, BranchLease),
        base: Option<&str>,
        cancel: &CancellationToken,
    ) -> Result<LeasedBranch, DeliveryError> {
        let key = lease.branch().key().clone();
        let (relay, url, branch_key) = (self.clone(), repository.clone(), key);
        let pending = move || relay.outbox.pending_jobs(&url, &branch_key);
        let pending = tokio::task::spawn_blocking(pending).await??;
        // The lease is held during all of these deliveries, so no other run can add work to the branch in between.
        for job in pending {
            if cancel.is_cancelled() {
                return Err(DeliveryError::Cancelled);
            }
            let delivered = Box::pin(self.run_detached_job(job, &lease)).await?;
            // Held and failed work does not stop the run: such work comes to the branch only if an operator acts.
            if delivered.is_pending() {
                let DeliveryStatus { id, why, .. } = delivered;
                return Err(DeliveryError::Waiting { id, why: why.unwrap_or_default() });
            }
        }
        // The branch is read after the deliveries, because they move it.
        let token = cancel.run_until_cancelled(Box::pin(self.repository_token(repository))).await;
        let token = token.ok_or(DeliveryError::Cancelled)??;
        let (base, own_lease) = (base.map(str::to_owned), lease.clone());
        // Only these calls are killed. The run's later calls in the mirror have ends of their own.
        let reading = mirror.clone().with_cancellation(cancel.clone());
        tokio::task::spawn_blocking(move || {
            let state = reading.ensure_branch(&own_lease, base.as_deref(), token.as_ref())?;
            Ok(LeasedBranch { mirror, lease: own_lease, state })
        })
        .await?
    }

    /// Creates a new directory for the work that comes out of a sandbox.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created.
    pub fn create_artifacts_dir(&self) -> Result<ArtifactDir, DeliveryError> {
        Ok(ArtifactDir::create(self.new_artifacts_dir().directory())?)
    }

    /// Returns a new path for the work that comes out of a sandbox, and creates no directory.
    pub fn new_artifacts_dir(&self) -> ArtifactDir {
        let name = Uuid::now_v7().simple().to_string();
        ArtifactDir::from_path(&self.settings.state.join(outbox::WORK_DIR).join(name))
    }

    /// Leases a branch, if no other run or process holds the branch, and does not wait. Blocks.
    ///
    /// # Errors
    /// Returns [`repo::RepoError::BranchInUse`] if the branch is held, or an error if the disk cannot be used.
    pub fn try_lease_branch(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<BranchLease, DeliveryError> {
        Ok(self.open_mirror(repository)?.lease_branch(key)?)
    }

    /// Delivers the work that has come out of a sandbox. The bundle and the patches are in the request's artifacts
    /// directory. The outbox keeps what cannot be done now for a later attempt.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub async fn deliver(
        self: &Arc<Self>,
        request: DeliveryRequest,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        Box::pin(self.deliver_with_cancel(&CancellationToken::new(), request, lease, audit)).await
    }

    /// Delivers work like [`DeliveryService::deliver`], and stops waiting when `cut` is cancelled. The work is in the
    /// outbox by then, and the next process that claims the row does the remaining steps.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub async fn deliver_with_cancel(
        self: &Arc<Self>,
        cut: &CancellationToken,
        mut request: DeliveryRequest,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        let relay = self.clone();
        // The rules of this moment are stored with the work, so that a later attempt reviews by the same rules.
        request.rules.get_or_insert_with(|| self.rules_for(None));
        // `cut` does not apply to this statement: once the caller has extracted the work, the row must exist.
        let job = tokio::task::spawn_blocking(move || relay.enqueue(request)).await??;
        record_extracted(&job, audit);
        let id = job.id.clone();
        // Dropping the future between two steps is safe: each step is repeatable, and the row says which steps are
        // done.
        match cut.run_until_cancelled(Box::pin(self.run_job(job, lease, audit))).await {
            Some(delivered) => delivered,
            None => self.status(&id).await,
        }
    }

    /// Adds the extracted work to the outbox, with the host settings that the result depends on. Blocks.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub fn enqueue(&self, mut request: DeliveryRequest) -> Result<DeliveryJob, DeliveryError> {
        request.host.get_or_insert_with(|| self.host_context());
        Ok(self.outbox.add_job(&request)?)
    }

    /// Returns the present status of a row, for a caller that does not wait for the delivery.
    ///
    /// # Errors
    /// Returns an error if there is no such row, or if the outbox does not work.
    pub async fn status(self: &Arc<Self>, id: &str) -> Result<DeliveryStatus, DeliveryError> {
        let (relay, id) = (self.clone(), id.to_owned());
        let looked = move || {
            let job = relay.outbox.get(&id)?;
            let left = (!job.step.is_terminal()).then(|| DETACHED_MESSAGE.to_owned());
            let looked = DeliveryStatus::from_job(&job, &relay.settings.state);
            Ok(DeliveryStatus { why: looked.why.clone().or(left), ..looked })
        };
        tokio::task::spawn_blocking(looked).await?
    }

    /// Returns true if this host has a credential to push work to the forge and to open pull requests there.
    pub fn has_credential(&self) -> bool {
        self.settings.access.is_some()
    }

    /// Asks the forge whether it accepts this host's credential. Returns `None` if this host has no credential.
    pub async fn check_credential(&self) -> Option<Result<(), GithubError>> {
        let ForgeAccess { api, credential } = self.settings.access.as_ref()?;
        Some(credential.check(api).await)
    }

    fn open_mirror(&self, repository: &RepositoryUrl) -> Result<RepoMirror, DeliveryError> {
        let is_our_forge = self
            .hosted_access(repository)
            .is_some_and(|(hosted, access)| access.api.serves_repository(hosted));
        // The operator of this host has named the forge by the API's address. So the forge may be reached even at a
        // private address, whatever reach the grant's repository has.
        let named = is_our_forge.then(|| repository.clone().with_reach(HostReach::Named));
        let repository = named.as_ref().unwrap_or(repository);
        let mirror = RepoMirror::open(&self.git, &self.settings.state, repository)?;
        Ok(mirror.with_limits(self.settings.review.fetch))
    }
}

impl DeliveryStatus {
    /// Returns the status of a row of the relay whose state directory is `state`.
    pub fn from_job(job: &DeliveryJob, state: &Path) -> Self {
        let branch = job.request.branch();
        // A command is offered only for work that will not come to the branch without an operator.
        let is_kept = job.step.is_terminal() && !job.is_pushed && job.can_be_applied();
        let apply = is_kept
            .then(|| ArtifactDir::from_path(&job.request.artifacts).apply_command(branch, &job.id));
        Self {
            id: job.id.clone(),
            branch: branch.clone(),
            step: job.step.as_str(),
            verdict: job.verdict.map(VerdictKind::as_str),
            reasons: job.reasons.iter().map(ToString::to_string).collect(),
            head: job.head,
            is_pushed: job.is_pushed,
            pull_request_url: job.pull_request.as_ref().map(|pull| pull.url.clone()),
            why: job.error.clone(),
            apply,
            workspace: None,
            statement: job.statement.clone(),
            audit: Some(job_audit_log::log_path(state, &job.id)).filter(|path| path.exists()),
        }
    }

    /// Returns the status of a workspace that has no work in it.
    pub fn no_work(row: &WorkspaceRow, why: &str) -> Self {
        let delivery = Self::from_workspace(row);
        Self { step: STEP_NOTHING, why: Some(why.to_owned()), workspace: None, ..delivery }
    }

    /// Returns true if no step remains, because the work is delivered or because there was no work.
    pub fn is_complete(&self) -> bool {
        [DeliveryStep::Done.as_str(), STEP_NOTHING].contains(&self.step)
    }

    /// Returns true if the work will be tried again without a request from an operator, and the branch does not have it
    /// yet.
    fn is_pending(&self) -> bool {
        // `step` is a text here, and may also be the name of a workspace's state, which is no end.
        let is_end = |step: &DeliveryStep| step.is_terminal() && step.as_str() == self.step;
        !self.is_pushed && !DeliveryStep::ALL.iter().any(is_end)
    }

    /// Returns the status of a workspace whose work has not been collected.
    pub fn from_workspace(row: &WorkspaceRow) -> Self {
        Self {
            id: row.id.clone(),
            branch: row.plan.state.branch.clone(),
            step: if row.left.is_some() { "left" } else { "begun" },
            verdict: None,
            reasons: vec![],
            head: None,
            is_pushed: false,
            pull_request_url: None,
            why: row.left.clone(),
            apply: None,
            workspace: Some(row.workspace.clone()),
            statement: None,
            audit: None,
        }
    }
}

fn record_extracted(job: &DeliveryJob, audit: &AuditLog) {
    let DeliveryRequest { repository, state, announced, .. } = &job.request;
    audit.record_delivery(&event::WorkExtractedRecord {
        relay: &job.id,
        repository: &repository.canonical_key(),
        branch: &state.branch.to_string(),
        start: &state.start.to_string(),
        tree: &announced.tree.to_string(),
        commits: announced.commits,
    });
}

/// Serializes a branch as its name, with `sandbox/` before the key.
fn serialize_branch<S: Serializer>(branch: &SandboxBranch, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(branch)
}

/// The step name of a workspace that had no work in it.
const STEP_NOTHING: &str = "nothing";

/// The reason in a status that was read during the delivery.
const DETACHED_MESSAGE: &str =
    "the caller has stopped waiting for this delivery; a later attempt continues it";

/// The outbox's file name in the relay's state directory.
pub const OUTBOX_FILE: &str = "outbox.sqlite";
