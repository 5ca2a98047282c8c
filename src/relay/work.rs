//! The one way from what came out of a sandbox to what a judge is shown.

use super::extract::Announced;
use super::quarantine::{Limits, Provenance};
use super::{Artifacts, BranchState, Bundle, Error, Lease, Mirror, Quarantined};

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
    /// Takes the bundle into quarantine, makes its commits anew, and sees whether the patches tell what they are.
    ///
    /// # Errors
    /// As [`Bundle::admit`].
    pub fn admit(self, limits: &Limits, provenance: &Provenance) -> Result<Quarantined, Error> {
        let Self { mirror, lease, state, announced, artifacts } = self;
        Bundle::open(&artifacts.bundle(), state, announced)?
            .admit(mirror, lease, limits)?
            .replay(&artifacts.patches(), provenance)
    }
}
