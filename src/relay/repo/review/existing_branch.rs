//! The review of a branch's existing commits, before people are asked to merge the branch.
//!
//! A run's work is reviewed when it comes, against the commit where the run began. A pull request asks people to merge
//! everything that the branch has. Earlier runs may have added more, and no person may have seen it.

use std::collections::BTreeSet;

use super::evidence::ReviewEvidence;
use super::{PolicyEvaluator, ReviewAction, ReviewPolicy, ReviewReason};
use crate::relay::repo::quarantine::QuarantineLimits;
use crate::relay::repo::{BranchLease, BranchState, QuarantinedWork, RepoError, RepoMirror};

impl RepoMirror {
    /// Returns the reasons why a person has to review the commits that a branch has and its base has not. `state` names
    /// both. Authors and this host's credentials were checked when the commits came in, and are not checked again.
    ///
    /// # Errors
    /// Returns an error if git or the disk fails. Work that exceeds a limit gives a reason, and no error.
    pub fn review_existing_branch(
        &self,
        lease: &BranchLease,
        state: &BranchState,
        (limits, policy): (&QuarantineLimits, &ReviewPolicy),
    ) -> Result<Vec<ReviewReason>, RepoError> {
        let gathered = match QuarantinedWork::existing_commits(self, lease, state, limits) {
            Ok(None) => return Ok(vec![]),
            Ok(Some(work)) => ReviewEvidence::collect(&work, policy, &[]),
            Err(error) => Err(error),
        };
        let mut evaluator = PolicyEvaluator { policy, reasons: BTreeSet::new() };
        match gathered {
            Ok(evidence) => evaluator.evaluate_evidence(&evidence),
            Err(RepoError::QuarantineRefused(why)) => {
                evaluator.add_reason(
                    ReviewAction::Review,
                    None,
                    &format!("cannot review all of the branch: {why}"),
                );
            }
            Err(error) => return Err(error),
        }
        Ok(evaluator.into_verdict().reasons().to_vec())
    }
}
