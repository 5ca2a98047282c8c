//! Moves the branch at the remote, if it still is where the run found it.
//!
//! **Invariant:** the only ref that is ever moved is a [`Branch`](super::SandboxBranch), which is below `sandbox/`, and only forwards: what is
//! pushed builds on what was there, and the remote is told what that was.

use std::time::Duration;

use super::quarantine::PatchComparison;
use super::review::ApprovedWork;
use super::{BranchLease, BranchState, ObjectId, QuarantinedWork, RepoError, ReviewVerdict, git};
use crate::base::secret::SecretString;

/// The branch is at the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushOutcome {
    pub state: BranchState,
    pub tip: ObjectId,
    pub tree: ObjectId,
    pub commits: usize,
    pub mode: PatchComparison,
    /// [`ReviewVerdict::Push`] or [`ReviewVerdict::Review`].
    pub verdict: ReviewVerdict,
    /// The branch was there already, by an earlier try whose answer was lost.
    pub was_there: bool,
}

impl ApprovedWork {
    /// What will be pushed.
    pub fn work(&self) -> &QuarantinedWork {
        &self.quarantined
    }

    /// Of its branch.
    pub fn lease(&self) -> &BranchLease {
        &self.quarantined.lease
    }

    /// Pushes the work. Doing it again, after the whole way again, is harmless: it comes to the same commit.
    ///
    /// # Errors
    /// [`RepoError::Moved`] where somebody else has moved the branch, or taken it away; [`RepoError::Declined`] where the remote
    /// does not want it; [`RepoError::Denied`] where the token is not good enough; [`RepoError::Unreachable`] where it may be
    /// tried again.
    pub fn push_branch(self, token: Option<&SecretString>) -> Result<PushOutcome, RepoError> {
        let Self { quarantined: work, verdict } = self;
        let target = work.state.branch.to_ref();
        let expected =
            work.state.expected_remote_tip().map(|sha| sha.to_string()).unwrap_or_default();
        let words =
            ["--porcelain", "--no-verify", "--no-follow-tags", "--no-signed", "--no-progress"];
        let lease = format!("--force-with-lease={target}:{expected}");
        let call =
            work.git_command("push").args(words).args(["--recurse-submodules=no", &lease, "--"]);
        let call = call.arg(work.mirror.remote_url()).arg(format!("{}:{target}", work.tip));
        let (said, ended) =
            work.mirror.authenticate(call.limits(NETWORK_LIMITS), token)?.output_and_status()?;
        let answer = RefUpdateStatus::parse_ref_line(&said, &target);
        let was_there = match (answer, ended) {
            (Some(RefUpdateStatus::Done), Ok(())) => false,
            (Some(RefUpdateStatus::AlreadyThere), _) => true,
            (answer, ended) => {
                resolve_lost_reply(&work, answer.unwrap_or(RefUpdateStatus::None), ended, token)?
            }
        };
        let commits = work.commit_count();
        let QuarantinedWork { state, tip, tree, mode, .. } = work;
        Ok(PushOutcome { state, tip, tree, commits, mode, verdict, was_there })
    }
}

/// What the remote did with the one ref.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RefUpdateStatus {
    Done,
    AlreadyThere,
    Stale,
    Rejected(String),
    /// Nothing that can be read.
    None,
}

impl RefUpdateStatus {
    /// Finds the ref's line: a flag, the refs and a summary, with tabs between them.
    pub(super) fn parse_ref_line(said: &str, target: &str) -> Option<Self> {
        said.lines().find_map(|line| {
            let mut fields = line.split('\t');
            let (flag, refs, summary) = (fields.next()?, fields.next()?, fields.next()?);
            if refs.rsplit(':').next() != Some(target) {
                return None;
            }
            match flag {
                " " | "*" => Some(Self::Done),
                "=" => Some(Self::AlreadyThere),
                "!" if summary.contains("stale info") => Some(Self::Stale),
                "!" => Some(Self::Rejected(summary.to_owned())),
                _ => None,
            }
        })
    }
}

/// Whether the branch is at the work all the same: an answer may be lost, and asked for again by the very library that
/// git speaks HTTP with; then the remote declines what it has already done.
fn resolve_lost_reply(
    work: &QuarantinedWork,
    answer: RefUpdateStatus,
    ended: Result<(), git::GitError>,
    token: Option<&SecretString>,
) -> Result<bool, RepoError> {
    let found = work.mirror.remote_tip(&work.state.branch, token);
    if matches!(found, Ok(Some(found)) if found == work.tip) {
        return Ok(true);
    }
    Err(match answer {
        RefUpdateStatus::Stale => {
            RepoError::Moved { branch: work.state.branch.clone(), found: found? }
        }
        RefUpdateStatus::Rejected(why) => {
            RepoError::Declined { why: rejection_message(why, &ended) }
        }
        _ => ended.map_or_else(map_network_error, |()| unexpected_output()),
    })
}

/// The reasons of servers are on standard error.
pub(super) fn rejection_message(summary: String, ended: &Result<(), git::GitError>) -> String {
    let said = ended.as_ref().err().and_then(git::GitError::stderr_text).unwrap_or_default();
    let told = said.lines().filter_map(|line| line.strip_prefix("remote: ")).map(str::trim);
    let told: Vec<_> = told.filter(|line| !line.is_empty()).take(MAX_MESSAGE_LINES).collect();
    if told.is_empty() { summary } else { format!("{summary}: {}", told.join(" ")) }
}

/// Nothing was said about the ref.
pub(super) fn map_network_error(error: git::GitError) -> RepoError {
    let Some(said) = error.stderr_text() else {
        return match error {
            git::GitError::Late { .. } => RepoError::Unreachable { why: error.to_string() },
            error => error.into(),
        };
    };
    let is = |phrases: &[&str]| phrases.iter().any(|phrase| said.contains(phrase));
    let why = said.to_owned();
    if is(UNAUTHORIZED_MESSAGES) {
        RepoError::Denied { why }
    } else {
        RepoError::Unreachable { why }
    }
}

fn unexpected_output() -> RepoError {
    git::GitError::Senseless { what: "push".to_owned() }.into()
}

/// What git says, in this language, where a server wants another token, or says that there is no such repository.
const UNAUTHORIZED_MESSAGES: &[&str] = &[
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "returned error: 401",
    "returned error: 403",
    "returned error: 404",
    "not found",
    "does not appear to be a git repository",
];

const MAX_MESSAGE_LINES: usize = 10;
const NETWORK_LIMITS: git::GitLimits = git::GitLimits {
    time: Duration::from_mins(10),
    output_bytes: 1 << 20,
    memory_bytes: 4 << 30,
    file_bytes: 1 << 30,
};
