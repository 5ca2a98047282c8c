//! One row of the outbox: the work, its owner, and how far the delivery has come.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::Row;
use rusqlite::types::Type;
use serde::{Deserialize, Serialize};

use crate::relay::delivery::rules::ReviewRules;
use crate::relay::delivery::statement::RunFacts;
use crate::relay::repo::extract_commands::AnnouncedBranch;
use crate::relay::repo::repository::RepositoryUrl;
use crate::relay::repo::{BranchState, ObjectId, SandboxBranch, review};

/// A request to deliver work, with all that is known once the work has come out of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryRequest {
    #[serde(flatten)]
    pub repository: RepositoryUrl,
    /// The branch's state when the run began.
    pub state: BranchState,
    /// The commits that the sandbox announced. The announcement is untrusted, and quarantine checks it.
    pub announced: AnnouncedBranch,
    pub facts: RunFacts,
    /// The rules that review the work in every attempt. Rows of earlier versions have none, and get the present rules.
    #[serde(default)]
    pub rules: Option<ReviewRules>,
    /// The host settings that the result depends on. Rows of earlier versions have none, and get the present settings.
    #[serde(default)]
    pub host: Option<HostContext>,
    /// The directory of the extracted work. No other work uses it.
    pub artifacts: PathBuf,
    /// The agent's text for the pull request. Absent if no pull request is requested.
    #[serde(default)]
    pub pull_request: Option<PullRequestText>,
}

/// Host settings that the commit or the verdict depends on. A later attempt on a changed host gives the same result
/// with them, or stops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostContext {
    /// The committer of the work's commits, as `Name <email>`, in every attempt.
    pub committer: String,
    /// A salt that is new for each work, so that equal secrets of two rows have different digests.
    pub salt: String,
    /// The secrets that the work must not contain. A host that lacks one of them cannot review the work.
    pub known: Vec<SecretDigest>,
}

/// The name and the salted digest of one of this host's credentials, without the credential itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretDigest {
    /// The name of the environment variable that holds the credential.
    pub name: String,
    pub digest: String,
}

/// The texts of a pull request, unchanged: the description is the agent's, the others are the client's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PullRequestText {
    /// The title that the request named. Empty if the commits give the title.
    pub title: String,
    /// The agent's answer.
    pub body: String,
    /// The last message of the user who requested the run.
    pub asked: String,
    /// The model that the run used by default.
    pub model: String,
}

/// A snapshot of one row, at the time when the row was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryJob {
    pub id: String,
    pub request: DeliveryRequest,
    /// The fence of the last holder of the branch who claimed the row.
    pub fence: u64,
    pub step: DeliveryStep,
    pub verdict: Option<VerdictKind>,
    /// The reasons why the verdict is not a plain push.
    pub reasons: Vec<review::ReviewReason>,
    /// The patch comparison: `replayed` if the patches describe the commits, or `bundled` and the reason. Absent if an
    /// earlier version reviewed the work.
    pub mode: Option<String>,
    /// The commit to push.
    pub head: Option<ObjectId>,
    pub is_pushed: bool,
    pub pull_request: Option<PullRequestRef>,
    /// The number of failed attempts.
    pub attempts: u32,
    /// The time of the next attempt.
    pub due: SystemTime,
    /// The reason why the delivery waits, is held or has failed.
    pub error: Option<String>,
    /// The kind of the reason, if the row is held or has failed. The audit record has the same code.
    pub code: Option<String>,
    /// The result of publishing the statement beside the commit.
    pub statement: Option<String>,
    pub created: SystemTime,
}

/// A pull request that was opened or updated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequestRef {
    pub number: u64,
    pub url: String,
}

/// The last step of a delivery that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryStep {
    /// The work is out of the sandbox, on this host's disk.
    Extracted,
    /// The work's objects are in a quarantine repository beside the mirror.
    Quarantined,
    /// The work has a verdict.
    Judged,
    /// The remote's branch has the work.
    Pushed,
    PullRequested,
    Done,
    /// The work is retained until a person decides.
    Held,
    /// The work cannot be delivered, and is retained, too.
    Failed,
}

/// The kind of a policy's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerdictKind {
    /// The work may be pushed, and its pull request needs no mark.
    Push,
    /// The work may be pushed, and a person has to review it. The pull request is a draft, or its text demands the
    /// review.
    Review,
    /// The work must not be pushed.
    Hold,
}

/// The outcome of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    Quarantined { head: ObjectId },
    Judged { verdict: review::ReviewVerdict, mode: &'static str },
    Pushed,
    PullRequested(PullRequestRef),
    Done,
    Held { code: &'static str, why: String },
    Failed { why: String },
}

impl DeliveryStep {
    pub const ALL: [Self; 8] = [
        Self::Extracted,
        Self::Quarantined,
        Self::Judged,
        Self::Pushed,
        Self::PullRequested,
        Self::Done,
        Self::Held,
        Self::Failed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Extracted => "extracted",
            Self::Quarantined => "quarantined",
            Self::Judged => "judged",
            Self::Pushed => "pushed",
            Self::PullRequested => "pull_requested",
            Self::Done => "done",
            Self::Held => "held",
            Self::Failed => "failed",
        }
    }

    /// Returns true if no step follows without a request from an operator.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Done | Self::Held | Self::Failed)
    }

    /// Returns true if the state machine has an arrow from this step to `next`.
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            // Every open step can stop. A terminal step has no arrow at all.
            (from, Self::Held | Self::Failed) => !from.is_terminal(),
            (Self::Extracted, Self::Quarantined)
            // A later attempt may know more secrets, and so may come to another verdict.
            | (Self::Quarantined | Self::Judged, Self::Judged)
            | (Self::Judged, Self::Pushed)
            | (Self::Pushed, Self::PullRequested)
            // The pull request is optional.
            | (Self::Pushed | Self::PullRequested, Self::Done) => true,
            _ => false,
        }
    }
}

impl fmt::Display for DeliveryStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl VerdictKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Review => "review",
            Self::Hold => "hold",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Push, Self::Review, Self::Hold].into_iter().find(|known| known.as_str() == text)
    }
}

/// Converts a verdict to its kind, and drops the reasons.
impl From<&review::ReviewVerdict> for VerdictKind {
    fn from(verdict: &review::ReviewVerdict) -> Self {
        match verdict {
            review::ReviewVerdict::Push => Self::Push,
            review::ReviewVerdict::Review(_) => Self::Review,
            review::ReviewVerdict::Hold(_) => Self::Hold,
        }
    }
}

impl DeliveryJob {
    /// Returns true if an operator can bring the work into a clone. The work cannot be applied if this host's git
    /// refuses its objects.
    pub fn can_be_applied(&self) -> bool {
        self.code.as_deref() != Some(CODE_OBJECTS)
    }

    /// Returns true if the row's next attempt is due.
    pub fn is_due(&self) -> bool {
        super::is_due(self.due, SystemTime::now())
    }

    /// Returns true if a further attempt may have another result. A branch that has moved on does not move back.
    pub fn can_be_retried(&self) -> bool {
        self.step != DeliveryStep::Done && self.code.as_deref() != Some(CODE_MOVED)
    }
}

impl PullRequestText {
    /// Makes a text without a title. The relay then derives the title from the commits.
    pub fn from_body(body: String) -> Self {
        Self { body, ..Self::default() }
    }
}

impl DeliveryRequest {
    pub fn branch(&self) -> &SandboxBranch {
        &self.state.branch
    }
}

impl StepOutcome {
    pub(super) fn step(&self) -> DeliveryStep {
        match self {
            Self::Quarantined { .. } => DeliveryStep::Quarantined,
            Self::Judged { .. } => DeliveryStep::Judged,
            Self::Pushed => DeliveryStep::Pushed,
            Self::PullRequested(_) => DeliveryStep::PullRequested,
            Self::Done => DeliveryStep::Done,
            Self::Held { .. } => DeliveryStep::Held,
            Self::Failed { .. } => DeliveryStep::Failed,
        }
    }

    /// Writes the outcome's values into a row, but for the step itself.
    pub(super) fn apply_to(self, job: &mut DeliveryJob) {
        match self {
            Self::Quarantined { head } => job.head = Some(head),
            // A repeated review replaces all three values, so that they always belong together.
            Self::Judged { verdict, mode } => {
                job.mode = Some(mode.to_owned());
                job.verdict = Some(VerdictKind::from(&verdict));
                job.reasons = verdict.reasons().to_vec();
            }
            Self::Pushed => job.is_pushed = true,
            Self::PullRequested(pull) => job.pull_request = Some(pull),
            // The step itself is all that changes.
            Self::Done => (),
            Self::Held { code, why } => {
                (job.code, job.error) = (Some(code.to_owned()), Some(super::one_line(&why)));
            }
            Self::Failed { why } => {
                (job.code, job.error) = (Some("failed".to_owned()), Some(super::one_line(&why)));
            }
        }
    }
}

/// The columns that [`read_job`] reads, in that order.
pub(super) const JOB_COLUMNS: &str = "id, \"order\", fence, step, verdict, head, is_pushed, pull_number, pull_url, attempts, \
                                  due, error, created, code, statement, reasons, mode";

/// Reads a row of [`JOB_COLUMNS`].
pub(super) fn read_job(row: &Row<'_>) -> rusqlite::Result<DeliveryJob> {
    let text = |at: usize| row.get::<_, Option<String>>(at);
    // A value that this version cannot read is an error of its column, as a wrong SQL type is.
    let column_error = |at| {
        move |error: BoxedError| rusqlite::Error::FromSqlConversionFailure(at, Type::Text, error)
    };
    let request: String = row.get(1)?;
    let step: String = row.get(3)?;
    let number: Option<i64> = row.get(7)?;
    let pull_request = number
        .zip(text(8)?)
        .map(|(number, url)| PullRequestRef { number: number.unsigned_abs(), url });
    Ok(DeliveryJob {
        id: row.get(0)?,
        request: serde_json::from_str(&request).map_err(|error| column_error(1)(error.into()))?,
        fence: row.get::<_, i64>(2)?.unsigned_abs(),
        step: DeliveryStep::ALL
            .into_iter()
            .find(|known| known.as_str() == step)
            .ok_or("a step")
            .map_err(|error| column_error(3)(error.into()))?,
        verdict: text(4)?.as_deref().and_then(VerdictKind::parse),
        // An ID that cannot be parsed counts as absent; quarantine computes the commit again.
        head: text(5)?.and_then(|head| head.parse().ok()),
        is_pushed: row.get(6)?,
        pull_request,
        attempts: row.get(9)?,
        due: from_millis(row.get(10)?),
        error: text(11)?,
        created: from_millis(row.get(12)?),
        code: text(13)?,
        statement: text(14)?,
        // The reasons are for people. Another version may store them in another form, and then they are left out.
        reasons: serde_json::from_str(&row.get::<_, String>(15)?).unwrap_or_default(),
        mode: text(16)?,
    })
}

/// The code of a held row whose objects are malformed or which git refuses.
pub(in crate::relay::delivery) const CODE_OBJECTS: &str = "objects";

/// The code of a held row whose branch is no longer where its run began.
pub(in crate::relay::delivery) const CODE_MOVED: &str = "moved";

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Converts a time to milliseconds since 1970, as the database stores times.
pub(super) fn to_millis(time: SystemTime) -> i64 {
    // Times before 1970 become 0, and times beyond the range of SQLite's integers the latest time.
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Converts milliseconds since 1970 to a time.
pub(super) fn from_millis(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs())
}
