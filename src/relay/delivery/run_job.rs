//! The steps of one row, done in order as far as the row goes.
//!
//! 1. `review_and_push`: collect a token, quarantine, review and push the work (from any step before the push).
//! 2. `open_pull_request`: review the rest of the branch, and open or update the pull request (if one is requested).
//! 3. `publish_statement`: write the signed statement beside the commit, and end the row.

use std::sync::Arc;

use super::outbox::{
    DeliveryJob, DeliveryRequest, DeliveryStep, PullRequestRef, StepOutcome, VerdictKind,
};
use super::stop::StepStop;
use super::{DeliveryError, DeliveryService, DeliveryStatus, ForgeAccess};
use crate::base::secret::SecretString;
use crate::relay::github::pull_request::{self, change_summary::ChangeSummary};
use crate::relay::repo::repository::{HostedRepository, RepositoryUrl};
use crate::relay::repo::{ArtifactDir, BranchLease, ObjectId, review};
use crate::telemetry::audit::{AuditLog, delivery_records as event};

impl DeliveryService {
    /// Claims a row for the lease's holder, and runs its steps until the row is done, held, failed or rescheduled.
    pub(super) async fn run_job(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryStatus, DeliveryError> {
        let (relay, fence) = (self.clone(), lease.fence());
        let mut job =
            tokio::task::spawn_blocking(move || relay.outbox.claim_job(&job, fence)).await??;
        // A crash between the row's update and the audit record loses the record. So the record of the row's present
        // step is written again when the row is claimed.
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
        // Records of deliveries are buffered. They are written out before the caller learns of the result.
        audit.flush_buffered();
        let (relay, id) = (self.clone(), job.id);
        tokio::task::spawn_blocking(move || {
            let job = relay.outbox.get(&id)?;
            discard_artifacts(&job);
            Ok(DeliveryStatus::from_job(&job, &relay.settings.state))
        })
        .await?
    }

    /// Runs the step that follows the row's present step. Errors of the outbox end the run; other stops are stored in
    /// the row.
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
            DeliveryStep::Pushed if job.request.pull_request.is_some() => {
                Box::pin(self.open_pull_request(job, lease, audit)).await
            }
            // Work that has its pull request, or that needs none: the statement is the last step.
            _ => self.publish_statement(job).await,
        };
        match done {
            Ok(job) => Ok(Ok(job)),
            Err(StepStop::Outbox(error)) => Err(error.into()),
            Err(stop) => Ok(Err(stop)),
        }
    }

    /// Reviews the work in quarantine, and pushes it to the branch.
    async fn review_and_push(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryJob, StepStop> {
        let token = self.push_token(&job.request).await?;
        let (relay, held, secret) = (self.clone(), lease.clone(), token.clone());
        let judging = move || relay.review_work(job, &held, secret);
        let (job, judged) = tokio::task::spawn_blocking(judging).await??;
        audit.record_delivery(&event::WorkReviewedRecord {
            relay: &job.id,
            verdict: judged.verdict().as_str(),
            head: &judged.work().tip().to_string(),
            tree: &judged.work().tree().to_string(),
            mode: judged.work().patch_comparison().as_str(),
            rules: &self.rules_for_request(&job.request).digest(),
            files: judged.changed_files() as u64,
            reasons: judged.verdict().reasons().len() as u64,
            said: &judged.verdict().reasons().iter().map(ToString::to_string).collect::<Vec<_>>(),
        });
        if let review::ReviewVerdict::Review(reasons) = judged.verdict() {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "this work needs a review by a person");
            // The draft comes before the push. Otherwise a person could merge unreviewed commits through the open pull
            // request.
            self.convert_to_draft(&job.request).await?;
        }
        let relay = self.clone();
        let moving = move || relay.push_branch(&job, judged, token.as_ref());
        let (job, was_there) = tokio::task::spawn_blocking(moving).await??;
        record_pushed(&job, was_there, audit);
        Ok(job)
    }

    /// Converts the branch's open pull request to a draft, so that unreviewed work cannot be merged by mistake.
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
                    "cannot keep this work from being merged before a review: its pull request cannot be made a draft: {error}"
                ),
            ),
        })
    }

    /// Publishes the signed statement beside the commit, as the last step, and marks the row as done.
    async fn publish_statement(
        self: &Arc<Self>,
        job: DeliveryJob,
    ) -> Result<DeliveryJob, StepStop> {
        let token = self.repository_token(&job.request.repository).await?;
        let relay = self.clone();
        let noting = move || {
            let job = relay.write_statement_note(&job, token.as_ref())?;
            Ok(relay.outbox.advance_job(&job, StepOutcome::Done)?)
        };
        tokio::task::spawn_blocking(noting).await?
    }

    /// Opens or updates the pull request of the pushed branch. The caller has checked that one is requested.
    async fn open_pull_request(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
        audit: &AuditLog,
    ) -> Result<DeliveryJob, StepStop> {
        let words = job.request.pull_request.clone().unwrap_or_default();
        let (Some(hosted), Some(access)) =
            (job.request.repository.as_hosted(), &self.settings.access)
        else {
            return Err(StepStop::failed(
                "a pull request needs a repository on a forge, and a token for it",
            ));
        };
        let token = self.repository_token(&job.request.repository).await?;
        let (relay, held, row) = (self.clone(), lease.clone(), job.clone());
        // The branch may hold earlier commits that were pushed without a pull request, and so without a person's view
        // of them.
        let looking = move || {
            let reasons = relay.unreviewed_branch_changes(&row, &held, token.as_ref())?;
            Ok::<_, StepStop>((reasons, relay.summarize_work(&row)))
        };
        let (earlier_reasons, summary) = tokio::task::spawn_blocking(looking).await??;
        if !earlier_reasons.is_empty() {
            let reasons: Vec<_> = earlier_reasons.iter().map(ToString::to_string).collect();
            tracing::warn!(relay = job.id, ?reasons, "the branch needs a review by a person");
        }
        let order = pull_request::PullRequestSpec {
            head: job.request.branch().clone(),
            base: Some(job.request.state.base.clone()),
            run: job.request.facts.run.clone(),
            agent: job.request.facts.agent.clone(),
            title: words.title,
            body: words.body,
            commit_range: (
                job.request.state.expected_remote_tip().unwrap_or(ObjectId::NONE),
                job.head.unwrap_or(ObjectId::NONE),
            ),
            summary: ChangeSummary { asked: words.asked, model: words.model, ..summary },
            needs_review: job.verdict == Some(VerdictKind::Review),
            reasons: job.reasons.clone(),
            earlier_reasons,
        };
        let published =
            pull_request::publish_pull_request(&access.api, &access.credential, hosted, &order)
                .await?;
        let pull = PullRequestRef { number: published.number, url: published.url };
        let job = self.advance_job(job, StepOutcome::PullRequested(pull)).await?;
        record_pull_request(&job, published.is_new, audit);
        Ok(job)
    }

    /// Returns a token for the work's repository, after a check that the branch is not protected. Returns `None` if
    /// there is no forge access for the repository.
    async fn push_token(&self, order: &DeliveryRequest) -> Result<Option<SecretString>, StepStop> {
        let Some((hosted, access)) = self.hosted_access(&order.repository) else { return Ok(None) };
        let (api, branch) = (&access.api, order.branch().to_string());
        let name = &*branch;
        let ask = |token: SecretString| async move {
            let found = api.branch_info(&token, hosted, name).await?;
            Ok((token, found.is_some_and(|branch| branch.protected)))
        };
        // The question goes through `with_token`, so that a token that the forge has revoked is replaced once.
        let asked = || access.credential.with_token(api, hosted, ask);
        let (token, is_protected) = Box::pin(api.retry_policy().retry(asked)).await?;
        if is_protected {
            return Err(StepStop::held("protected", format!("`{branch}` is a protected branch")));
        }
        Ok(Some(token))
    }

    /// Returns a token for a repository, or `None` if there is no forge access for the repository.
    pub(super) async fn repository_token(
        &self,
        repository: &RepositoryUrl,
    ) -> Result<Option<SecretString>, DeliveryError> {
        let Some((hosted, access)) = self.hosted_access(repository) else { return Ok(None) };
        Ok(Some(access.credential.token(&access.api, hosted).await?))
    }

    /// Returns the forge's name of a repository and the access to the forge, if this host has both.
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

    /// Stores the reason why a row goes no further now, and records held and failed rows in the audit log.
    async fn record_stop(
        self: &Arc<Self>,
        id: &str,
        stop: StepStop,
        audit: &AuditLog,
    ) -> Result<(), DeliveryError> {
        let (relay, row) = (self.clone(), id.to_owned());
        // The row is read again: the failed step may have changed the row before its error.
        let writing = move || stop.persist(&relay.outbox, &relay.outbox.get(&row)?);
        let job = tokio::task::spawn_blocking(writing).await??;
        if let Some(code) = &job.code {
            audit.record_delivery(&event::WorkHeldRecord { relay: id, code });
        }
        Ok(())
    }
}

/// Records that the branch has the work.
fn record_pushed(job: &DeliveryJob, was_there: bool, audit: &AuditLog) {
    let to = job.head.unwrap_or(ObjectId::NONE).to_string();
    let from = job.request.state.expected_remote_tip().map(|sha| sha.to_string());
    audit.record_delivery(&event::BranchPushedRecord {
        relay: &job.id,
        from: from.as_deref(),
        to: &to,
        was_there,
    });
}

/// Records that the work's pull request is open.
fn record_pull_request(job: &DeliveryJob, is_new: bool, audit: &AuditLog) {
    let url = job.pull_request.as_ref().map(|pull| pull.url.as_str()).unwrap_or_default();
    audit.record_delivery(&event::PullRequestOpenedRecord { relay: &job.id, url, is_new });
}

/// Removes the artifacts of a delivered row. A sweep removes them later if that fails.
fn discard_artifacts(job: &DeliveryJob) {
    if job.step != DeliveryStep::Done {
        return;
    }
    let kept = ArtifactDir::create(&job.request.artifacts).and_then(ArtifactDir::discard);
    if let Err(error) = kept {
        tracing::warn!(%error, relay = job.id, "cannot remove the artifacts of delivered work; a sweep tries again");
    }
}
