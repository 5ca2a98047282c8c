//! The half that git does: from what came out of the sandbox to the branch. All of it blocks.

use std::collections::BTreeSet;

use super::outbox::{Job, Progress, Step, Verdict};
use super::rules::Rules;
use super::statement::Statement;
use super::stop::Stop;
use super::{Error, Relay};
use crate::base::secret::Secret;
use crate::relay::judge::Reason;
use crate::relay::quarantine::{Provenance, Quarantined};
use crate::relay::{self, Artifacts, Judged, Lease, Note, Sha, Work};

impl Relay {
    /// Takes the work into quarantine and looks at it. A row that has been here before comes to the same.
    ///
    /// The token that it is delivered with is one of the secrets that must not be in it.
    pub(super) fn judge(
        &self,
        mut job: Job,
        lease: &Lease,
        token: Option<Secret>,
    ) -> Result<(Job, Judged), Stop> {
        let policy = self.rules_of(&job.order).policy().map_err(Error::Rules)?;
        let mut known = self.known_of(&job.order)?;
        known.extend(token);
        let work = self.quarantine(&job, lease)?;
        let head = work.tip();
        if job.head.is_some_and(|before| before != head) {
            return Err(Stop::failed("the same work has come to another commit than before"));
        }
        if job.step == Step::Extracted {
            job = self.outbox.advance(&job, Progress::Quarantined { head })?;
        }
        let judged = work.judge(&policy, &known)?;
        let (verdict, mode) = (judged.verdict(), judged.work().mode().as_str());
        // What it was judged before, perhaps where less was known, does not count.
        let is_news = job.verdict != Some(Verdict::from(verdict))
            || job.reasons != verdict.reasons()
            || job.mode.as_deref() != Some(mode);
        if job.step == Step::Quarantined || is_news {
            job = self.outbox.advance(&job, Progress::Judged { verdict: verdict.clone(), mode })?;
        }
        Ok((job, judged))
    }

    fn quarantine(&self, job: &Job, lease: &Lease) -> Result<Quarantined, Stop> {
        let order = &job.order;
        let artifacts = Artifacts::create(&order.artifacts)?;
        let facts = &order.facts;
        let provenance = Provenance {
            committer: self.committer_of(order).to_owned(),
            run: facts.run.clone(),
            agent: Some(facts.agent.clone()).filter(|agent| !agent.is_empty()),
        };
        let mirror = self.mirror(&order.repository)?;
        let (state, announced) = (order.state.clone(), order.announced.clone());
        let work = Work { mirror: &mirror, lease, state, announced, artifacts: &artifacts };
        Ok(work.admit(&self.settings.judge.quarantine, &provenance)?)
    }

    /// Moves the branch, if that is what was decided. Whether it had been moved already.
    pub(super) fn move_branch(
        &self,
        job: &Job,
        judged: Judged,
        token: Option<&Secret>,
    ) -> Result<(Job, bool), Stop> {
        let cleared = match judged.cleared() {
            Ok(cleared) => cleared,
            Err(held) => {
                let reasons: Vec<_> = held.reasons.iter().map(ToString::to_string).collect();
                return Err(Stop::held("policy", reasons.join("; ")));
            }
        };
        let (head, lease) = (cleared.work().tip(), cleared.lease().clone());
        let was_there = match cleared.push(token) {
            Ok(pushed) => pushed.was_there,
            // It may be there by an attempt that nobody heard the end of; and somebody may have gone on from it.
            Err(relay::Error::Moved { .. } | relay::Error::Declined { .. })
                if self.contains(job, &lease, token, head)? =>
            {
                true
            }
            Err(error) => return Err(error.into()),
        };
        Ok((self.outbox.advance(job, Progress::Pushed)?, was_there))
    }

    /// Whether the remote's branch has the work, and perhaps more.
    fn contains(
        &self,
        job: &Job,
        lease: &Lease,
        token: Option<&Secret>,
        head: Sha,
    ) -> Result<bool, Stop> {
        let mirror = self.mirror(&job.order.repository)?;
        let now = mirror.ensure_branch(lease, Some(&job.order.state.base), token)?;
        Ok(now.exists && mirror.contains(now.start, head))
    }

    /// Why somebody has to look at what the branch has beside this work: a run that was asked for no pull request may
    /// have left that there, and now people are asked to merge all of it.
    ///
    /// What rows say goes with them, so the branch itself is looked at; and what was judged by an agent's own, stricter
    /// rules counts for as long as there is a row that says so.
    pub(super) fn before(
        &self,
        job: &Job,
        lease: &Lease,
        token: Option<&Secret>,
    ) -> Result<Vec<Reason>, Stop> {
        let order = &job.order;
        let mirror = self.mirror(&order.repository)?;
        let now = mirror.ensure_branch(lease, Some(&order.state.base), token)?;
        let policy = self.rules_of(order).policy().map_err(Error::Rules)?;
        let limits = &self.settings.judge.quarantine;
        let mut reasons: BTreeSet<_> =
            mirror.reasons(lease, &now, (limits, &policy))?.into_iter().collect();
        for earlier in self.outbox.reviewed(&order.repository, lease.branch().key())? {
            let is_there = |tip| earlier.head.is_some_and(|head| mirror.contains(tip, head));
            if is_there(now.start) && !is_there(now.base_tip) {
                reasons.extend(earlier.reasons);
            }
        }
        Ok(reasons.into_iter().filter(|reason| !job.reasons.contains(reason)).collect())
    }

    /// Puts the statement beside the commit, where it is not yet. A key that lives no longer than this process would prove
    /// nothing to anybody.
    pub(super) fn note(&self, job: &Job, token: Option<&Secret>) -> Result<Job, Stop> {
        let said = match (job.head, &self.settings.signing_key) {
            (Some(head), Some(_)) => self.put_note(job, head, token)?,
            _ => "none: there is no `AUDIT_SIGNING_KEY` to sign it with".to_owned(),
        };
        Ok(self.outbox.vouch(job, &said)?)
    }

    /// What a remote does not take now it will not take later.
    fn put_note(&self, job: &Job, head: Sha, token: Option<&Secret>) -> Result<String, Stop> {
        let (branch, committer) = (job.order.branch(), self.settings.committer.as_str());
        let text = statement(job, head).sign(&self.key);
        let note = Note { branch, head, text: &text, committer };
        match self.mirror(&job.order.repository)?.note(note, token) {
            Ok(()) => Ok(VOUCHED.to_owned()),
            Err(relay::Error::Declined { why } | relay::Error::Denied { why }) => {
                Ok(format!("none: the remote does not take it: {why}"))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// What is said of a statement that is where it belongs.
const VOUCHED: &str = "beside the commit";

fn statement(job: &Job, head: Sha) -> Statement {
    let order = &job.order;
    Statement {
        facts: order.facts.clone(),
        repository: order.repository.key(),
        branch: order.branch().to_string(),
        base: order.state.start,
        head,
        tree: order.announced.tree,
        rules: order.rules.as_ref().map(Rules::digest).unwrap_or_default(),
        verdict: job.verdict.map(Verdict::as_str).unwrap_or_default().to_owned(),
        mode: job.mode.clone().unwrap_or_default(),
    }
}
