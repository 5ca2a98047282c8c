//! One row: whose work it is, and how far it has come.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::Row;
use rusqlite::types::Type;
use serde::{Deserialize, Serialize};

use crate::delivery::rules::Rules;
use crate::delivery::statement::Facts;
use crate::relay::extract::Announced;
use crate::relay::repository::Repository;
use crate::relay::{Branch, BranchState, Sha, judge};

/// What is to be delivered, and where: all that is known once the work has come out of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub repository: Repository,
    /// Where the branch stood when the run began.
    pub state: BranchState,
    /// What was announced inside the sandbox, and is proved on the way.
    pub announced: Announced,
    pub facts: Facts,
    /// What it is judged by, whoever takes it up; absent in rows of earlier versions, which are judged by what holds then.
    #[serde(default)]
    pub rules: Option<Rules>,
    /// Where what came out lies.
    pub artifacts: PathBuf,
    /// What is to stand on the pull request, if there is to be one.
    #[serde(default)]
    pub pull_request: Option<Words>,
}

/// The agent's words, as they came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Words {
    pub title: String,
    pub body: String,
}

/// One row, as it was when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: String,
    pub order: Order,
    /// Of the last holder of the branch who took this up.
    pub fence: u64,
    pub step: Step,
    pub verdict: Option<Verdict>,
    /// Why it was not simply to be pushed.
    pub reasons: Vec<judge::Reason>,
    /// What is to be pushed.
    pub head: Option<Sha>,
    pub is_pushed: bool,
    pub pull: Option<Pull>,
    pub attempts: u32,
    /// When to try again.
    pub due: SystemTime,
    /// Why it is not further.
    pub error: Option<String>,
    pub created: SystemTime,
}

/// A pull request that was made, or brought up to date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    pub number: u64,
    pub url: String,
}

/// How far a row has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
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
pub enum Verdict {
    Push,
    /// As a draft, or with a word that somebody has to look.
    Review,
    Hold,
}

/// What a step has brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Quarantined { head: Sha },
    Judged(judge::Verdict),
    Pushed,
    PullRequested(Pull),
    Done,
    Held { why: String },
    Failed { why: String },
}

impl Step {
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
    pub fn is_end(self) -> bool {
        matches!(self, Self::Done | Self::Held | Self::Failed)
    }

    /// Whether `next` comes after it.
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (from, Self::Held | Self::Failed) => !from.is_end(),
            (Self::Extracted, Self::Quarantined)
            | (Self::Quarantined, Self::Judged)
            | (Self::Judged, Self::Pushed)
            | (Self::Pushed, Self::PullRequested)
            // Not everybody asks for a pull request.
            | (Self::Pushed | Self::PullRequested, Self::Done) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Verdict {
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
impl From<&judge::Verdict> for Verdict {
    fn from(verdict: &judge::Verdict) -> Self {
        match verdict {
            judge::Verdict::Push => Self::Push,
            judge::Verdict::Review(_) => Self::Review,
            judge::Verdict::Hold(_) => Self::Hold,
        }
    }
}

impl Order {
    pub fn branch(&self) -> &Branch {
        &self.state.branch
    }
}

impl Progress {
    pub(super) fn step(&self) -> Step {
        match self {
            Self::Quarantined { .. } => Step::Quarantined,
            Self::Judged(_) => Step::Judged,
            Self::Pushed => Step::Pushed,
            Self::PullRequested(_) => Step::PullRequested,
            Self::Done => Step::Done,
            Self::Held { .. } => Step::Held,
            Self::Failed { .. } => Step::Failed,
        }
    }

    pub(super) fn apply(self, job: &mut Job) {
        match self {
            Self::Quarantined { head } => job.head = Some(head),
            Self::Judged(verdict) => {
                job.verdict = Some(Verdict::from(&verdict));
                job.reasons = verdict.reasons().to_vec();
            }
            Self::Pushed => job.is_pushed = true,
            Self::PullRequested(pull) => job.pull = Some(pull),
            Self::Done => (),
            Self::Held { why } | Self::Failed { why } => job.error = Some(super::short(&why)),
        }
    }
}

/// What [`read`] reads, in its order.
pub(super) const COLUMNS: &str = "id, \"order\", fence, step, verdict, head, is_pushed, pull_number, pull_url, attempts, \
                                  due, error, created, reasons";

pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Job> {
    let text = |at: usize| row.get::<_, Option<String>>(at);
    let odd =
        |at| move |error: Odd| rusqlite::Error::FromSqlConversionFailure(at, Type::Text, error);
    let order: String = row.get(1)?;
    let step: String = row.get(3)?;
    let number: Option<i64> = row.get(7)?;
    let pull =
        number.zip(text(8)?).map(|(number, url)| Pull { number: number.unsigned_abs(), url });
    Ok(Job {
        id: row.get(0)?,
        order: serde_json::from_str(&order).map_err(|error| odd(1)(error.into()))?,
        fence: row.get::<_, i64>(2)?.unsigned_abs(),
        step: Step::ALL
            .into_iter()
            .find(|one| one.as_str() == step)
            .ok_or("a step")
            .map_err(|error| odd(3)(error.into()))?,
        verdict: text(4)?.as_deref().and_then(Verdict::parse),
        head: text(5)?.and_then(|head| head.parse().ok()),
        is_pushed: row.get(6)?,
        pull,
        attempts: row.get(9)?,
        due: instant(row.get(10)?),
        error: text(11)?,
        created: instant(row.get(12)?),
        // They are for people; another version may say them in another way.
        reasons: serde_json::from_str(&row.get::<_, String>(13)?).unwrap_or_default(),
    })
}

type Odd = Box<dyn std::error::Error + Send + Sync>;

pub(super) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn instant(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs())
}
