//! The steps of a delivery that git does, from the artifacts directory to the branch. All of them block.

use std::collections::BTreeSet;

use super::outbox::{DeliveryJob, DeliveryStep, StepOutcome, VerdictKind};
use super::rules::ReviewRules;
use super::statement::ProvenanceStatement;
use super::stop::StepStop;
use super::{DeliveryError, DeliveryService};
use crate::base::secret::SecretString;
use crate::relay::github::pull_request::change_summary::{
    ChangeSize, ChangeSummary, CommitLine, MAX_COMMITS,
};
use crate::relay::repo::quarantine::{CommitProvenance, QuarantinedWork};
use crate::relay::repo::review::ReviewReason;
use crate::relay::repo::{
    self, ArtifactDir, BranchLease, CommitNote, ExtractedWork, ObjectId, ReviewedWork,
};
use crate::telemetry::audit::AuditSigningKey;

impl DeliveryService {
    /// Takes the work into quarantine and reviews it. A repeated call makes the same commits.
    ///
    /// The token of the delivery is one of the secrets that the work must not contain.
    pub(super) fn review_work(
        &self,
        mut job: DeliveryJob,
        lease: &BranchLease,
        token: Option<SecretString>,
    ) -> Result<(DeliveryJob, ReviewedWork), StepStop> {
        let policy =
            self.rules_for_request(&job.request).parse_policy().map_err(DeliveryError::Rules)?;
        let mut known = self.secrets_for(&job.request)?;
        // The agent never had this token. If the work contains it, the token has leaked.
        known.extend(token);
        let work = self.quarantine_work(&job, lease)?;
        // Rewritten commits depend only on what the row stores. Another commit ID means that the inputs have changed.
        let head = work.tip();
        if job.head.is_some_and(|before| before != head) {
            return Err(StepStop::failed("the same work has come to another commit than before"));
        }
        if job.step == DeliveryStep::Extracted {
            job = self.outbox.advance_job(&job, StepOutcome::Quarantined { head })?;
        }
        let judged = work.review(&policy, &known)?;
        let (verdict, mode) = (judged.verdict(), judged.work().patch_comparison().as_str());
        // A repeated review replaces the stored verdict: the earlier review may have known fewer secrets.
        let is_news = job.verdict != Some(VerdictKind::from(verdict))
            || job.reasons != verdict.reasons()
            || job.mode.as_deref() != Some(mode);
        if job.step == DeliveryStep::Quarantined || is_news {
            job = self
                .outbox
                .advance_job(&job, StepOutcome::Judged { verdict: verdict.clone(), mode })?;
        }
        Ok((job, judged))
    }

    fn quarantine_work(
        &self,
        job: &DeliveryJob,
        lease: &BranchLease,
    ) -> Result<QuarantinedWork, StepStop> {
        let request = &job.request;
        let artifacts = ArtifactDir::create(&request.artifacts)?;
        let facts = &request.facts;
        let provenance = CommitProvenance {
            committer: self.committer_for(request).to_owned(),
            run: facts.run.clone(),
            agent: Some(facts.agent.clone()).filter(|agent| !agent.is_empty()),
        };
        let mirror = self.open_mirror(&request.repository)?;
        let (state, announced) = (request.state.clone(), request.announced.clone());
        let work =
            ExtractedWork { mirror: &mirror, lease, state, announced, artifacts: &artifacts };
        Ok(work.into_quarantine(&self.settings.review.quarantine, &provenance)?)
    }

    /// Pushes the reviewed work, if the verdict allows a push. Also returns true if the branch had the work before.
    pub(super) fn push_branch(
        &self,
        job: &DeliveryJob,
        judged: ReviewedWork,
        token: Option<&SecretString>,
    ) -> Result<(DeliveryJob, bool), StepStop> {
        let cleared = match judged.into_approved() {
            Ok(cleared) => cleared,
            Err(unapproved) => {
                let reasons: Vec<_> = unapproved.reasons.iter().map(ToString::to_string).collect();
                return Err(StepStop::held("policy", reasons.join("; ")));
            }
        };
        let (head, lease) = (cleared.work().tip(), cleared.lease().clone());
        let was_there =
            match cleared.push_branch(token) {
                Ok(pushed) => pushed.was_there,
                // An earlier attempt may have pushed the work and lost the remote's answer, and another commit may have
                // followed. So the branch is read before the error counts.
                Err(
                    repo::RepoError::BranchMoved { .. } | repo::RepoError::RemoteRejected { .. },
                ) if self.branch_contains(job, &lease, token, head)? => true,
                Err(error) => return Err(error.into()),
            };
        Ok((self.outbox.advance_job(job, StepOutcome::Pushed)?, was_there))
    }

    /// Returns true if the remote's branch contains the commit `head`.
    fn branch_contains(
        &self,
        job: &DeliveryJob,
        lease: &BranchLease,
        token: Option<&SecretString>,
        head: ObjectId,
    ) -> Result<bool, StepStop> {
        let mirror = self.open_mirror(&job.request.repository)?;
        let now = mirror.ensure_branch(lease, Some(&job.request.state.base), token)?;
        Ok(now.exists && mirror.is_ancestor(now.start, head))
    }

    /// Returns the reasons why a person has to review the commits that the branch has besides this work. An earlier run
    /// that requested no pull request may have left such commits, and the new pull request asks people to merge all of
    /// them.
    ///
    /// The branch itself is reviewed, because rows are removed in time. Reasons in existing rows are added: an agent's
    /// stricter rules may have given them.
    pub(super) fn unreviewed_branch_changes(
        &self,
        job: &DeliveryJob,
        lease: &BranchLease,
        token: Option<&SecretString>,
    ) -> Result<Vec<ReviewReason>, StepStop> {
        let request = &job.request;
        let mirror = self.open_mirror(&request.repository)?;
        let now = mirror.ensure_branch(lease, Some(&request.state.base), token)?;
        let policy =
            self.rules_for_request(request).parse_policy().map_err(DeliveryError::Rules)?;
        let limits = &self.settings.review.quarantine;
        let mut reasons: BTreeSet<_> =
            mirror.review_existing_branch(lease, &now, (limits, &policy))?.into_iter().collect();
        for earlier in self.outbox.needing_review(&request.repository, lease.branch().key())? {
            // Only work that is on the branch and not yet in the base would be merged by the pull request.
            let is_there = |tip| earlier.head.is_some_and(|head| mirror.is_ancestor(tip, head));
            if is_there(now.start) && !is_there(now.base_tip) {
                reasons.extend(earlier.reasons);
            }
        }
        Ok(reasons.into_iter().filter(|reason| !job.reasons.contains(reason)).collect())
    }

    /// Returns the key that verifies the statements, if one is configured.
    fn public_key(&self) -> Option<String> {
        let key = AuditSigningKey::new(Some(self.settings.signing_key.as_ref()?)).ok()?;
        Some(key.public_key().to_string())
    }

    /// Returns the facts of a row's pushed work for its pull request. Facts that git does not give are left out: they
    /// must not hold up the pull request.
    pub(super) fn summarize_work(&self, job: &DeliveryJob) -> ChangeSummary {
        let DeliveryJob { request, head, verdict, .. } = job;
        let known = ChangeSummary {
            spent: request.facts.spent,
            verdict: verdict.map_or_else(String::new, |verdict| verdict.as_str().to_owned()),
            public_key: self.public_key(),
            ..ChangeSummary::default()
        };
        let Some(head) = *head else { return known };
        let read = || -> Result<_, DeliveryError> {
            let mirror = self.open_mirror(&request.repository)?;
            let (commits, count) = mirror.list_commits(&request.state, head, MAX_COMMITS)?;
            Ok((commits, count, mirror.measure_change(request.state.start, head)?))
        };
        match read() {
            Ok((commits, commit_count, [files, added_lines, removed_lines])) => {
                let commits = commits.into_iter().map(|(id, subject)| CommitLine { id, subject });
                let size = ChangeSize { files, added_lines, removed_lines };
                ChangeSummary { commits: commits.collect(), commit_count, size, ..known }
            }
            Err(error) => {
                tracing::warn!(%error, relay = job.id, "cannot list the commits for the pull request");
                known
            }
        }
    }

    /// Writes the signed statement as a note beside the commit, and stores the result in the row. A generated key ends
    /// with this process, and its signature would prove nothing. So there is no statement without a configured key.
    pub(super) fn write_statement_note(
        &self,
        job: &DeliveryJob,
        token: Option<&SecretString>,
    ) -> Result<DeliveryJob, StepStop> {
        let statement = match (job.head, &self.settings.signing_key) {
            (Some(head), Some(_)) => self.put_statement_note(job, head, token)?,
            _ => "none: there is no `AUDIT_SIGNING_KEY` to sign it with".to_owned(),
        };
        Ok(self.outbox.record_statement(job, &statement)?)
    }

    /// Pushes the note. A refusal by the remote is a result and no error, because a later attempt would be refused,
    /// too. The same holds for notes of the remote's that are too large to be fetched.
    fn put_statement_note(
        &self,
        job: &DeliveryJob,
        head: ObjectId,
        token: Option<&SecretString>,
    ) -> Result<String, StepStop> {
        let (branch, committer) = (job.request.branch(), self.settings.committer.as_str());
        let text = build_statement(job, head).sign(&self.key);
        let note = CommitNote { branch, head, text: &text, committer };
        match self.open_mirror(&job.request.repository)?.put_note(note, token) {
            Ok(()) => Ok(STATEMENT_PUBLISHED.to_owned()),
            // The work itself is delivered. A missing note must not hold its row open.
            Err(
                repo::RepoError::RemoteRejected { why } | repo::RepoError::Unauthorized { why },
            ) => Ok(format!("none: the remote does not take it: {why}")),
            Err(error @ repo::RepoError::NotesTooLarge { .. }) => Ok(format!("none: {error}")),
            Err(error) => Err(error.into()),
        }
    }
}

/// The result that a row stores for a published statement.
const STATEMENT_PUBLISHED: &str = "beside the commit";

fn build_statement(job: &DeliveryJob, head: ObjectId) -> ProvenanceStatement {
    let request = &job.request;
    ProvenanceStatement {
        facts: request.facts.clone(),
        repository: request.repository.canonical_key(),
        branch: request.branch().to_string(),
        base: request.state.start,
        head,
        tree: request.announced.tree,
        rules: request.rules.as_ref().map(ReviewRules::digest).unwrap_or_default(),
        verdict: job.verdict.map(VerdictKind::as_str).unwrap_or_default().to_owned(),
        mode: job.mode.clone().unwrap_or_default(),
    }
}
