//! One row, step by step, as far as it goes.

use std::sync::Arc;

use super::outbox::{
    DeliveryJob, DeliveryRequest, DeliveryStep, PullRequestRef, StepOutcome, VerdictKind,
};
use super::stop::StepStop;
use super::{DeliveryError, DeliveryService, DeliveryStatus, ForgeAccess};
use crate::base::secret::SecretString;
use crate::relay::github::pull_request;
use crate::relay::repo::repository::{HostedRepository, RepositoryUrl};
use crate::relay::repo::{ArtifactDir, BranchLease, ObjectId, review};
use crate::telemetry::audit::{AuditLog, delivery_records as event};

impl DeliveryService {
    /// Takes a row as far as it goes.
    pub(super) async fn run_job(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        let (relay, fence) = (self.clone(), lease.fence());
        let mut job =
            tokio::task::spawn_blocking(move || relay.outbox.claim_job(&job, fence)).await??;
        // Whoever has written this down may not have come to say so.
        match job.step {
            DeliveryStep::Pushed => record_pushed(&job, true, audit),
            DeliveryStep::PullRequested => record_pull_request(&job, false, audit),
            _ => (),
        }
        while !job.step.is_terminal() {
            job = match self.run_step(job.clone(), lease, audit).await? {
                Ok(next) => next,
                Err(stop) => {
                    self.record_stop(&job.id, stop, audit).await?;
                    break;
                }
            };
        }
        audit.flush_buffered();
        let (relay, id) = (self.clone(), job.id);
        tokio::task::spawn_blocking(move || {
            let job = relay.outbox.get(&id)?;
            discard_artifacts(&job);
            Ok(DeliveryStatus::from_job(&job, &relay.settings.state))
        })
        .await?
    }

    /// Does what is next.
    async fn run_step(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<Result<DeliveryJob, StepStop>, DeliveryError> {
        let done = match job.step {
            DeliveryStep::Extracted | DeliveryStep::Quarantined | DeliveryStep::Judged => {
                Box::pin(self.review_and_push(job, lease, audit)).await
            }
            DeliveryStep::Pushed if job.order.pull_request.is_some() => {
                Box::pin(self.open_pull_request(job, lease, audit)).await
            }
            _ => self.publish_statement(job).await,
        };
        match done {
            Ok(job) => Ok(Ok(job)),
            Err(StepStop::Outbox(error)) => Err(error.into()),
            Err(stop) => Ok(Err(stop)),
        }
    }

    /// From the disk to the branch.
    async fn review_and_push(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryJob, StepStop> {
        let token = self.push_token(&job.order).await?;
        let (relay, held, secret) = (self.clone(), lease.clone(), token.clone());
        let judging = move || relay.review_work(job, &held, secret);
        let (job, judged) = tokio::task::spawn_blocking(judging).await??;
        audit.record_delivery(&event::WorkReviewedRecord {
            relay: &job.id,
            verdict: judged.verdict().as_str(),
            head: &judged.work().tip().to_string(),
            tree: &judged.work().tree().to_string(),
            mode: judged.work().patch_comparison().as_str(),
            rules: &self.rules_for_request(&job.order).digest(),
            files: judged.changed_files() as u64,
            reasons: judged.verdict().reasons().len() as u64,
            said: &judged.verdict().reasons().iter().map(ToString::to_string).collect::<Vec<_>>(),
        });
        if let review::ReviewVerdict::Review(reasons) = judged.verdict() {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "somebody has to look at this work");
            self.convert_to_draft(&job.order).await?;
        }
        let relay = self.clone();
        let moving = move || relay.push_branch(&job, judged, token.as_ref());
        let (job, was_there) = tokio::task::spawn_blocking(moving).await??;
        record_pushed(&job, was_there, audit);
        Ok(job)
    }

    /// Sees to it that nothing is merged that nobody has looked at.
    async fn convert_to_draft(&self, order: &DeliveryRequest) -> Result<(), StepStop> {
        let Some((hosted, ForgeAccess { api, credential })) = self.hosted_access(&order.repository)
        else {
            return Ok(());
        };
        let done = pull_request::convert_to_draft(api, credential, hosted, order.branch()).await;
        done.map_err(|error| match error.retry_after() {
            Some(_) => StepStop::from(error),
            None => StepStop::held(
                "ready",
                format!(
                    "its pull request may be merged before anybody has looked at this: {error}"
                ),
            ),
        })
    }

    /// Puts the statement beside the commit, when all that people wait for is done; then so is the row.
    async fn publish_statement(
        self: &Arc<Self>,
        job: DeliveryJob,
    ) -> Result<DeliveryJob, StepStop> {
        let token = self.repository_token(&job.order.repository).await?;
        let relay = self.clone();
        let noting = move || {
            let job = relay.write_statement_note(&job, token.as_ref())?;
            Ok(relay.outbox.advance_job(&job, StepOutcome::Done)?)
        };
        tokio::task::spawn_blocking(noting).await?
    }

    /// From the branch to its pull request, if there is to be one.
    async fn open_pull_request(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryJob, StepStop> {
        let words = job.order.pull_request.clone().unwrap_or_default();
        let (Some(hosted), Some(access)) =
            (job.order.repository.as_hosted(), &self.settings.access)
        else {
            return Err(StepStop::failed(
                "a pull request needs a repository on a forge, and a token for it",
            ));
        };
        let token = self.repository_token(&job.order.repository).await?;
        let (relay, held, row) = (self.clone(), lease.clone(), job.clone());
        let looking = move || relay.unreviewed_branch_changes(&row, &held, token.as_ref());
        let before = tokio::task::spawn_blocking(looking).await??;
        if !before.is_empty() {
            let reasons: Vec<_> = before.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "somebody has to look at the branch");
        }
        let order = pull_request::PullRequestSpec {
            head: job.order.branch().clone(),
            base: Some(job.order.state.base.clone()),
            run: job.order.facts.run.clone(),
            agent: job.order.facts.agent.clone(),
            title: words.title,
            body: words.body,
            moved: (
                job.order.state.expected_remote_tip().unwrap_or(ObjectId::NONE),
                job.head.unwrap_or(ObjectId::NONE),
            ),
            needs_review: job.verdict == Some(VerdictKind::Review),
            reasons: job.reasons.clone(),
            before,
        };
        let published =
            pull_request::publish_pull_request(&access.api, &access.credential, hosted, &order)
                .await?;
        let pull = PullRequestRef { number: published.number, url: published.url };
        let job = self.advance_job(job, StepOutcome::PullRequested(pull)).await?;
        record_pull_request(&job, published.is_new, audit);
        Ok(job)
    }

    /// A token for the work's repository, if it may go there at all.
    async fn push_token(&self, order: &DeliveryRequest) -> Result<Option<SecretString>, StepStop> {
        let Some((hosted, access)) = self.hosted_access(&order.repository) else { return Ok(None) };
        let (api, branch) = (&access.api, order.branch().to_string());
        let name = &*branch;
        let ask = |token: SecretString| async move {
            let found = api.branch_info(&token, hosted, name).await?;
            Ok((token, found.is_some_and(|branch| branch.protected)))
        };
        let asked = || access.credential.with_token(api, hosted, ask);
        let (token, is_protected) = Box::pin(api.retry_policy().retry(asked)).await?;
        if is_protected {
            return Err(StepStop::held("protected", format!("`{branch}` is a protected branch")));
        }
        Ok(Some(token))
    }

    pub(super) async fn repository_token(
        &self,
        repository: &RepositoryUrl,
    ) -> Result<Option<SecretString>, DeliveryError> {
        let Some((hosted, access)) = self.hosted_access(repository) else { return Ok(None) };
        Ok(Some(access.credential.token(&access.api, hosted).await?))
    }

    pub(super) fn hosted_access<'a>(
        &'a self,
        repository: &'a RepositoryUrl,
    ) -> Option<(&'a HostedRepository, &'a ForgeAccess)> {
        repository.as_hosted().zip(self.settings.access.as_ref())
    }

    async fn advance_job(
        self: &Arc<Self>,
        job: DeliveryJob,
        progress: StepOutcome,
    ) -> Result<DeliveryJob, StepStop> {
        let relay = self.clone();
        Ok(tokio::task::spawn_blocking(move || relay.outbox.advance_job(&job, progress)).await??)
    }

    /// Writes down why a row goes no further.
    async fn record_stop(
        self: &Arc<Self>,
        id: &str,
        stop: StepStop,
        audit: &AuditLog,
    ) -> Result<(), DeliveryError> {
        let (relay, row) = (self.clone(), id.to_owned());
        let writing = move || stop.persist(&relay.outbox, &relay.outbox.get(&row)?);
        let job = tokio::task::spawn_blocking(writing).await??;
        if let Some(code) = &job.code {
            audit.record_delivery(&event::WorkHeldRecord { relay: id, code });
        }
        Ok(())
    }
}

/// Says that the branch has the work.
fn record_pushed(job: &DeliveryJob, was_there: bool, audit: &AuditLog) {
    let to = job.head.unwrap_or(ObjectId::NONE).to_string();
    let from = job.order.state.expected_remote_tip().map(|sha| sha.to_string());
    audit.record_delivery(&event::BranchPushedRecord {
        relay: &job.id,
        from: from.as_deref(),
        to: &to,
        was_there,
    });
}

/// Says that people can merge it.
fn record_pull_request(job: &DeliveryJob, is_new: bool, audit: &AuditLog) {
    let url = job.pull.as_ref().map(|pull| pull.url.as_str()).unwrap_or_default();
    audit.record_delivery(&event::PullRequestOpenedRecord { relay: &job.id, url, is_new });
}

/// What was delivered need not be kept.
fn discard_artifacts(job: &DeliveryJob) {
    if job.step != DeliveryStep::Done {
        return;
    }
    let kept = ArtifactDir::create(&job.order.artifacts).and_then(ArtifactDir::discard);
    if let Err(error) = kept {
        tracing::warn!(%error, relay = job.id, "what came out of the sandbox is not removed");
    }
}
