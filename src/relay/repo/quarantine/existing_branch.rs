//! The existing commits of a branch, in the form of quarantined work, so that they can be reviewed.

use super::{PatchComparison, PatchMismatch, QuarantineLimits, QuarantineRepo, QuarantinedWork};
use crate::relay::git;
use crate::relay::repo::{BranchLease, BranchState, ObjectId, RepoError, RepoMirror};

impl QuarantinedWork {
    /// Returns the commits that a branch has and its base has not, by the remote's state. Returns `None` if there are
    /// none.
    ///
    /// The result is only for a review of content. Authors and provenance were checked when each commit came in.
    pub(in crate::relay::repo) fn existing_commits(
        mirror: &RepoMirror,
        lease: &BranchLease,
        state: &BranchState,
        limits: &QuarantineLimits,
    ) -> Result<Option<Self>, RepoError> {
        let objects = lease.create_scratch_dir("standing")?;
        let cell = QuarantineRepo { mirror, objects: &objects, limits };
        let (tip, base) = (state.start, state.base_tip);
        let names = cell.list_commit_ids(tip, &[format!("^{base}")])?;
        if names.is_empty() {
            return Ok(None);
        }
        // People and other programs commit there as well, in whatever form. So these commits are not parsed strictly.
        let texts = cell.read_commits(names.clone())?.into_iter().map(|raw| raw.content).collect();
        let (tree, start) = (cell.commit_tree(tip)?, cell.merge_base(base, tip)?);
        Ok(Some(Self {
            mirror: mirror.clone(),
            lease: lease.clone(),
            state: BranchState { start, ..state.clone() },
            tree,
            tip,
            objects,
            commits: vec![],
            names,
            texts,
            mode: PatchComparison::Bundled(PatchMismatch::NotReplayed),
            committer: None,
            has_work_elsewhere: false,
            limits: *limits,
        }))
    }
}

impl QuarantineRepo<'_> {
    /// Returns the tree of a commit.
    fn commit_tree(&self, commit: ObjectId) -> Result<ObjectId, RepoError> {
        let call = self.git_command("rev-parse").args(["--verify", "--end-of-options"]);
        let output = call.arg(format!("{commit}^{{tree}}")).output_text()?;
        let unexpected = || git::GitError::UnexpectedOutput { command: "rev-parse".to_owned() };
        Ok(ObjectId::parse(output.trim_end().as_bytes()).ok_or_else(unexpected)?)
    }

    /// Returns the commit where two branches part. Without a common commit, the base itself is compared with the
    /// branch.
    fn merge_base(&self, base: ObjectId, tip: ObjectId) -> Result<ObjectId, RepoError> {
        let call = self.git_command("merge-base").args([base.to_string(), tip.to_string()]);
        let (output, ended) = call.output_and_status()?;
        match ended {
            Err(error) if error.is_negative_answer() => return Ok(base),
            ended => ended?,
        }
        let unexpected = || git::GitError::UnexpectedOutput { command: "merge-base".to_owned() };
        Ok(ObjectId::parse(output.trim_end().as_bytes()).ok_or_else(unexpected)?)
    }
}
