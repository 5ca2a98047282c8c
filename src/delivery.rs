//! Durable delivery: a run's work, from this machine's disk to its branch and its pull request.
//!
//! Each step is done, then written down, then recorded in the run's audit. Whatever ends the process in between, whoever
//! takes the row up next finds the step done, or does it: the commits come out the same, the push is told where the
//! branch was, the pull request is looked for first.
//!
//! The [`outbox`] remembers how far each work has come; [`relay`](crate::relay) does what git does, and
//! [`forge`](crate::forge) asks for the pull request. A [`statement`] says what this machine vouches for.
//!
//! **Invariant:** work that is not delivered is kept, with the line that brings it into a clone.

mod branch;
pub mod outbox;
pub mod statement;
mod step;
mod stop;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Serialize, Serializer};
use uuid::Uuid;

use crate::audit::{Log, SigningKey, relay as record};
use crate::base::secret::Secret;
use crate::forge::credential::Credential;
use crate::forge::github::{self, Api};
use crate::relay::git::Network;
use crate::relay::repository::Repository;
use crate::relay::{
    self, Artifacts, Branch, BranchKey, BranchState, Git, Lease, Mirror, Sha, extract, judge,
};
use outbox::{Job, Order, Outbox, Verdict};

/// What a relay is made of.
pub struct Settings {
    /// Mirrors, leases, the outbox and what came out of sandboxes are here.
    pub state: PathBuf,
    pub judge: judge::Config,
    /// `Name <email>`: who makes the relay's commits.
    pub committer: String,
    pub access: Option<Access>,
    /// By which way git gets to remotes.
    pub network: Network,
    /// Signs statements.
    pub key: SigningKey,
    /// Credentials of this host. None of them must be found in anybody's work.
    pub known: Vec<Secret>,
}

/// How a forge is reached.
#[derive(Debug)]
pub struct Access {
    pub api: Api,
    pub credential: Credential,
}

/// This machine's relay.
pub struct Relay {
    settings: Settings,
    git: Git,
    outbox: Outbox,
}

/// A branch that is a run's, for as long as this lives, and where it stands.
#[derive(Clone, Debug)]
pub struct Begun {
    pub mirror: Mirror,
    pub lease: Lease,
    pub state: BranchState,
}

/// What has become of a run's work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Delivered {
    /// For `cogni-gateway relay`.
    pub id: String,
    #[serde(serialize_with = "shown")]
    pub branch: Branch,
    pub step: &'static str,
    pub verdict: Option<&'static str>,
    /// What the branch is at, or would be.
    pub head: Option<Sha>,
    pub is_pushed: bool,
    pub pull_request_url: Option<String>,
    /// Why it is not further.
    pub why: Option<String>,
    /// What brings it into a clone, where it is not at its branch.
    pub apply: Option<String>,
}

/// Why nothing can be said about the work. It is in the outbox all the same, if it ever was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Outbox(#[from] outbox::Error),
    #[error(transparent)]
    Relay(#[from] relay::Error),
    #[error(transparent)]
    GitHub(#[from] github::Error),
    #[error("the relay has been ended")]
    Ended(#[from] tokio::task::JoinError),
}

impl Relay {
    /// Opens what is on the disk. Blocks.
    ///
    /// # Errors
    /// There is no git, or the directory cannot be used.
    pub fn open(settings: Settings) -> Result<Self, Error> {
        let git = Git::find(&settings.state.join("home")).map_err(relay::Error::from)?;
        let git = git.over(settings.network.clone());
        let outbox = Outbox::open(&settings.state.join(OUTBOX))?;
        Ok(Self { settings, git, outbox })
    }

    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// This machine's git, for whoever takes work out of a workspace with it.
    pub fn git(&self) -> &Git {
        &self.git
    }

    /// What may come out of a sandbox.
    pub fn limits(&self) -> &extract::Limits {
        &self.settings.judge.extract
    }

    /// Makes a branch a run's, or says that another run has it. What an earlier run left undelivered there is delivered
    /// first, so that this one builds on it.
    ///
    /// # Errors
    /// The branch is taken, or cannot be looked up.
    pub async fn begin(
        self: &Arc<Self>,
        repository: &Repository,
        key: &BranchKey,
        base: Option<&str>,
    ) -> Result<Begun, Error> {
        let (relay, place, own) = (self.clone(), repository.clone(), key.clone());
        let (mirror, lease, pending) = tokio::task::spawn_blocking(move || {
            let mirror = relay.mirror(&place)?;
            let lease = mirror.lease(&own)?;
            let pending = relay.outbox.pending(&place, &own)?;
            Ok::<_, Error>((mirror, lease, pending))
        })
        .await??;
        for job in pending {
            Box::pin(self.go(job, &lease, &Log::discard())).await?;
        }
        let token = self.token(repository).await?;
        let (base, held) = (base.map(str::to_owned), lease.clone());
        tokio::task::spawn_blocking(move || {
            let state = mirror.ensure_branch(&held, base.as_deref(), token.as_ref())?;
            Ok(Begun { mirror, lease: held, state })
        })
        .await?
    }

    /// A directory for what comes out of a sandbox.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn artifacts(&self) -> Result<Artifacts, Error> {
        let name = Uuid::now_v7().simple().to_string();
        Ok(Artifacts::create(&self.settings.state.join("work").join(name))?)
    }

    /// Delivers what has come out of a sandbox: the bundle and the patches are in the order's artifacts. What cannot be
    /// done now is in the outbox for later.
    ///
    /// # Errors
    /// The outbox does not work.
    pub async fn deliver(
        self: &Arc<Self>,
        order: Order,
        lease: &Lease,
        audit: &Log,
    ) -> Result<Delivered, Error> {
        let relay = self.clone();
        let job = tokio::task::spawn_blocking(move || relay.outbox.add(&order)).await??;
        let Order { repository, state, announced, .. } = &job.order;
        audit.relayed(&record::Extracted {
            relay: &job.id,
            repository: &repository.key(),
            branch: &state.branch.to_string(),
            start: &state.start.to_string(),
            tree: &announced.tree.to_string(),
            commits: announced.commits,
        });
        Box::pin(self.go(job, lease, audit)).await
    }

    /// Takes up what is due, or one row whose time has not come. What another process is at is left to it.
    ///
    /// # Errors
    /// The outbox does not work.
    pub async fn resume(self: &Arc<Self>, only: Option<&str>) -> Result<Vec<Delivered>, Error> {
        let (relay, only) = (self.clone(), only.map(str::to_owned));
        let jobs = tokio::task::spawn_blocking(move || match only {
            Some(id) => relay.outbox.get(&id).map(|job| vec![job]),
            None => relay.outbox.due(SystemTime::now()),
        })
        .await??;
        let mut delivered = vec![];
        for job in jobs {
            let (relay, order) = (self.clone(), job.order.clone());
            let lease = tokio::task::spawn_blocking(move || {
                relay.mirror(&order.repository)?.lease(order.branch().key()).map_err(Error::from)
            });
            match lease.await? {
                Ok(lease) => delivered.push(Box::pin(self.go(job, &lease, &Log::discard())).await?),
                Err(Error::Relay(relay::Error::Busy { .. })) => {
                    tracing::info!(relay = job.id, "another process is at this branch");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(delivered)
    }

    fn mirror(&self, repository: &Repository) -> Result<Mirror, Error> {
        Ok(Mirror::open(&self.git, &self.settings.state, repository)?)
    }
}

impl Delivered {
    /// What is told of a row.
    pub fn of(job: &Job) -> Self {
        let branch = job.order.branch();
        let is_kept = job.step.is_end() && !job.is_pushed;
        let artifacts = is_kept.then(|| Artifacts::create(&job.order.artifacts).ok()).flatten();
        let apply = artifacts.map(|kept| kept.apply_line(branch));
        Self {
            id: job.id.clone(),
            branch: branch.clone(),
            step: job.step.as_str(),
            verdict: job.verdict.map(Verdict::as_str),
            head: job.head,
            is_pushed: job.is_pushed,
            pull_request_url: job.pull.as_ref().map(|pull| pull.url.clone()),
            why: job.error.clone(),
            apply,
        }
    }
}

/// With `sandbox/` before the key.
fn shown<S: Serializer>(branch: &Branch, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(branch)
}

/// Below the relay's directory.
pub const OUTBOX: &str = "outbox.sqlite";
