//! Why a row goes no further now, and what becomes of it.

use std::time::Duration;

use super::DeliveryError;
use super::outbox::{self, CODE_MOVED, CODE_OBJECTS, DeliveryJob, DeliveryOutbox, StepOutcome};
use crate::relay::github::client::GithubError;
use crate::relay::repo;
use crate::relay::repo::quarantine::QuarantineError;

/// An end, or a pause.
#[derive(Debug)]
pub(super) enum StepStop {
    /// People have to look at the work.
    Held { code: &'static str, why: String },
    /// It will not work, until somebody changes something and asks again.
    Failed { why: String },
    /// It may work later by itself.
    Later { after: Duration, why: String },
    /// A credential is not known here that must not be in the work. It waits for whoever knows it.
    Ignorant { name: String },
    /// Nothing can be written down.
    Outbox(outbox::OutboxError),
}

impl StepStop {
    pub(super) fn held(code: &'static str, why: String) -> Self {
        Self::Held { code, why }
    }

    pub(super) fn failed(why: &str) -> Self {
        Self::Failed { why: why.to_owned() }
    }

    fn retry_later(why: String) -> Self {
        Self::Later { after: Duration::ZERO, why }
    }

    /// Writes it down, and returns what the row is then: what has been tried often enough is at its end.
    pub(super) fn persist(
        self,
        outbox: &DeliveryOutbox,
        job: &DeliveryJob,
    ) -> Result<DeliveryJob, DeliveryError> {
        Ok(match self {
            Self::Held { code, why } => outbox.advance_job(job, StepOutcome::Held { code, why })?,
            // Whoever comes before its time has not waited for anything to be better.
            Self::Later { after, why } if !job.is_due() => outbox.reschedule(job, after, &why)?,
            Self::Later { after, why } => match retry_delay(job.attempts) {
                Some(wait) => outbox.reschedule_after_failure(job, after.max(wait), &why)?,
                None => outbox.advance_job(job, StepOutcome::Failed { why })?,
            },
            Self::Ignorant { name } => outbox.reschedule(
                job,
                MIN_RETRY_DELAY,
                &DeliveryError::Ignorant { name }.to_string(),
            )?,
            Self::Failed { why } => outbox.advance_job(job, StepOutcome::Failed { why })?,
            Self::Outbox(error) => return Err(error.into()),
        })
    }
}

/// How long to wait before the next attempt after so many; none where it was tried often enough.
pub fn retry_delay(attempts: u32) -> Option<Duration> {
    let wait = MIN_RETRY_DELAY.saturating_mul(1 << attempts.min(10)).min(MAX_RETRY_DELAY);
    (attempts < MAX_ATTEMPTS).then_some(wait)
}

impl From<repo::RepoError> for StepStop {
    fn from(error: repo::RepoError) -> Self {
        use repo::RepoError as E;
        let why = error.to_string();
        match error {
            E::Unreachable { .. } | E::Busy { .. } | E::Disk { .. } | E::Costly { .. } => {
                Self::retry_later(why)
            }
            E::Git(error) if error.is_transient() => Self::retry_later(why),
            // Somebody else is at the ref, for a moment.
            E::Declined { why: said } if is_transient(&said) => Self::retry_later(why),
            E::Moved { .. } => Self::held(CODE_MOVED, why),
            E::Declined { .. } => Self::held("declined", why),
            E::Refused(QuarantineError::Objects(_)) => Self::held(CODE_OBJECTS, why),
            E::Refused(_) | E::Bundle(_) | E::Unlike { .. } | E::TooMuch { .. } => {
                Self::held("refused", why)
            }
            _ => Self::Failed { why },
        }
    }
}

impl From<GithubError> for StepStop {
    fn from(error: GithubError) -> Self {
        let why = error.to_string();
        match error.retry_after() {
            Some(after) => Self::Later { after, why },
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
            DeliveryError::Ignorant { name } => Self::Ignorant { name },
            error @ (DeliveryError::Overtaken { .. }
            | DeliveryError::Waiting { .. }
            | DeliveryError::OnItsWay
            | DeliveryError::Audit(_)
            | DeliveryError::Ended(_)
            | DeliveryError::Rules(_)) => Self::Failed { why: error.to_string() },
        }
    }
}

impl From<tokio::task::JoinError> for StepStop {
    fn from(error: tokio::task::JoinError) -> Self {
        Self::Failed { why: error.to_string() }
    }
}

/// Another is at the ref; or has a branch where this one would be a directory, which does not pass.
fn is_transient(said: &str) -> bool {
    said.contains("cannot lock ref") && !said.contains("' exists; cannot create")
}

/// So often it is tried again: some two days, at the longest wait.
const MAX_ATTEMPTS: u32 = 50;

/// The first wait for what may be better later; it doubles.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(30);

const MAX_RETRY_DELAY: Duration = Duration::from_hours(1);
