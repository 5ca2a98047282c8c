//! One row: whose work it is, and how far it has come.

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

/// What is to be delivered, and where: all that is known once the work has come out of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryRequest {
    #[serde(flatten)]
    pub repository: RepositoryUrl,
    /// Where the branch stood when the run began.
    pub state: BranchState,
    /// What was announced inside the sandbox, and is proved on the way.
    pub announced: AnnouncedBranch,
    pub facts: RunFacts,
    /// What it is judged by, whoever takes it up; absent in rows of earlier versions, which are judged by what holds then.
    #[serde(default)]
    pub rules: Option<ReviewRules>,
    /// What of this host it depends on; absent in rows of earlier versions, which take what they find.
    #[serde(default)]
    pub host: Option<HostContext>,
    /// Where what came out lies. It is this work's alone.
    pub artifacts: PathBuf,
    /// What is to stand on the pull request, if there is to be one.
    #[serde(default)]
    pub pull_request: Option<PullRequestText>,
}

/// What would come to another commit, or to another verdict, where it was another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostContext {
    /// `Name <email>`: who its commits are by, whoever takes it up.
    pub committer: String,
    /// Another for each work, so that nothing can be told by comparing digests.
    pub salt: String,
    /// The credentials that must not be in it. Whoever does not know all of them cannot judge it.
    pub known: Vec<SecretDigest>,
}

/// A credential of this host's, without what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretDigest {
    /// The variable that it is given in.
    pub name: String,
    pub digest: String,
}

/// The agent's words, as they came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequestText {
    pub title: String,
    pub body: String,
}

/// One row, as it was when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryJob {
    pub id: String,
    pub order: DeliveryRequest,
    /// Of the last holder of the branch who took this up.
    pub fence: u64,
    pub step: DeliveryStep,
    pub verdict: Option<VerdictKind>,
    /// Why it was not simply to be pushed.
    pub reasons: Vec<review::ReviewReason>,
    /// Whether the patches tell what the commits are, and why not; absent where an earlier version judged it.
    pub mode: Option<String>,
    /// What is to be pushed.
    pub head: Option<ObjectId>,
    pub is_pushed: bool,
    pub pull: Option<PullRequestRef>,
    /// How often it was left for later.
    pub attempts: u32,
    /// When to try again.
    pub due: SystemTime,
    /// Why it is not further.
    pub error: Option<String>,
    /// Of what kind that is, where it is at its end; as in the audit.
    pub code: Option<String>,
    /// What has become of the statement beside the commit.
    pub statement: Option<String>,
    pub created: SystemTime,
}

/// A pull request that was made, or brought up to date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequestRef {
    pub number: u64,
    pub url: String,
}

/// How far a row has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryStep {
    /// It is out of the sandbox, on our disk.
    Extracted,
    /// It has been let in, beside the mirror.
    Quarantined,
    /// It has been decided what becomes of it.
    Judged,
    /// The branch has it.
    Pushed,
    PullRequested,
    Done,
    /// It is kept, for people to look at.
    Held,
    /// It cannot be delivered. It is kept, too.
    Failed,
}

/// What a policy decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerdictKind {
    Push,
    /// As a draft, or with a word that somebody has to look.
    Review,
    Hold,
}

/// What a step has brought.
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

    /// Whether nothing will come of it by itself any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Done | Self::Held | Self::Failed)
    }

    /// Whether `next` comes after it.
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (from, Self::Held | Self::Failed) => !from.is_terminal(),
            (Self::Extracted, Self::Quarantined)
            // Who takes it up may come to another verdict.
            | (Self::Quarantined | Self::Judged, Self::Judged)
            | (Self::Judged, Self::Pushed)
            | (Self::Pushed, Self::PullRequested)
            // Not everybody asks for a pull request.
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
        [Self::Push, Self::Review, Self::Hold].into_iter().find(|one| one.as_str() == text)
    }
}

/// Without its reasons.
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
    /// Whether git takes it anywhere: what this host's git does not let in, another had better not, either.
    pub fn can_be_applied(&self) -> bool {
        self.code.as_deref() != Some(CODE_OBJECTS)
    }

    /// Whether it is time to try again.
    pub fn is_due(&self) -> bool {
        super::is_due(self.due, SystemTime::now())
    }

    /// Whether the same may come to another end, where nothing but the time is another.
    pub fn can_be_retried(&self) -> bool {
        self.step != DeliveryStep::Done && self.code.as_deref() != Some(CODE_MOVED)
    }
}

impl PullRequestText {
    /// Without a title: that is made of the commits then.
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

    pub(super) fn apply_to(self, job: &mut DeliveryJob) {
        match self {
            Self::Quarantined { head } => job.head = Some(head),
            Self::Judged { verdict, mode } => {
                job.mode = Some(mode.to_owned());
                job.verdict = Some(VerdictKind::from(&verdict));
                job.reasons = verdict.reasons().to_vec();
            }
            Self::Pushed => job.is_pushed = true,
            Self::PullRequested(pull) => job.pull = Some(pull),
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

/// What [`read_job`] reads, in its order.
pub(super) const JOB_COLUMNS: &str = "id, \"order\", fence, step, verdict, head, is_pushed, pull_number, pull_url, attempts, \
                                  due, error, created, code, statement, reasons, mode";

pub(super) fn read_job(row: &Row<'_>) -> rusqlite::Result<DeliveryJob> {
    let text = |at: usize| row.get::<_, Option<String>>(at);
    let odd = |at| {
        move |error: BoxedError| rusqlite::Error::FromSqlConversionFailure(at, Type::Text, error)
    };
    let order: String = row.get(1)?;
    let step: String = row.get(3)?;
    let number: Option<i64> = row.get(7)?;
    let pull = number
        .zip(text(8)?)
        .map(|(number, url)| PullRequestRef { number: number.unsigned_abs(), url });
    Ok(DeliveryJob {
        id: row.get(0)?,
        order: serde_json::from_str(&order).map_err(|error| odd(1)(error.into()))?,
        fence: row.get::<_, i64>(2)?.unsigned_abs(),
        step: DeliveryStep::ALL
            .into_iter()
            .find(|one| one.as_str() == step)
            .ok_or("a step")
            .map_err(|error| odd(3)(error.into()))?,
        verdict: text(4)?.as_deref().and_then(VerdictKind::parse),
        head: text(5)?.and_then(|head| head.parse().ok()),
        is_pushed: row.get(6)?,
        pull,
        attempts: row.get(9)?,
        due: from_millis(row.get(10)?),
        error: text(11)?,
        created: from_millis(row.get(12)?),
        code: text(13)?,
        statement: text(14)?,
        // They are for people; another version may say them in another way.
        reasons: serde_json::from_str(&row.get::<_, String>(15)?).unwrap_or_default(),
        mode: text(16)?,
    })
}

/// Why a row is held: what has come out is not in git's form.
pub(in crate::relay::delivery) const CODE_OBJECTS: &str = "objects";

/// Why a row is held: its branch is not where its run began.
pub(in crate::relay::delivery) const CODE_MOVED: &str = "moved";

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

pub(super) fn to_millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn from_millis(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs())
}
