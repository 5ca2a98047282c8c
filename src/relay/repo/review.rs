//! The review: decides by the output of the host's own git whether the agent's work is pushed.
//!
//! The review covers the changes of each commit, and the changes of all commits together. A file that is added and then
//! removed is still in the history, and so is a credential in it.

mod commit_claims;
pub mod diff;
mod evidence;
mod existing_branch;
mod lfs_pointer;
mod link_target;
mod lookalikes;
mod normalize;
mod pattern;
mod policy;
mod secret;

use std::collections::BTreeSet;
use std::fmt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{BranchState, ObjectId, QuarantinedWork, RepoError};
use crate::base::hidden_characters::is_hidden;
use crate::base::secret::SecretString;
use diff::PathChange;
use evidence::ReviewEvidence;
use lookalikes::LookalikeFolder;

pub use pattern::PathPattern;
pub use policy::{PathRule, RelayConfig, RelayConfigError, ReviewAction, ReviewPolicy};
pub use secret::{
    CredentialKind, FoundSecrets, MIN_SECRET_BYTES as SHORTEST_KNOWN, ScanWindow, SecretScanner,
};

/// Work that was reviewed.
#[derive(Debug)]
pub struct ReviewedWork {
    quarantined: QuarantinedWork,
    verdict: ReviewVerdict,
    files: usize,
}

/// Work that may be pushed. Only [`ReviewedWork::into_approved`] makes this value.
#[derive(Debug)]
pub struct ApprovedWork {
    pub(super) quarantined: QuarantinedWork,
    pub(super) verdict: ReviewVerdict,
}

/// Work that is not pushed. Its files are still in its [`ArtifactDir`](super::ArtifactDir).
#[derive(Debug)]
pub struct HeldWork {
    pub state: BranchState,
    pub tip: ObjectId,
    pub reasons: Vec<ReviewReason>,
}

/// The decision of the review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReviewVerdict {
    /// The work is pushed.
    Push,
    /// The work is pushed, and a person has to review it.
    Review(Vec<ReviewReason>),
    /// The work is not pushed.
    Hold(Vec<ReviewReason>),
}

/// One reason why work is not simply pushed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReviewReason {
    pub ruling: ReviewAction,
    /// The path that the reason is about. The path is escaped, because the agent chose it.
    pub path: Option<String>,
    pub why: String,
}

impl QuarantinedWork {
    /// Reviews the work by `policy`. `known` are credentials of this host, which the work must not contain.
    pub fn review(
        self,
        policy: &ReviewPolicy,
        known: &[SecretString],
    ) -> Result<ReviewedWork, RepoError> {
        // All facts are collected first: rules then only compare values, and call no git.
        let evidence = ReviewEvidence::collect(&self, policy, known)?;
        let mut evaluator = PolicyEvaluator { policy, reasons: BTreeSet::new() };
        evaluator.evaluate(&self, &evidence);
        let (verdict, files) = (evaluator.into_verdict(), evidence.files);
        Ok(ReviewedWork { quarantined: self, verdict, files })
    }
}

impl ReviewedWork {
    pub fn verdict(&self) -> &ReviewVerdict {
        &self.verdict
    }

    pub fn work(&self) -> &QuarantinedWork {
        &self.quarantined
    }

    /// Returns the number of changed paths.
    pub fn changed_files(&self) -> usize {
        self.files
    }

    /// Returns the work if it may be pushed, and otherwise the reasons why it is held.
    #[expect(clippy::result_large_err, reason = "both are the outcome, and there is one of them")]
    pub fn into_approved(self) -> Result<ApprovedWork, HeldWork> {
        let Self { quarantined, verdict, .. } = self;
        match verdict {
            // The quarantined work is dropped here, so that held work can never be pushed from it.
            ReviewVerdict::Hold(reasons) => {
                Err(HeldWork { state: quarantined.state, tip: quarantined.tip, reasons })
            }
            verdict => Ok(ApprovedWork { quarantined, verdict }),
        }
    }
}

impl ReviewVerdict {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Review(_) => "review",
            Self::Hold(_) => "hold",
        }
    }

    pub fn reasons(&self) -> &[ReviewReason] {
        match self {
            Self::Push => &[],
            Self::Review(reasons) | Self::Hold(reasons) => reasons,
        }
    }
}

impl fmt::Display for ReviewReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "`{path}`: {}", self.why),
            None => f.write_str(&self.why),
        }
    }
}

/// The evaluation of all rules, with the reasons that they have given.
struct PolicyEvaluator<'a> {
    policy: &'a ReviewPolicy,
    reasons: BTreeSet<ReviewReason>,
}

impl PolicyEvaluator<'_> {
    /// Evaluates the content of the work and the claims of its commits.
    fn evaluate(&mut self, work: &QuarantinedWork, evidence: &ReviewEvidence) {
        self.evaluate_evidence(evidence);
        self.check_claims(work);
        if work.has_work_elsewhere {
            let why = "the agent's checkout is at another commit than its branch";
            self.add_reason(self.policy.work_elsewhere, None, why);
        }
    }

    /// Evaluates the rules about paths, modes, sizes, links and secrets.
    fn evaluate_evidence(&mut self, evidence: &ReviewEvidence) {
        let ReviewPolicy { review_files, hold_files, .. } = *self.policy;
        // The paths and modes of every commit count, also of a commit that a later one reverts.
        for change in &evidence.changes {
            self.check_path(change);
            self.check_mode(change);
        }
        // The blobs of every commit count, too: a file that a later commit removes stays in the history that is pushed.
        for (path, size) in &evidence.large {
            self.check_size(path, *size);
        }
        for path in &evidence.links_outside {
            self.add_reason(
                self.policy.link_outside,
                Some(path),
                "it is a link out of the repository",
            );
        }
        for path in &evidence.impossible_links {
            let why = "it is a link that no checkout can make: its target is empty or too long";
            self.add_reason(ReviewAction::Hold, Some(path), why);
        }
        for path in &evidence.lfs_pointers {
            self.add_reason(
                self.policy.lfs_pointer,
                Some(path),
                "it points to a large file that is not here",
            );
        }
        for (path, kind) in &evidence.secrets {
            self.add_reason(self.policy.secret, path.as_deref(), &format!("it holds {kind}"));
        }
        // Only paths that differ in the end are counted, unlike the changes above.
        let counted = format!("{} paths are changed", evidence.files);
        match evidence.files {
            // The stricter limit is tested first, because the work may exceed both.
            files if files > hold_files => self.add_reason(ReviewAction::Hold, None, &counted),
            files if files > review_files => self.add_reason(ReviewAction::Review, None, &counted),
            _ => (),
        }
    }

    /// Evaluates the rules about authors, messages, dates and encodings of commits.
    fn check_claims(&mut self, work: &QuarantinedWork) {
        let ReviewPolicy { claims_provenance, strange_date, foreign_encoding, .. } = *self.policy;
        let (now, folder) = (SystemTime::now(), LookalikeFolder::new());
        // These are the agent's own commits. The rewritten ones have the relay's committer and trailers already.
        for commit in &work.commits {
            // 1. The agent must not pass its work off as the relay's, or as another run's.
            if commit_claims::claims_run_trailer(commit, &folder) {
                let why = "a commit message has a `Sandbox-Run` or `Sandbox-Agent` trailer, which only the relay writes";
                self.add_reason(claims_provenance, None, why);
            }
            if work.committer.as_ref().is_some_and(|committer| {
                commit_claims::claims_committer_identity(commit, committer, &folder)
            }) {
                self.add_reason(
                    claims_provenance,
                    None,
                    "an author has the relay's name or address, or one that looks like it",
                );
            }
            // 2. A reviewer must see the author, the date and the text that git stores.
            if commit_claims::hides_author(commit) {
                self.add_reason(
                    claims_provenance,
                    None,
                    "an author's name or address has control characters, or some that reorder text",
                );
            }
            if commit_claims::has_implausible_date(commit, now) {
                self.add_reason(strange_date, None, "a commit has an implausible date: in the future, before 2000, or in no valid time zone");
            }
            if commit_claims::is_in_foreign_encoding(commit) {
                let why = "a commit is not in UTF-8, so other programs may show other text than was reviewed";
                self.add_reason(foreign_encoding, None, why);
            }
        }
    }

    fn check_path(&mut self, change: &PathChange) {
        let path = Some(change.path.as_slice());
        // At most two rules apply: the first match of the host's list and the first of the agent's.
        for rule in self.policy.rules_for_path(&change.path) {
            self.add_reason(rule.verdict, path, &rule.why);
        }
        if has_strange_characters(&change.path) {
            self.add_reason(self.policy.strange_path, path, "its name has misleading characters");
        }
        // The removal of such a name makes the branch usable again.
        if !change.after.is_absent() && is_too_long(&change.path) {
            let why = format!(
                "its name is too long for a checkout: {MAX_NAME_BYTES} bytes are possible, and {MAX_PATH_BYTES} with its directories"
            );
            // A checkout that cannot be made ends the branch: no later run can begin. So no setting lets it pass.
            self.add_reason(ReviewAction::Hold, path, &why);
        }
    }

    fn check_mode(&mut self, change: &PathChange) {
        let was = |mode| change.before.iter().any(|entry| entry.mode == mode);
        let path = Some(change.path.as_slice());
        match change.after.mode {
            diff::MODE_SUBMODULE => {
                self.add_reason(self.policy.submodule, path, "it is another repository");
            }
            // A merge has several entries before it. A file that any parent had as a program is not new.
            diff::MODE_EXECUTABLE if !was(diff::MODE_EXECUTABLE) => {
                self.add_reason(self.policy.new_program, path, "it becomes executable");
            }
            _ => (),
        }
    }

    fn check_size(&mut self, path: &[u8], size: u64) {
        let ReviewPolicy { review_file_bytes, hold_file_bytes, .. } = *self.policy;
        let why = format!("it has {size} bytes");
        match size {
            // The stricter limit is tested first, because a file may exceed both.
            size if size > hold_file_bytes => self.add_reason(ReviewAction::Hold, Some(path), &why),
            size if size > review_file_bytes => {
                self.add_reason(ReviewAction::Review, Some(path), &why);
            }
            _ => (),
        }
    }

    /// Adds a reason, unless the action is to push.
    fn add_reason(&mut self, ruling: ReviewAction, path: Option<&[u8]>, why: &str) {
        if ruling > ReviewAction::Push {
            let path = path.map(display_path);
            self.reasons.insert(ReviewReason { ruling, path, why: why.to_owned() });
        }
    }

    /// Returns the verdict: the strictest action of all reasons.
    fn into_verdict(self) -> ReviewVerdict {
        // Reasons are ordered by their action first, so the last one has the strictest action.
        let strictest = self.reasons.last().map(|reason| reason.ruling);
        // The strictest reasons come first, and no more of them than a person reads.
        let reasons = || {
            let mut reasons: Vec<_> = self.reasons.iter().cloned().collect();
            reasons.sort_by_key(|reason| std::cmp::Reverse(reason.ruling));
            reasons.truncate(MAX_REASONS);
            reasons
        };
        match strictest {
            None | Some(ReviewAction::Push) => ReviewVerdict::Push,
            Some(ReviewAction::Review) => ReviewVerdict::Review(reasons()),
            Some(ReviewAction::Hold) => ReviewVerdict::Hold(reasons()),
        }
    }
}

/// Returns true if a path is not UTF-8, or has characters that are invisible, that change the direction of text, or
/// that other systems take for a separator.
fn has_strange_characters(path: &[u8]) -> bool {
    str::from_utf8(path).map_or(true, |path| path.chars().any(is_hidden) || path.contains('\\'))
}

/// Returns true if a checkout may be unable to have a path.
fn is_too_long(path: &[u8]) -> bool {
    let mut names = path.split(|byte| *byte == b'/');
    path.len() > MAX_PATH_BYTES || names.any(|name| name.len() > MAX_NAME_BYTES)
}

/// Escapes and cuts a path for people.
fn display_path(path: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(path).chars().flat_map(char::escape_debug).collect();
    text.chars().take(MAX_PATH_CHARS).collect()
}

/// The most reasons of a verdict. Our choice.
const MAX_REASONS: usize = 50;
/// The most characters of a path in a reason. Our choice.
const MAX_PATH_CHARS: usize = 200;

/// The longest name of a file or a directory in bytes: the limit of Linux's usual file systems.
const MAX_NAME_BYTES: usize = 255;

/// The longest path in bytes. Linux takes 4,095, and the rest is for the directory of a workspace. Our choice.
const MAX_PATH_BYTES: usize = 3000;
