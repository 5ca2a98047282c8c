//! The commits of a run and the size of their change, for people who review them.

use super::{BranchState, RepoMirror};
use crate::relay::repo::{ObjectId, RepoError};

impl RepoMirror {
    /// Returns the newest `most` commits of a run with the first lines of their messages, and the number of all its
    /// commits. `head`, which must have been fetched, is the last one.
    pub fn list_commits(
        &self,
        state: &BranchState,
        head: ObjectId,
        most: usize,
    ) -> Result<(Vec<(ObjectId, String)>, u64), RepoError> {
        let range = || [vec![head.to_string()], state.base_revisions().to_vec()].concat();
        let count = self.git_command("rev-list").arg("--count").args(range()).arg("--");
        let count = count.output_text()?.trim().parse().unwrap_or_default();
        // The oldest of the listed commits gives the title, so the order is that of the history.
        let log =
            self.git_command("log").args(["--topo-order", "--no-show-signature", "--no-decorate"]);
        let log = log.args(["--format=%H %s".to_owned(), format!("--max-count={most}")]);
        let log = log.args(range()).arg("--").output_bytes()?;
        let lines = String::from_utf8_lossy(&log);
        let commits = lines.lines().filter_map(|line| {
            let (id, subject) = line.split_once(' ').unwrap_or((line, ""));
            Some((ObjectId::parse(id.as_bytes())?, subject.to_owned()))
        });
        Ok((commits.collect(), count))
    }

    /// Returns the numbers of changed files, of added lines and of removed lines between two commits.
    pub fn measure_change(&self, from: ObjectId, to: ObjectId) -> Result<[u64; 3], RepoError> {
        let options = ["-r", "--shortstat", "--no-renames", "--no-ext-diff", "--no-textconv"];
        let revisions = [from.to_string(), to.to_string()];
        let text = self.git_command("diff-tree").args(options).args(revisions).output_text()?;
        // ` 3 files changed, 40 insertions(+), 7 deletions(-)`, and each part only if it is not zero.
        let number = |word: &str| {
            let part = text.split(',').find(|part| part.contains(word))?;
            part.split_whitespace().next()?.parse().ok()
        };
        Ok(["changed", "insertion", "deletion"].map(|word| number(word).unwrap_or_default()))
    }
}
