//! Moves the branch at the remote, if it still is where the run found it.
//!
//! **Invariant:** the only ref that is ever moved is a [`Branch`](super::Branch), which is below `sandbox/`, and only forwards: what is
//! pushed builds on what was there, and the remote is told what that was.

use std::time::Duration;

use super::judge::Cleared;
use super::quarantine::Mode;
use super::{BranchState, Error, Lease, Quarantined, Sha, Verdict, git};
use crate::base::secret::Secret;

/// The branch is at the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub state: BranchState,
    pub tip: Sha,
    pub tree: Sha,
    pub commits: usize,
    pub mode: Mode,
    /// [`Verdict::Push`] or [`Verdict::Review`].
    pub verdict: Verdict,
    /// The branch was there already, by an earlier try whose answer was lost.
    pub was_there: bool,
}

impl Cleared {
    /// What will be pushed.
    pub fn work(&self) -> &Quarantined {
        &self.quarantined
    }

    /// Of its branch.
    pub fn lease(&self) -> &Lease {
        &self.quarantined.lease
    }

    /// Pushes the work. Doing it again, after the whole way again, is harmless: it comes to the same commit.
    ///
    /// # Errors
    /// [`Error::Moved`] where somebody else has moved the branch, or taken it away; [`Error::Declined`] where the remote
    /// does not want it; [`Error::Denied`] where the token is not good enough; [`Error::Unreachable`] where it may be
    /// tried again.
    pub fn push(self, token: Option<&Secret>) -> Result<Pushed, Error> {
        let Self { quarantined: work, verdict } = self;
        let target = work.state.branch.to_ref();
        let expected = work.state.expected().map(|sha| sha.to_string()).unwrap_or_default();
        let words =
            ["--porcelain", "--no-verify", "--no-follow-tags", "--no-signed", "--no-progress"];
        let lease = format!("--force-with-lease={target}:{expected}");
        let call = work.call("push").words(words).words(["--recurse-submodules=no", &lease, "--"]);
        let call = call.word(work.mirror.url()).word(format!("{}:{target}", work.tip));
        let (said, ended) = work.mirror.admit(call.limits(NETWORK), token)?.told()?;
        let answer = Answer::read(&said, &target);
        let was_there = match (answer, ended) {
            (Some(Answer::Done), Ok(())) => false,
            (Some(Answer::AlreadyThere), _) => true,
            (answer, ended) => settled(&work, answer.unwrap_or(Answer::None), ended, token)?,
        };
        let commits = work.commits();
        let Quarantined { state, tip, tree, mode, .. } = work;
        Ok(Pushed { state, tip, tree, commits, mode, verdict, was_there })
    }
}

/// What the remote did with the one ref.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    AlreadyThere,
    Stale,
    Rejected(String),
    /// Nothing that can be read.
    None,
}

impl Answer {
    /// Finds the ref's line: a flag, the refs and a summary, with tabs between them.
    pub(super) fn read(said: &str, target: &str) -> Option<Self> {
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
fn settled(
    work: &Quarantined,
    answer: Answer,
    ended: Result<(), git::Error>,
    token: Option<&Secret>,
) -> Result<bool, Error> {
    let found = work.mirror.remote_tip(&work.state.branch, token);
    if matches!(found, Ok(Some(found)) if found == work.tip) {
        return Ok(true);
    }
    Err(match answer {
        Answer::Stale => Error::Moved { branch: work.state.branch.clone(), found: found? },
        Answer::Rejected(why) => Error::Declined { why: whole(why, &ended) },
        _ => ended.map_or_else(unreached, |()| senseless()),
    })
}

/// The reasons of servers are on standard error.
pub(super) fn whole(summary: String, ended: &Result<(), git::Error>) -> String {
    let said = ended.as_ref().err().and_then(git::Error::said).unwrap_or_default();
    let told = said.lines().filter_map(|line| line.strip_prefix("remote: ")).map(str::trim);
    let told: Vec<_> = told.filter(|line| !line.is_empty()).take(MAX_LINES).collect();
    if told.is_empty() { summary } else { format!("{summary}: {}", told.join(" ")) }
}

/// Nothing was said about the ref.
pub(super) fn unreached(error: git::Error) -> Error {
    let Some(said) = error.said() else {
        return match error {
            git::Error::Late { .. } => Error::Unreachable { why: error.to_string() },
            error => error.into(),
        };
    };
    let is = |phrases: &[&str]| phrases.iter().any(|phrase| said.contains(phrase));
    let why = said.to_owned();
    if is(DENIED) { Error::Denied { why } } else { Error::Unreachable { why } }
}

fn senseless() -> Error {
    git::Error::Senseless { what: "push".to_owned() }.into()
}

/// What git says, in this language, where a server wants another token, or says that there is no such repository.
const DENIED: &[&str] = &[
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "returned error: 401",
    "returned error: 403",
    "returned error: 404",
    "not found",
    "does not appear to be a git repository",
];

const MAX_LINES: usize = 10;
const NETWORK: git::Limits = git::Limits {
    time: Duration::from_mins(10),
    output_bytes: 1 << 20,
    memory_bytes: 4 << 30,
    file_bytes: 1 << 30,
};
