//! The whole way from what came out of a sandbox to a verdict.

use super::extract::Announced;
use super::judge::Config;
use super::quarantine::Provenance;
use super::{Artifacts, BranchState, Bundle, Error, Judged, Lease, Mirror};
use crate::base::secret::Secret;

/// One run's work, as it came out. The way may be gone any number of times, and ends at the same commit.
#[derive(Clone, Debug)]
pub struct Work<'a> {
    pub mirror: &'a Mirror,
    pub lease: &'a Lease,
    pub state: BranchState,
    pub announced: Announced,
    /// With the bundle and the patches.
    pub artifacts: &'a Artifacts,
}

impl Work<'_> {
    /// Takes the bundle into quarantine, makes its commits anew where the patches allow it, and judges them. `known` are
    /// credentials of this host.
    pub fn judge(
        self,
        config: &Config,
        provenance: &Provenance,
        known: &[Secret],
    ) -> Result<Judged, Error> {
        let Self { mirror, lease, state, announced, artifacts } = self;
        Bundle::open(&artifacts.bundle(), state, announced)?
            .admit(mirror, lease, &config.quarantine)?
            .replay(&artifacts.patches(), provenance)?
            .judge(&config.policy, known)
    }
}
