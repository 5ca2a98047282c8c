//! A run's work, from this machine's disk to its branch and its pull request.
//!
//! Each step is done, then written down, then recorded in the run's audit. Whatever ends the process in between, whoever
//! takes the row up next finds the step done, or does it: the commits come out the same, the push is told where the
//! branch was, the pull request is looked for first.
//!
//! **Invariant:** work that is not delivered is kept, with the line that brings it into a clone.

mod branch;
mod note;
mod stop;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};
use uuid::Uuid;

use super::credential::Credential;
use super::github::{self, Api};
use super::outbox::{Job, Order, Outbox, Progress, Pull, Step, Verdict};
use super::repository::{Hosted, Repository};
use super::{
    Artifacts, Branch, BranchKey, BranchState, Git, Lease, Mirror, Remote, Sha, extract, judge,
    pull_request,
};
use crate::audit::{Log, SigningKey, relay as record};
use crate::base::secret::Secret;

use stop::Stop;

/// What a relay is made of.
pub struct Settings {
    /// Mirrors, leases, the outbox and what came out of sandboxes are here.
    pub state: PathBuf,
    pub judge: judge::Config,
    /// `Name <email>`: who makes the relay's commits.
    pub committer: String,
    pub access: Option<Access>,
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
    Outbox(#[from] super::outbox::Error),
    #[error(transparent)]
    Relay(#[from] super::Error),
    #[error(transparent)]
    GitHub(#[from] github::Error),
    #[error("`{0}` is no address of a remote")]
    Remote(String),
    #[error("the relay has been ended")]
    Ended(#[from] tokio::task::JoinError),
}

impl Relay {
    /// Opens what is on the disk. Blocks.
    ///
    /// # Errors
    /// There is no git, or the directory cannot be used.
    pub fn open(settings: Settings) -> Result<Self, Error> {
        let git = Git::find(&settings.state.join("home")).map_err(super::Error::from)?;
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
                Err(Error::Relay(super::Error::Busy { .. })) => {
                    tracing::info!(relay = job.id, "another process is at this branch");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(delivered)
    }

    /// Takes a row as far as it goes.
    async fn go(
        self: &Arc<Self>,
        job: Job,
        lease: &Lease,
        audit: &Log,
    ) -> Result<Delivered, Error> {
        let (relay, fence) = (self.clone(), lease.fence());
        let mut job =
            tokio::task::spawn_blocking(move || relay.outbox.claim(&job, fence)).await??;
        while !job.step.is_end() {
            job = match self.step(job.clone(), lease, audit).await? {
                Ok(next) => next,
                Err(stop) => {
                    self.stop(&job.id, stop, audit).await?;
                    break;
                }
            };
        }
        audit.flush();
        let (relay, id) = (self.clone(), job.id);
        tokio::task::spawn_blocking(move || {
            let job = relay.outbox.get(&id)?;
            tidy(&job);
            Ok(Delivered::of(&job))
        })
        .await?
    }

    /// Does what is next.
    async fn step(
        self: &Arc<Self>,
        job: Job,
        lease: &Lease,
        audit: &Log,
    ) -> Result<Result<Job, Stop>, Error> {
        let done = match job.step {
            Step::Extracted | Step::Quarantined | Step::Judged => {
                Box::pin(self.push(job, lease, audit)).await
            }
            Step::Pushed => {
                self.vouch(&job).await?;
                Box::pin(self.request(job, audit)).await
            }
            _ => self.advance(job, Progress::Done).await,
        };
        match done {
            Ok(job) => Ok(Ok(job)),
            Err(Stop::Outbox(error)) => Err(error.into()),
            Err(stop) => Ok(Err(stop)),
        }
    }

    /// From the disk to the branch.
    async fn push(self: &Arc<Self>, job: Job, lease: &Lease, audit: &Log) -> Result<Job, Stop> {
        let token = self.let_in(&job.order).await?;
        let (relay, held, secret) = (self.clone(), lease.clone(), token.clone());
        let judging = move || relay.judge(job, &held, secret);
        let (job, judged) = tokio::task::spawn_blocking(judging).await??;
        audit.relayed(&record::Judged {
            relay: &job.id,
            verdict: judged.verdict().as_str(),
            head: &judged.work().tip().to_string(),
            tree: &judged.work().tree().to_string(),
            mode: judged.work().mode().as_str(),
            files: judged.files() as u64,
            reasons: judged.verdict().reasons().len() as u64,
        });
        let relay = self.clone();
        let moving = move || relay.move_branch(&job, judged, token.as_ref());
        let (job, was_there) = tokio::task::spawn_blocking(moving).await??;
        let to = job.head.unwrap_or(Sha::NONE).to_string();
        let from = job.order.state.expected().map(|sha| sha.to_string());
        audit.relayed(&record::Pushed {
            relay: &job.id,
            from: from.as_deref(),
            to: &to,
            was_there,
        });
        Ok(job)
    }

    /// Puts the statement beside the commit. The work is where it should be, so this holds nothing up.
    async fn vouch(self: &Arc<Self>, job: &Job) -> Result<(), Error> {
        let (relay, noted) = (self.clone(), job.clone());
        let token = self.token(&job.order.repository).await.unwrap_or_default();
        let note = tokio::task::spawn_blocking(move || relay.note(&noted, token.as_ref()));
        if let Err(error) = note.await? {
            tracing::warn!(%error, relay = job.id, "the statement is not beside the commit");
        }
        Ok(())
    }

    /// From the branch to its pull request, if there is to be one.
    async fn request(self: &Arc<Self>, job: Job, audit: &Log) -> Result<Job, Stop> {
        let Some(words) = &job.order.pull_request else {
            return self.advance(job, Progress::Done).await;
        };
        let (Some(hosted), Some(access)) = (job.order.repository.hosted(), &self.settings.access)
        else {
            return Err(Stop::failed(
                "a pull request needs a repository on a forge, and a token for it",
            ));
        };
        let order = pull_request::Order {
            head: job.order.branch().clone(),
            base: Some(job.order.state.base.clone()),
            run: job.order.facts.run.clone(),
            agent: job.order.facts.agent.clone(),
            title: words.title.clone(),
            body: words.body.clone(),
            moved: (job.order.state.expected().unwrap_or(Sha::NONE), job.head.unwrap_or(Sha::NONE)),
            needs_review: job.verdict == Some(Verdict::Review),
        };
        let published =
            pull_request::publish(&access.api, &access.credential, hosted, &order).await?;
        let pull = Pull { number: published.number, url: published.url };
        audit.relayed(&record::PullRequested {
            relay: &job.id,
            url: &pull.url,
            is_new: published.is_new,
        });
        self.advance(job, Progress::PullRequested(pull)).await
    }

    /// A token for the work's repository, if it may go there at all.
    async fn let_in(&self, order: &Order) -> Result<Option<Secret>, Stop> {
        let Some((hosted, access)) = self.hosted(&order.repository) else { return Ok(None) };
        let (api, branch) = (&access.api, order.branch().to_string());
        let ask = async |token: Secret| {
            let found = api.branch(&token, hosted, &branch).await?;
            Ok((token, found.is_some_and(|branch| branch.protected)))
        };
        let asked = async || access.credential.with(api, hosted, ask).await;
        let (token, is_protected) = Box::pin(api.patience().keep(asked)).await?;
        if is_protected {
            return Err(Stop::held("protected", format!("`{branch}` is a protected branch")));
        }
        Ok(Some(token))
    }

    async fn token(&self, repository: &Repository) -> Result<Option<Secret>, Error> {
        let Some((hosted, access)) = self.hosted(repository) else { return Ok(None) };
        Ok(Some(access.credential.token(&access.api, hosted).await?))
    }

    fn hosted<'a>(&'a self, repository: &'a Repository) -> Option<(&'a Hosted, &'a Access)> {
        repository.hosted().zip(self.settings.access.as_ref())
    }

    async fn advance(self: &Arc<Self>, job: Job, progress: Progress) -> Result<Job, Stop> {
        let relay = self.clone();
        Ok(tokio::task::spawn_blocking(move || relay.outbox.advance(&job, progress)).await??)
    }

    /// Writes down why a row goes no further.
    async fn stop(self: &Arc<Self>, id: &str, stop: Stop, audit: &Log) -> Result<(), Error> {
        if let Some(code) = stop.code() {
            audit.relayed(&record::Held { relay: id, code });
        }
        let (relay, id) = (self.clone(), id.to_owned());
        tokio::task::spawn_blocking(move || {
            let job = relay.outbox.get(&id)?;
            stop.write(&relay.outbox, &job)
        })
        .await??;
        Ok(())
    }

    fn mirror(&self, repository: &Repository) -> Result<Mirror, Error> {
        let url = repository.clone_url();
        let remote = Remote::parse(&url).map_err(|_| Error::Remote(url))?;
        Ok(Mirror::open(&self.git, &self.settings.state, &remote)?)
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

/// What was delivered need not be kept.
fn tidy(job: &Job) {
    if job.step != Step::Done {
        return;
    }
    let kept = Artifacts::create(&job.order.artifacts).and_then(Artifacts::discard);
    if let Err(error) = kept {
        tracing::warn!(%error, relay = job.id, "what came out of the sandbox is not removed");
    }
}

/// Below the relay's directory.
pub const OUTBOX: &str = "outbox.sqlite";

/// The first wait for what may be better later; it doubles.
const WAIT: Duration = Duration::from_secs(30);
