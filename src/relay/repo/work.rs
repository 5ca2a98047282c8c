//! The path from the files that came out of a sandbox to the work that is reviewed.

use super::extract_commands::AnnouncedBranch;
use super::quarantine::{CommitProvenance, QuarantineLimits};
use super::{
    ArtifactDir, BranchLease, BranchState, GitBundle, QuarantinedWork, RepoError, RepoMirror,
};

/// One run's extracted work. Every call of the path to quarantine ends at the same commit.
#[derive(Clone, Debug)]
pub struct ExtractedWork<'a> {
    pub mirror: &'a RepoMirror,
    pub lease: &'a BranchLease,
    pub state: BranchState,
    pub announced: AnnouncedBranch,
    /// The directory with the bundle and the patches.
    pub artifacts: &'a ArtifactDir,
}

impl ExtractedWork<'_> {
    /// Takes the bundle into quarantine, rewrites its commits, and compares the patches with the commits.
    ///
    /// # Errors
    /// Returns the errors of [`GitBundle::into_quarantine`].
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
