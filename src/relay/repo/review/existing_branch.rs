//! Whether somebody has to look at a branch as it stands, before it is merged.
//!
//! A run's work is judged when it comes, beside where the run began. What people are asked to merge is all that the
//! branch has: earlier runs may have brought more, and nobody may have been told of it.

use std::collections::BTreeSet;

use super::evidence::ReviewEvidence;
use super::{PolicyEvaluator, ReviewAction, ReviewPolicy, ReviewReason};
use crate::relay::repo::quarantine::QuarantineLimits;
use crate::relay::repo::{BranchLease, BranchState, QuarantinedWork, RepoError, RepoMirror};

impl RepoMirror {
    /// Why somebody has to look at what a branch has, and its base has not; `state` says where they stand. Whose commits
    /// they are was asked when they came, and no credential of this host has come in.
    ///
    /// # Errors
    /// Git or the disk does not work. What is too much to be looked at is a reason.
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
        let mut bench = PolicyEvaluator { policy, reasons: BTreeSet::new() };
        match gathered {
            Ok(evidence) => bench.evaluate_evidence(&evidence),
            Err(RepoError::Refused(why)) => {
                bench.add_reason(
                    ReviewAction::Review,
                    None,
                    &format!("cannot review all of the branch: {why}"),
                );
            }
            Err(error) => return Err(error),
        }
        Ok(bench.into_verdict().reasons().to_vec())
    }
}
