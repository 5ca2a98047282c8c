//! What a branch has already, seen like work that comes in.

use super::{Cell, Limits, Mode, Quarantined, Unlike};
use crate::git;
use crate::relay::{BranchState, Error, Lease, Mirror, Sha};

impl Quarantined {
    /// All that a branch has, as the remote says, and what it is for has not. `None` where there is nothing of that.
    ///
    /// It is for looking at: who made these commits, and whose they are, was said when they came in.
    pub(in crate::relay) fn standing(
        mirror: &Mirror,
        lease: &Lease,
        state: &BranchState,
        limits: &Limits,
    ) -> Result<Option<Self>, Error> {
        let objects = lease.directory("standing")?;
        let cell = Cell { mirror, objects: &objects, limits };
        let (tip, base) = (state.start, state.base_tip);
        let names = cell.listed(tip, &[format!("^{base}")])?;
        if names.is_empty() {
            return Ok(None);
        }
        // Others than agents commit there, in whatever form: their commits are looked at as git reads them.
        let texts = cell.read(names.clone())?.into_iter().map(|raw| raw.content).collect();
        let (tree, start) = (cell.tree_of(tip)?, cell.parting(base, tip)?);
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
            mode: Mode::Bundled(Unlike::NotReplayed),
            committer: None,
            has_work_elsewhere: false,
            limits: *limits,
        }))
    }
}

impl Cell<'_> {
    fn tree_of(&self, commit: Sha) -> Result<Sha, Error> {
        let call = self.call("rev-parse").words(["--verify", "--end-of-options"]);
        let said = call.word(format!("{commit}^{{tree}}")).text()?;
        let senseless = || git::Error::Senseless { what: "rev-parse".to_owned() };
        Ok(Sha::parse(said.trim_end().as_bytes()).ok_or_else(senseless)?)
    }

    /// Where two branches part. Where they have nothing in common, all of the one is beside all of the other.
    fn parting(&self, base: Sha, tip: Sha) -> Result<Sha, Error> {
        let call = self.call("merge-base").words([base.to_string(), tip.to_string()]);
        let (said, ended) = call.told()?;
        match ended {
            Err(error) if error.is_no() => return Ok(base),
            ended => ended?,
        }
        let senseless = || git::Error::Senseless { what: "merge-base".to_owned() };
        Ok(Sha::parse(said.trim_end().as_bytes()).ok_or_else(senseless)?)
    }
}
