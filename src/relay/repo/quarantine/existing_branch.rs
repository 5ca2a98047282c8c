//! What a branch has already, seen like work that comes in.

use super::{PatchComparison, PatchMismatch, QuarantineLimits, QuarantineRepo, QuarantinedWork};
use crate::relay::git;
use crate::relay::repo::{BranchLease, BranchState, ObjectId, RepoError, RepoMirror};

impl QuarantinedWork {
    /// All that a branch has, as the remote says, and what it is for has not. `None` where there is nothing of that.
    ///
    /// It is for looking at: who made these commits, and whose they are, was said when they came in.
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
        // Others than agents commit there, in whatever form: their commits are looked at as git reads them.
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
    fn commit_tree(&self, commit: ObjectId) -> Result<ObjectId, RepoError> {
        let call = self.git_command("rev-parse").args(["--verify", "--end-of-options"]);
        let said = call.arg(format!("{commit}^{{tree}}")).output_text()?;
        let senseless = || git::GitError::Senseless { what: "rev-parse".to_owned() };
        Ok(ObjectId::parse(said.trim_end().as_bytes()).ok_or_else(senseless)?)
    }

    /// Where two branches part. Where they have nothing in common, all of the one is beside all of the other.
    fn merge_base(&self, base: ObjectId, tip: ObjectId) -> Result<ObjectId, RepoError> {
        let call = self.git_command("merge-base").args([base.to_string(), tip.to_string()]);
        let (said, ended) = call.output_and_status()?;
        match ended {
            Err(error) if error.is_negative_answer() => return Ok(base),
            ended => ended?,
        }
        let senseless = || git::GitError::Senseless { what: "merge-base".to_owned() };
        Ok(ObjectId::parse(said.trim_end().as_bytes()).ok_or_else(senseless)?)
    }
}
