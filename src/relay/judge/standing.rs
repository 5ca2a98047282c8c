//! Whether somebody has to look at a branch as it stands, before it is merged.
//!
//! A run's work is judged when it comes, beside where the run began. What people are asked to merge is all that the
//! branch has: earlier runs may have brought more, and nobody may have been told of it.

use std::collections::BTreeSet;

use super::evidence::Evidence;
use super::{Bench, Policy, Reason, Ruling};
use crate::relay::quarantine::Limits;
use crate::relay::{BranchState, Error, Lease, Mirror, Quarantined};

impl Mirror {
    /// Why somebody has to look at what a branch has, and its base has not; `state` says where they stand. Whose commits
    /// they are was asked when they came, and no credential of this host has come in.
    ///
    /// # Errors
    /// Git or the disk does not work. What is too much to be looked at is a reason.
    pub fn reasons(
        &self,
        lease: &Lease,
        state: &BranchState,
        (limits, policy): (&Limits, &Policy),
    ) -> Result<Vec<Reason>, Error> {
        let gathered = match Quarantined::standing(self, lease, state, limits) {
            Ok(None) => return Ok(vec![]),
            Ok(Some(work)) => Evidence::gather(&work, policy, &[]),
            Err(error) => Err(error),
        };
        let mut bench = Bench { policy, reasons: BTreeSet::new() };
        match gathered {
            Ok(evidence) => bench.look(&evidence),
            Err(Error::Refused(why)) => {
                bench.say(
                    Ruling::Review,
                    None,
                    &format!("not all of the branch can be seen: {why}"),
                );
            }
            Err(error) => return Err(error),
        }
        Ok(bench.verdict().reasons().to_vec())
    }
}
