//! One row, step by step, as far as it goes.

use std::sync::Arc;

use super::outbox::{Job, Order, Progress, Pull, Step, Verdict};
use super::stop::Stop;
use super::{Access, Delivered, Error, Relay};
use crate::audit::{Log, relay as event};
use crate::base::secret::Secret;
use crate::forge::pull_request;
use crate::relay::repository::{Hosted, Repository};
use crate::relay::{Artifacts, Lease, Sha, judge};

impl Relay {
    /// Takes a row as far as it goes.
    pub(super) async fn go(
        self: &Arc<Self>,
        job: Job,
        lease: &Lease,
        audit: &Log,
    ) -> Result<Delivered, Error> {
        let (relay, fence) = (self.clone(), lease.fence());
        let mut job =
            tokio::task::spawn_blocking(move || relay.outbox.claim(&job, fence)).await??;
        // Whoever has written this down may not have come to say so.
        match job.step {
            Step::Pushed => pushed(&job, true, audit),
            Step::PullRequested => requested(&job, false, audit),
            _ => (),
        }
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
            Ok(Delivered::of(&job, &relay.settings.state))
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
            Step::Pushed if job.order.pull_request.is_some() => {
                Box::pin(self.request(job, lease, audit)).await
            }
            _ => self.vouch(job).await,
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
        audit.relayed(&event::Judged {
            relay: &job.id,
            verdict: judged.verdict().as_str(),
            head: &judged.work().tip().to_string(),
            tree: &judged.work().tree().to_string(),
            mode: judged.work().mode().as_str(),
            rules: &self.rules_of(&job.order).digest(),
            files: judged.files() as u64,
            reasons: judged.verdict().reasons().len() as u64,
            said: &judged.verdict().reasons().iter().map(ToString::to_string).collect::<Vec<_>>(),
        });
        if let judge::Verdict::Review(reasons) = judged.verdict() {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "somebody has to look at this work");
            self.withdraw(&job.order).await?;
        }
        let relay = self.clone();
        let moving = move || relay.move_branch(&job, judged, token.as_ref());
        let (job, was_there) = tokio::task::spawn_blocking(moving).await??;
        pushed(&job, was_there, audit);
        Ok(job)
    }

    /// Sees to it that nothing is merged that nobody has looked at.
    async fn withdraw(&self, order: &Order) -> Result<(), Stop> {
        let Some((hosted, Access { api, credential })) = self.hosted(&order.repository) else {
            return Ok(());
        };
        let done = pull_request::withdraw(api, credential, hosted, order.branch()).await;
        done.map_err(|error| match error.later() {
            Some(_) => Stop::from(error),
            None => Stop::held(
                "ready",
                format!(
                    "its pull request may be merged before anybody has looked at this: {error}"
                ),
            ),
        })
    }

    /// Puts the statement beside the commit, when all that people wait for is done; then so is the row.
    async fn vouch(self: &Arc<Self>, job: Job) -> Result<Job, Stop> {
        let token = self.token(&job.order.repository).await?;
        let relay = self.clone();
        let noting = move || {
            let job = relay.note(&job, token.as_ref())?;
            Ok(relay.outbox.advance(&job, Progress::Done)?)
        };
        tokio::task::spawn_blocking(noting).await?
    }

    /// From the branch to its pull request, if there is to be one.
    async fn request(self: &Arc<Self>, job: Job, lease: &Lease, audit: &Log) -> Result<Job, Stop> {
        let words = job.order.pull_request.clone().unwrap_or_default();
        let (Some(hosted), Some(access)) = (job.order.repository.hosted(), &self.settings.access)
        else {
            return Err(Stop::failed(
                "a pull request needs a repository on a forge, and a token for it",
            ));
        };
        let token = self.token(&job.order.repository).await?;
        let (relay, held, row) = (self.clone(), lease.clone(), job.clone());
        let looking = move || relay.before(&row, &held, token.as_ref());
        let before = tokio::task::spawn_blocking(looking).await??;
        if !before.is_empty() {
            let reasons: Vec<_> = before.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "somebody has to look at the branch");
        }
        let order = pull_request::Order {
            head: job.order.branch().clone(),
            base: Some(job.order.state.base.clone()),
            run: job.order.facts.run.clone(),
            agent: job.order.facts.agent.clone(),
            title: words.title,
            body: words.body,
            moved: (job.order.state.expected().unwrap_or(Sha::NONE), job.head.unwrap_or(Sha::NONE)),
            needs_review: job.verdict == Some(Verdict::Review),
            reasons: job.reasons.clone(),
            before,
        };
        let published =
            pull_request::publish(&access.api, &access.credential, hosted, &order).await?;
        let pull = Pull { number: published.number, url: published.url };
        let job = self.advance(job, Progress::PullRequested(pull)).await?;
        requested(&job, published.is_new, audit);
        Ok(job)
    }

    /// A token for the work's repository, if it may go there at all.
    async fn let_in(&self, order: &Order) -> Result<Option<Secret>, Stop> {
        let Some((hosted, access)) = self.hosted(&order.repository) else { return Ok(None) };
        let (api, branch) = (&access.api, order.branch().to_string());
        let name = &*branch;
        let ask = |token: Secret| async move {
            let found = api.branch(&token, hosted, name).await?;
            Ok((token, found.is_some_and(|branch| branch.protected)))
        };
        let asked = || access.credential.with(api, hosted, ask);
        let (token, is_protected) = Box::pin(api.patience().keep(asked)).await?;
        if is_protected {
            return Err(Stop::held("protected", format!("`{branch}` is a protected branch")));
        }
        Ok(Some(token))
    }

    pub(super) async fn token(&self, repository: &Repository) -> Result<Option<Secret>, Error> {
        let Some((hosted, access)) = self.hosted(repository) else { return Ok(None) };
        Ok(Some(access.credential.token(&access.api, hosted).await?))
    }

    pub(super) fn hosted<'a>(
        &'a self,
        repository: &'a Repository,
    ) -> Option<(&'a Hosted, &'a Access)> {
        repository.hosted().zip(self.settings.access.as_ref())
    }

    async fn advance(self: &Arc<Self>, job: Job, progress: Progress) -> Result<Job, Stop> {
        let relay = self.clone();
        Ok(tokio::task::spawn_blocking(move || relay.outbox.advance(&job, progress)).await??)
    }

    /// Writes down why a row goes no further.
    async fn stop(self: &Arc<Self>, id: &str, stop: Stop, audit: &Log) -> Result<(), Error> {
        let (relay, row) = (self.clone(), id.to_owned());
        let writing = move || stop.write(&relay.outbox, &relay.outbox.get(&row)?);
        let job = tokio::task::spawn_blocking(writing).await??;
        if let Some(code) = &job.code {
            audit.relayed(&event::Held { relay: id, code });
        }
        Ok(())
    }
}

/// Says that the branch has the work.
fn pushed(job: &Job, was_there: bool, audit: &Log) {
    let to = job.head.unwrap_or(Sha::NONE).to_string();
    let from = job.order.state.expected().map(|sha| sha.to_string());
    audit.relayed(&event::Pushed { relay: &job.id, from: from.as_deref(), to: &to, was_there });
}

/// Says that people can merge it.
fn requested(job: &Job, is_new: bool, audit: &Log) {
    let url = job.pull.as_ref().map(|pull| pull.url.as_str()).unwrap_or_default();
    audit.relayed(&event::PullRequested { relay: &job.id, url, is_new });
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
