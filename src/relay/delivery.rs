//! Durable delivery: a run's work, from this machine's disk to its branch and its pull request.
//!
//! Each step is done, then written down, then recorded in the run's audit. Whatever ends the process in between, whoever
//! takes the row up next finds the step done, or does it: the commits come out the same, the push is told where the
//! branch was, the pull request is looked for first.
//!
//! The [`outbox`] remembers how far each work has come, and by which [`rules`] it is judged; [`repo`] does what git
//! does, and [`forge`](crate::relay::github) asks for the pull request. A [`statement`] says what this machine vouches for.
//!
//! What is done while the run's audit log is open is in there; what is done later is in the row's own ([`job_audit_log`]).
//!
//! **Invariant:** work that is not delivered is kept, with the line that brings it into a clone.

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

/// What a relay is made of.
pub struct DeliveryConfig {
    /// Mirrors, leases, the outbox and what came out of sandboxes are here.
    pub state: PathBuf,
    pub judge: review::RelayConfig,
    /// `Name <email>`: who makes the relay's commits.
    pub committer: String,
    pub access: Option<ForgeAccess>,
    /// By which way git gets to remotes.
    pub network: OutboundConfig,
    /// The seed of the key that signs statements and audit logs; without one it lives as long as this process.
    pub signing_key: Option<SecretString>,
    /// Credentials of this host. None of them must be found in anybody's work.
    pub known: Vec<KnownSecret>,
}

/// One credential of this host.
#[derive(Clone, Debug)]
pub struct KnownSecret {
    /// The variable that it is given in.
    pub name: &'static str,
    pub secret: SecretString,
}

/// How a forge is reached.
#[derive(Debug)]
pub struct ForgeAccess {
    pub api: GithubClient,
    pub credential: ForgeCredential,
}

/// This machine's relay.
pub struct DeliveryService {
    settings: DeliveryConfig,
    git: GitProgram,
    outbox: DeliveryOutbox,
    key: AuditSigningKey,
}

/// A branch that is a run's, for as long as this lives, and where it stands.
#[derive(Clone, Debug)]
pub struct LeasedBranch {
    pub mirror: RepoMirror,
    pub lease: BranchLease,
    pub state: BranchState,
}

/// What has become of a run's work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeliveryStatus {
    /// For `cogni-gateway relay`.
    pub id: String,
    #[serde(serialize_with = "serialize_branch")]
    pub branch: SandboxBranch,
    pub step: &'static str,
    pub verdict: Option<&'static str>,
    /// What people have to look at, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// What the branch is at, or would be.
    pub head: Option<ObjectId>,
    pub is_pushed: bool,
    pub pull_request_url: Option<String>,
    /// Why it is not further.
    pub why: Option<String>,
    /// What brings it into a clone, where it is not at its branch.
    pub apply: Option<String>,
    /// What is to be seen of the workspace, where something is left in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace: Option<PathBuf>,
    /// What has become of the statement beside the commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statement: Option<String>,
    /// What was done after the run's own log was closed, if anything was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<PathBuf>,
}

/// Why nothing can be said about the work. It is in the outbox all the same, if it ever was.
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
        "the rules that it is judged by cannot be used: another version wrote them, or they are too many; `cogni-gateway relay apply` brings it into a clone"
    )]
    Rules(#[from] review::RelayConfigError),
    #[error(
        "`{name}` must not be in this work, and is another than when that came out, or is not given here: give it, or have the work judged by what is known now, with `--new-rules`"
    )]
    Ignorant { name: String },
    #[error(
        "relay `{id}` is for a branch that has moved on since its run began; `cogni-gateway relay apply` brings it into a clone"
    )]
    Overtaken { id: String },
    #[error(
        "relay `{id}` has to come to this branch first, and cannot yet: {why}; try again later, or see what `cogni-gateway relay retry {id}` says"
    )]
    Waiting { id: String, why: String },
    #[error("it is on its way; new rules are for what is held, or has failed")]
    OnItsWay,
    #[error("the relay has been ended")]
    Ended(#[from] tokio::task::JoinError),
}

impl DeliveryService {
    /// Opens what is on the disk. Blocks.
    ///
    /// # Errors
    /// There is no git, or the directory cannot be used.
    pub fn open(settings: DeliveryConfig) -> Result<Self, DeliveryError> {
        let git = GitProgram::find(&settings.state.join("home")).map_err(repo::RepoError::from)?;
        let git = git.with_network(settings.network.clone());
        let outbox = DeliveryOutbox::open(&settings.state.join(OUTBOX_FILE))?;
        let key = AuditSigningKey::new(settings.signing_key.as_ref())?;
        Ok(Self { settings, git, outbox, key })
    }

    pub fn outbox(&self) -> &DeliveryOutbox {
        &self.outbox
    }

    /// Returns the directory of what outlives a run.
    pub fn state_dir(&self) -> &Path {
        &self.settings.state
    }

    /// This machine's git, for whoever takes work out of a workspace with it.
    pub fn git(&self) -> &GitProgram {
        &self.git
    }

    /// What may come out of a sandbox.
    pub fn extract_limits(&self) -> &extract_commands::ExtractLimits {
        &self.settings.judge.extract
    }

    /// Tells why no further run that has a branch may begin: of a grant or, without one, of this machine's operator. None
    /// where one may. Blocks.
    ///
    /// # Errors
    /// The outbox does not work.
    pub fn retention_full_reason(
        &self,
        grant: Option<&str>,
    ) -> Result<Option<String>, DeliveryError> {
        let most = &self.settings.judge.kept;
        let of_grant =
            grant.map(|grant| (Some(grant), "this grant", most.grant_works, most.grant_bytes));
        let whose = of_grant.into_iter().chain([(None, "this host", most.works, most.bytes)]);
        for (grant, who, works, bytes) in whose {
            let kept = self.outbox.retained_totals(grant)?;
            if kept.works >= works || kept.bytes >= bytes {
                return Ok(Some(format!(
                    "{who} keeps {} works that are held, have failed or were left, with {} bytes; {works} and {bytes} are allowed",
                    kept.works, kept.bytes
                )));
            }
        }
        Ok(None)
    }

    /// Throws away what was kept for as long as the settings say, and returns how many that were. Blocks.
    ///
    /// # Errors
    /// The outbox does not work.
    pub fn expire_retained(&self) -> Result<usize, DeliveryError> {
        match SystemTime::now().checked_sub(self.settings.judge.kept.age) {
            Some(before) => Ok(self.outbox.expire_retained(before)?),
            None => Ok(0),
        }
    }

    /// What the work of an agent with these rules of its own is judged by, if its run begins now.
    pub fn rules_for(&self, own: Option<&AgentReviewRules>) -> ReviewRules {
        ReviewRules::new(&self.settings.judge.policy, own)
    }

    /// Tells the operator of an agent's rules that change nothing here.
    pub fn warn_ineffective_rules(&self, agent: &str, own: Option<&AgentReviewRules>) {
        let idle = own
            .map(|own| own.policy.ineffective_rules(&self.settings.judge.policy))
            .unwrap_or_default();
        if !idle.is_empty() {
            let rules = idle.join(", ");
            tracing::warn!(
                agent,
                rules,
                "this host is stricter than these rules of the agent's, which change nothing"
            );
        }
    }

    /// What a row is judged by. One of an earlier version does not say.
    fn rules_for_request(&self, order: &DeliveryRequest) -> ReviewRules {
        order.rules.clone().unwrap_or_else(|| self.rules_for(None))
    }

    /// Has a row judged by this host's rules as they are now, and by its agent's as they were, because somebody asks for
    /// it. Blocks.
    ///
    /// # Errors
    /// It is at its branch already, or the outbox does not work.
    fn renew_rules(&self, job: &DeliveryJob) -> Result<DeliveryJob, DeliveryError> {
        let rules =
            self.rules_for_request(&job.order).with_host_policy(&self.settings.judge.policy)?;
        let committer = self.committer_for(&job.order).to_owned();
        let host = HostContext { committer, ..self.host_context() };
        Ok(self.outbox.set_rules(job, rules, host)?)
    }

    /// Makes a branch a run's, as soon as no other run has it; the run [begins](DeliveryService::open_branch) there.
    ///
    /// # Errors
    /// The branch is taken for longer than `patience`.
    pub async fn lease_branch(
        self: &Arc<Self>,
        repository: &RepositoryUrl,
        key: &BranchKey,
        patience: Duration,
    ) -> Result<(RepoMirror, BranchLease), DeliveryError> {
        let (relay, place) = (self.clone(), repository.clone());
        let mirror = tokio::task::spawn_blocking(move || relay.open_mirror(&place)).await??;
        let lease = mirror.lease_with_timeout(key, patience).await?;
        Ok((mirror, lease))
    }

    /// Delivers what an earlier run has left undelivered at a branch, so that this one builds on it, and says where that
    /// stands.
    ///
    /// # Errors
    /// [`DeliveryError::Waiting`] where that cannot be delivered now: a run that begins without it would be in its way. It cannot be
    /// looked up.
    pub async fn open_branch(
        self: &Arc<Self>,
        repository: &RepositoryUrl,
        (mirror, lease): (RepoMirror, BranchLease),
        base: Option<&str>,
    ) -> Result<LeasedBranch, DeliveryError> {
        let key = lease.branch().key().clone();
        let (relay, place, own) = (self.clone(), repository.clone(), key);
        let pending = move || relay.outbox.pending_jobs(&place, &own);
        let pending = tokio::task::spawn_blocking(pending).await??;
        for job in pending {
            let delivered = Box::pin(self.run_detached_job(job, &lease)).await?;
            if delivered.is_pending() {
                let DeliveryStatus { id, why, .. } = delivered;
                return Err(DeliveryError::Waiting { id, why: why.unwrap_or_default() });
            }
        }
        let token = self.repository_token(repository).await?;
        let (base, held) = (base.map(str::to_owned), lease.clone());
        tokio::task::spawn_blocking(move || {
            let state = mirror.ensure_branch(&held, base.as_deref(), token.as_ref())?;
            Ok(LeasedBranch { mirror, lease: held, state })
        })
        .await?
    }

    /// A directory for what comes out of a sandbox.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn create_artifacts_dir(&self) -> Result<ArtifactDir, DeliveryError> {
        Ok(ArtifactDir::create(self.new_artifacts_dir().directory())?)
    }

    /// Where that will be.
    pub fn new_artifacts_dir(&self) -> ArtifactDir {
        let name = Uuid::now_v7().simple().to_string();
        ArtifactDir::from_path(&self.settings.state.join("work").join(name))
    }

    /// Takes hold of a branch as it is, where nobody else has it.
    ///
    /// # Errors
    /// [`repo::RepoError::Busy`], or the disk cannot be used. Blocks.
    pub fn try_lease_branch(
        &self,
        repository: &RepositoryUrl,
        key: &BranchKey,
    ) -> Result<BranchLease, DeliveryError> {
        Ok(self.open_mirror(repository)?.lease_branch(key)?)
    }

    /// Delivers what has come out of a sandbox: the bundle and the patches are in the order's artifacts. What cannot be
    /// done now is in the outbox for later.
    ///
    /// # Errors
    /// The outbox does not work.
    pub async fn deliver(
        self: &Arc<Self>,
        order: DeliveryRequest,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        Box::pin(self.deliver_with_cancel(&CancellationToken::new(), order, lease, audit)).await
    }

    /// The same, for whoever waits until `cut` only, once the work is in the outbox. What is not done by then is left to
    /// whoever takes the row up.
    ///
    /// # Errors
    /// As [`DeliveryService::deliver`].
    pub async fn deliver_with_cancel(
        self: &Arc<Self>,
        cut: &CancellationToken,
        mut order: DeliveryRequest,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        let relay = self.clone();
        order.rules.get_or_insert_with(|| self.rules_for(None));
        let job = tokio::task::spawn_blocking(move || relay.enqueue(order)).await??;
        record_extracted(&job, audit);
        let id = job.id.clone();
        match cut.run_until_cancelled(Box::pin(self.run_job(job, lease, audit))).await {
            Some(delivered) => delivered,
            None => self.status(&id).await,
        }
    }

    /// Writes down what has come out, and what of this host it depends on. Blocks.
    ///
    /// # Errors
    /// The outbox does not work.
    pub fn enqueue(&self, mut order: DeliveryRequest) -> Result<DeliveryJob, DeliveryError> {
        order.host.get_or_insert_with(|| self.host_context());
        Ok(self.outbox.add_job(&order)?)
    }

    /// How far a row has come, for whoever does not wait for it.
    ///
    /// # Errors
    /// There is no such row, or the outbox does not work.
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

    /// Returns whether work can be pushed to the forge, and a pull request be asked for there.
    pub fn has_credential(&self) -> bool {
        self.settings.access.is_some()
    }

    /// Asks the forge whether it accepts the credential; none where there is no credential.
    pub async fn check_credential(&self) -> Option<Result<(), GithubError>> {
        let ForgeAccess { api, credential } = self.settings.access.as_ref()?;
        Some(credential.check(api).await)
    }

    fn open_mirror(&self, repository: &RepositoryUrl) -> Result<RepoMirror, DeliveryError> {
        let is_our_forge = self
            .hosted_access(repository)
            .is_some_and(|(hosted, access)| access.api.serves_repository(hosted));
        // Its operator has named the forge by the API's address, whatever the grant says.
        let named = is_our_forge.then(|| repository.clone().with_reach(HostReach::Named));
        let repository = named.as_ref().unwrap_or(repository);
        let mirror = RepoMirror::open(&self.git, &self.settings.state, repository)?;
        Ok(mirror.with_limits(self.settings.judge.fetch))
    }
}

impl DeliveryStatus {
    /// What is told of a row of the relay whose directory is `state`.
    pub fn from_job(job: &DeliveryJob, state: &Path) -> Self {
        let branch = job.order.branch();
        let is_kept = job.step.is_terminal() && !job.is_pushed && job.can_be_applied();
        let apply = is_kept
            .then(|| ArtifactDir::from_path(&job.order.artifacts).apply_command(branch, &job.id));
        Self {
            id: job.id.clone(),
            branch: branch.clone(),
            step: job.step.as_str(),
            verdict: job.verdict.map(VerdictKind::as_str),
            reasons: job.reasons.iter().map(ToString::to_string).collect(),
            head: job.head,
            is_pushed: job.is_pushed,
            pull_request_url: job.pull.as_ref().map(|pull| pull.url.clone()),
            why: job.error.clone(),
            apply,
            workspace: None,
            statement: job.statement.clone(),
            audit: Some(job_audit_log::log_path(state, &job.id)).filter(|path| path.exists()),
        }
    }

    /// What is told of a workspace that nothing is in.
    pub fn no_work(desk: &WorkspaceRow, why: &str) -> Self {
        let left = Self::from_workspace(desk);
        Self { step: STEP_NOTHING, why: Some(why.to_owned()), workspace: None, ..left }
    }

    /// Whether nothing is left to be done.
    pub fn is_complete(&self) -> bool {
        [DeliveryStep::Done.as_str(), STEP_NOTHING].contains(&self.step)
    }

    /// Whether its branch is still to have it, without anybody who asks for that.
    fn is_pending(&self) -> bool {
        let is_end = |step: &DeliveryStep| step.is_terminal() && step.as_str() == self.step;
        !self.is_pushed && !DeliveryStep::ALL.iter().any(is_end)
    }

    /// What is told of a workspace whose work is not out.
    pub fn from_workspace(desk: &WorkspaceRow) -> Self {
        Self {
            id: desk.id.clone(),
            branch: desk.plan.state.branch.clone(),
            step: if desk.left.is_some() { "left" } else { "begun" },
            verdict: None,
            reasons: vec![],
            head: None,
            is_pushed: false,
            pull_request_url: None,
            why: desk.left.clone(),
            apply: None,
            workspace: Some(desk.workspace.clone()),
            statement: None,
            audit: None,
        }
    }
}

fn record_extracted(job: &DeliveryJob, audit: &AuditLog) {
    let DeliveryRequest { repository, state, announced, .. } = &job.order;
    audit.record_delivery(&event::WorkExtractedRecord {
        relay: &job.id,
        repository: &repository.canonical_key(),
        branch: &state.branch.to_string(),
        start: &state.start.to_string(),
        tree: &announced.tree.to_string(),
        commits: announced.commits,
    });
}

/// With `sandbox/` before the key.
fn serialize_branch<S: Serializer>(branch: &SandboxBranch, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(branch)
}

const STEP_NOTHING: &str = "nothing";

const DETACHED_MESSAGE: &str = "the service has not waited for it; it is taken up again";

/// Below the relay's directory.
pub const OUTBOX_FILE: &str = "outbox.sqlite";
