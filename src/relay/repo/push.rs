//! The push: moves the branch at the remote, if the branch is still where the run has found it.
//!
//! **Invariant:** the only ref that is ever moved is a [`SandboxBranch`](super::SandboxBranch), which is below
//! `sandbox/`, and it only moves forwards. The pushed commits build on the branch's earlier commit, and the push states
//! that commit to the remote.

use std::time::Duration;

use super::quarantine::PatchComparison;
use super::remote_error::{map_network_error, rejection_message};
use super::review::ApprovedWork;
use super::{BranchLease, BranchState, ObjectId, QuarantinedWork, RepoError, ReviewVerdict, git};
use crate::base::secret::SecretString;

/// The result of a push: the branch has the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushOutcome {
    pub state: BranchState,
    pub tip: ObjectId,
    pub tree: ObjectId,
    pub commits: usize,
    pub mode: PatchComparison,
    /// The verdict, which is [`ReviewVerdict::Push`] or [`ReviewVerdict::Review`].
    pub verdict: ReviewVerdict,
    /// True if the branch had the work already, from an earlier attempt whose answer was lost.
    pub was_there: bool,
}

impl ApprovedWork {
    /// Returns the work that will be pushed.
    pub fn work(&self) -> &QuarantinedWork {
        &self.quarantined
    }

    /// Returns the lease of the work's branch.
    pub fn lease(&self) -> &BranchLease {
        &self.quarantined.lease
    }

    /// Pushes the work. A repeated push of the same work is harmless, because all steps before it make the same commit.
    ///
    /// # Errors
    /// Returns [`RepoError::BranchMoved`] if the branch was moved or removed, [`RepoError::RemoteRejected`] if the
    /// remote refuses the update, [`RepoError::Unauthorized`] if the token has no access,
    /// [`RepoError::PushLimitExceeded`] if git needs more memory than the limits of quarantine allow, and
    /// [`RepoError::Unreachable`] if a later attempt may succeed.
    pub fn push_branch(self, token: Option<&SecretString>) -> Result<PushOutcome, RepoError> {
        // 1. The condition: the branch is where the run found it. Nothing that others pushed meanwhile is overwritten.
        let Self { quarantined: work, verdict } = self;
        let target = work.state.branch.to_ref();
        let expected =
            work.state.expected_remote_tip().map(|sha| sha.to_string()).unwrap_or_default();
        // `--force-with-lease` makes the remote compare: with an empty value, the branch must not exist.
        let words =
            ["--porcelain", "--no-verify", "--no-follow-tags", "--no-signed", "--no-progress"];
        // The ref is named in full, so that git guesses nothing.
        let lease = format!("--force-with-lease={target}:{expected}");
        let call =
            work.git_command("push").args(words).args(["--recurse-submodules=no", &lease, "--"]);
        let call = call.arg(work.mirror.remote_url()).arg(format!("{}:{target}", work.tip));
        // 2. One push of one ref, from the quarantine's objects.
        let limits = push_limits(work.limits.memory_bytes);
        let (said, ended) =
            work.mirror.authenticate(call.limits(limits), token)?.output_and_status()?;
        let answer = RefUpdateStatus::parse_ref_line(&said, &target);
        // 3. The answer. If it is lost or contradicts itself, the remote's branch is read again.
        let was_there = match (answer, ended) {
            // Success needs both: the line about the ref, and git's exit status.
            (Some(RefUpdateStatus::Updated), Ok(())) => false,
            (Some(RefUpdateStatus::AlreadyThere), _) => true,
            (answer, ended) => resolve_lost_reply(
                &work,
                answer.unwrap_or(RefUpdateStatus::Unreported),
                ended,
                token,
            )?,
        };
        let commits = work.commit_count();
        let QuarantinedWork { state, tip, tree, mode, .. } = work;
        Ok(PushOutcome { state, tip, tree, commits, mode, verdict, was_there })
    }
}

/// The remote's answer about the one ref.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RefUpdateStatus {
    Updated,
    AlreadyThere,
    Stale,
    Rejected(String),
    /// The output has no line about the ref, or an unknown one.
    Unreported,
}

impl RefUpdateStatus {
    /// Parses the line of the ref in git's porcelain output: a flag, the refs and a summary, separated by tabs.
    pub(super) fn parse_ref_line(said: &str, target: &str) -> Option<Self> {
        said.lines().find_map(|line| {
            let mut fields = line.split('\t');
            let (flag, refs, summary) = (fields.next()?, fields.next()?, fields.next()?);
            // Lines about other refs, or lines that a hook has printed, are skipped.
            if refs.rsplit(':').next() != Some(target) {
                return None;
            }
            match flag {
                " " | "*" => Some(Self::Updated),
                "=" => Some(Self::AlreadyThere),
                "!" if summary.contains("stale info") => Some(Self::Stale),
                "!" => Some(Self::Rejected(summary.to_owned())),
                _ => None,
            }
        })
    }
}

/// Returns true if the branch has the work in spite of an error. The answer of a push may be lost, and git's HTTP
/// library then repeats the request by itself. The remote declines that repetition, because the branch has moved.
fn resolve_lost_reply(
    work: &QuarantinedWork,
    answer: RefUpdateStatus,
    ended: Result<(), git::GitError>,
    token: Option<&SecretString>,
) -> Result<bool, RepoError> {
    // The remote's present state decides. The answer only selects the error.
    let found = work.mirror.remote_tip(&work.state.branch, token);
    if matches!(found, Ok(Some(found)) if found == work.tip) {
        return Ok(true);
    }
    // The branch does not have the work. Now the answer tells the cause.
    Err(match answer {
        RefUpdateStatus::Stale => {
            RepoError::BranchMoved { branch: work.state.branch.clone(), found: found? }
        }
        RefUpdateStatus::Rejected(why) => {
            RepoError::RemoteRejected { why: rejection_message(why, &ended) }
        }
        _ => ended.map_or_else(|error| map_push_error(error, work), |()| unexpected_output()),
    })
}

/// Maps an error of the git that pushes. A remote that lists more refs than git may hold is no error of the network.
fn map_push_error(error: git::GitError, work: &QuarantinedWork) -> RepoError {
    let is_timeout = matches!(error, git::GitError::Timeout { .. });
    if is_timeout || !error.is_resource_limit() {
        return map_network_error(error);
    }
    let (branch, why) = (work.state.branch.clone(), error.to_string());
    RepoError::PushLimitExceeded { branch, why, memory_bytes: work.limits.memory_bytes }
}

/// Returns the error for output that is not in git's form.
fn unexpected_output() -> RepoError {
    git::GitError::UnexpectedOutput { command: "push".to_owned() }.into()
}

/// Returns the limits of a push. The quarantine's git has read the same objects with the same memory. Git holds the whole
/// list of the remote's refs in memory, and the remote decides how long the list is.
fn push_limits(memory_bytes: u64) -> git::GitLimits {
    git::GitLimits {
        time: PUSH_TIME,
        output_bytes: MAX_PUSH_OUTPUT_BYTES,
        memory_bytes,
        file_bytes: MAX_PUSH_FILE_BYTES,
    }
}

/// The time of a push. Our choice.
const PUSH_TIME: Duration = Duration::from_mins(10);

/// The longest output of a push, which is about one ref. Our choice.
const MAX_PUSH_OUTPUT_BYTES: u64 = 1 << 20;

/// The largest file that a push may write. Our choice.
const MAX_PUSH_FILE_BYTES: u64 = 1 << 30;
