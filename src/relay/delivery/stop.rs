//! The reasons why a row goes no further now, and the row's state that follows from each.

use std::time::Duration;

use super::DeliveryError;
use super::outbox::{self, CODE_MOVED, CODE_OBJECTS, DeliveryJob, DeliveryOutbox, StepOutcome};
use crate::relay::github::client::GithubError;
use crate::relay::repo;
use crate::relay::repo::quarantine::QuarantineError;

/// The reason why a row's steps stop: for good, or until a later attempt.
#[derive(Debug)]
pub(super) enum StepStop {
    /// A person has to look at the work.
    Held { code: &'static str, why: String },
    /// The delivery cannot succeed until a person changes something and retries.
    Failed { why: String },
    /// The delivery may succeed later without any change.
    RetryLater { after: Duration, why: String },
    /// A secret that the work must not contain is not set on this host. The row waits for a process that has the
    /// secret.
    UnknownSecret { name: String },
    /// The outbox cannot be written.
    Outbox(outbox::OutboxError),
}

impl StepStop {
    pub(super) fn held(code: &'static str, why: String) -> Self {
        Self::Held { code, why }
    }

    pub(super) fn failed(why: &str) -> Self {
        Self::Failed { why: why.to_owned() }
    }

    /// Makes a stop whose wait depends only on the number of attempts.
    fn retry_later(why: String) -> Self {
        Self::RetryLater { after: Duration::ZERO, why }
    }

    /// Stores the stop in the row, and returns the changed row. A row that has used up its attempts fails.
    pub(super) fn persist(
        self,
        outbox: &DeliveryOutbox,
        job: &DeliveryJob,
    ) -> Result<DeliveryJob, DeliveryError> {
        Ok(match self {
            Self::Held { code, why } => outbox.advance_job(job, StepOutcome::Held { code, why })?,
            // An attempt before the due time, such as an operator's, does not count: the cause had no time to pass.
            Self::RetryLater { after, why } if !job.is_due() => {
                outbox.reschedule(job, after, &why)?
            }
            Self::RetryLater { after, why } => match retry_delay(job.attempts) {
                // The remote may ask for a longer wait than ours, and gets it.
                Some(wait) => outbox.reschedule_after_failure(job, after.max(wait), &why)?,
                None => outbox.advance_job(job, StepOutcome::Failed { why })?,
            },
            // Not an attempt: no number of attempts helps until the secret is set. So such a row never fails by itself.
            Self::UnknownSecret { name } => outbox.reschedule(
                job,
                MIN_RETRY_DELAY,
                &DeliveryError::UnknownSecret { name }.to_string(),
            )?,
            Self::Failed { why } => outbox.advance_job(job, StepOutcome::Failed { why })?,
            Self::Outbox(error) => return Err(error.into()),
        })
    }
}

/// Returns the wait before the next attempt, after `attempts` attempts. Returns `None` after `MAX_ATTEMPTS`.
pub fn retry_delay(attempts: u32) -> Option<Duration> {
    // The exponent is bounded, so that the shift cannot overflow. The maximum applies long before.
    let wait = MIN_RETRY_DELAY.saturating_mul(1 << attempts.min(10)).min(MAX_RETRY_DELAY);
    (attempts < MAX_ATTEMPTS).then_some(wait)
}

impl From<repo::RepoError> for StepStop {
    fn from(error: repo::RepoError) -> Self {
        use repo::RepoError as E;
        let why = error.to_string();
        match error {
            E::Unreachable { .. }
            | E::BranchInUse { .. }
            | E::Io { .. }
            | E::FetchLimitExceeded { .. }
            | E::PushLimitExceeded { .. } => Self::retry_later(why),
            E::Git(error) if error.is_transient() => Self::retry_later(why),
            // Another process updates the ref at this moment.
            E::RemoteRejected { why: reason } if is_transient(&reason) => Self::retry_later(why),
            E::BranchMoved { .. } => Self::held(CODE_MOVED, why),
            E::RemoteRejected { .. } => Self::held("declined", why),
            E::QuarantineRefused(QuarantineError::InvalidObjects(_)) => {
                Self::held(CODE_OBJECTS, why)
            }
            E::QuarantineRefused(_)
            | E::Bundle(_)
            | E::AnnouncementMismatch { .. }
            | E::TooLarge { .. } => Self::held("refused", why),
            _ => Self::Failed { why },
        }
    }
}

impl From<GithubError> for StepStop {
    fn from(error: GithubError) -> Self {
        let why = error.to_string();
        match error.retry_after() {
            Some(after) => Self::RetryLater { after, why },
            None => Self::Failed { why },
        }
    }
}

impl From<outbox::OutboxError> for StepStop {
    fn from(error: outbox::OutboxError) -> Self {
        Self::Outbox(error)
    }
}

impl From<DeliveryError> for StepStop {
    fn from(error: DeliveryError) -> Self {
        match error {
            DeliveryError::Outbox(error) => error.into(),
            DeliveryError::Relay(error) => error.into(),
            DeliveryError::GitHub(error) => error.into(),
            DeliveryError::UnknownSecret { name } => Self::UnknownSecret { name },
            error @ (DeliveryError::BranchAdvanced { .. }
            | DeliveryError::Waiting { .. }
            | DeliveryError::InProgress
            | DeliveryError::Cancelled
            | DeliveryError::Audit(_)
            | DeliveryError::TaskFailed(_)
            | DeliveryError::Rules(_)) => Self::Failed { why: error.to_string() },
        }
    }
}

impl From<tokio::task::JoinError> for StepStop {
    fn from(error: tokio::task::JoinError) -> Self {
        Self::Failed { why: error.to_string() }
    }
}

/// Returns true if git's message says that another process has locked the ref. A message that a branch is in the way,
/// because the new ref would need a directory of its name, does not pass with time.
fn is_transient(reason: &str) -> bool {
    reason.contains("cannot lock ref") && !reason.contains("' exists; cannot create")
}

/// The number of attempts before a row fails: some two days, because most waits are the longest. Our choice.
const MAX_ATTEMPTS: u32 = 50;

/// The first wait after a failure that may pass. The wait doubles with each attempt.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The longest wait between two attempts. Our choice.
const MAX_RETRY_DELAY: Duration = Duration::from_hours(1);
