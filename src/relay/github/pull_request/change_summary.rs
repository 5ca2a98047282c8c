//! The facts of one run's work, as a reviewer reads them in a pull request: commits, size, request, cost and proof.
//!
//! **Invariant:** the texts of agents and users stand in code quotes or in a code block that they cannot end, so that
//! none of them becomes a link, a picture, a mention or HTML.

use std::fmt::Write;

use super::safe_text;
use crate::llm::budget::BudgetAmount;
use crate::relay::repo::ObjectId;

/// The facts of one run's work. The default is a run of which only the branch is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangeSummary {
    /// The run's commits, newest first; of many commits only the newest.
    pub commits: Vec<CommitLine>,
    /// The number of all commits of the run.
    pub commit_count: u64,
    pub size: ChangeSize,
    /// The last message of the user who requested the run.
    pub asked: String,
    /// The model that the run used by default.
    pub model: String,
    pub spent: BudgetAmount,
    /// The verdict of the review, as `push` or `review`.
    pub verdict: String,
    /// The key that signs the statement beside the commit, if one is configured.
    pub public_key: Option<String>,
}

/// One commit of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitLine {
    pub id: ObjectId,
    /// The first line of the commit's message, as the agent has written it.
    pub subject: String,
}

/// The size of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeSize {
    pub files: u64,
    pub added_lines: u64,
    pub removed_lines: u64,
}

impl ChangeSummary {
    /// Returns the title that the commits give: the only commit's subject, or the first commit's subject and the number
    /// of the others. Empty if there is no commit.
    pub fn title(&self) -> String {
        let Some(first) = self.commits.last() else { return String::new() };
        let subject = safe_text::format_line(&first.subject, MAX_SUBJECT_CHARS);
        match self.commit_count {
            0 | 1 => subject,
            2 => format!("{subject} (and 1 more commit)"),
            count => format!("{subject} (and {} more commits)", count - 1),
        }
    }

    /// Returns the list of commits with their size. Empty if there is no commit.
    pub fn commit_list(&self) -> String {
        if self.commits.is_empty() {
            return String::new();
        }
        let ChangeSize { files, added_lines, removed_lines } = self.size;
        let mut text = format!(
            "\n\n**{}, {} changed, +{added_lines} \u{2212}{removed_lines} lines**\n",
            count_of(self.commit_count, "commit"),
            count_of(files, "file"),
        );
        for CommitLine { id, subject } in self.commits.iter().rev().take(MAX_COMMITS) {
            let id = id.to_string();
            let subject =
                safe_text::format_code(&safe_text::format_line(subject, MAX_SUBJECT_CHARS));
            let _ = write!(text, "\n- `{}` {subject}", &id[..SHORT_ID_CHARS.min(id.len())]);
        }
        let left = self.commit_count.saturating_sub(self.commits.len().min(MAX_COMMITS) as u64);
        if left > 0 {
            let _ = write!(text, "\n- and {left} more");
        }
        text
    }

    /// Returns the block that a reader opens: the request, the cost, and the command that verifies the work. Empty if
    /// nothing of it is known.
    pub fn details(&self, head: ObjectId) -> String {
        let Self { asked, model, spent, verdict, public_key, .. } = self;
        if self.commits.is_empty() && asked.is_empty() && model.is_empty() {
            return String::new();
        }
        let mut text = "\n\n<details>\n<summary>Request, cost and proof</summary>\n".to_owned();
        let block = safe_text::format_code_block(asked, MAX_ASKED_CHARS);
        if !block.is_empty() {
            let _ = write!(text, "\nThe request was:\n\n{block}\n");
        }
        text.push('\n');
        if !model.is_empty() {
            let model = safe_text::format_code(&safe_text::format_line(model, MAX_SUBJECT_CHARS));
            let _ = writeln!(text, "- model: {model}");
        }
        let BudgetAmount { turns, input, output, cost } = spent;
        let _ = writeln!(
            text,
            "- cost: {}, {} tokens in, {} out, ${cost}",
            count_of(*turns, "call"),
            input.0,
            output.0
        );
        if !verdict.is_empty() {
            let _ = writeln!(text, "- verdict of the rules: {}", safe_text::format_code(verdict));
        }
        match public_key {
            Some(key) => {
                let _ = write!(
                    text,
                    "\nA signed statement about this work is beside the commit. To verify it in a clone:\n\n```sh\n\
                     git fetch origin refs/notes/cogni:refs/notes/cogni\n\
                     cogni-gateway relay verify {head} --public-key {key}\n```\n"
                );
            }
            None => text.push_str("- proof: none, because no signing key is configured\n"),
        }
        text.push_str("\n</details>");
        text
    }
}

fn count_of(count: u64, what: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {what}{ending}")
}

/// The most commits that the text lists. People read further commits in the pull request's own list. Our choice.
pub const MAX_COMMITS: usize = 20;

/// The longest subject of a commit or name of a model, in characters.
const MAX_SUBJECT_CHARS: usize = 100;

/// The longest part of a request, in characters. Our choice: a reviewer reads the task, not its attachments.
pub const MAX_ASKED_CHARS: usize = 2_000;

/// The length of a commit's short ID.
const SHORT_ID_CHARS: usize = 10;
