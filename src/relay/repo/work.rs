//! The one way from what came out of a sandbox to what a judge is shown.

use super::extract_commands::AnnouncedBranch;
use super::quarantine::{CommitProvenance, QuarantineLimits};
use super::{
    ArtifactDir, BranchLease, BranchState, GitBundle, QuarantinedWork, RepoError, RepoMirror,
};

/// One run's work, as it came out. The way may be gone any number of times, and ends at the same commit.
#[derive(Clone, Debug)]
pub struct ExtractedWork<'a> {
    pub mirror: &'a RepoMirror,
    pub lease: &'a BranchLease,
    pub state: BranchState,
    pub announced: AnnouncedBranch,
    /// With the bundle and the patches.
    pub artifacts: &'a ArtifactDir,
}

impl ExtractedWork<'_> {
    /// Takes the bundle into quarantine, makes its commits anew, and sees whether the patches tell what they are.
    ///
    /// # Errors
    /// As [`GitBundle::into_quarantine`].
    pub fn into_quarantine(
        self,
        limits: &QuarantineLimits,
        provenance: &CommitProvenance,
    ) -> Result<QuarantinedWork, RepoError> {
        let Self { mirror, lease, state, announced, artifacts } = self;
        GitBundle::open(&artifacts.bundle_path(), state, announced)?
            .into_quarantine(mirror, lease, limits)?
            .rewrite_and_compare(&artifacts.patches_path(), provenance)
    }
}
