//! Why a row goes no further now, and what becomes of it.

use std::time::Duration;

use super::Error;
use super::outbox::{self, Job, MOVED, OBJECTS, Outbox, Progress};
use crate::forge::github;
use crate::relay;
use crate::relay::quarantine::Refusal;

/// An end, or a pause.
#[derive(Debug)]
pub(super) enum Stop {
    /// People have to look at the work.
    Held { code: &'static str, why: String },
    /// It will not work, until somebody changes something and asks again.
    Failed { why: String },
    /// It may work later by itself.
    Later { after: Duration, why: String },
    /// A credential is not known here that must not be in the work. It waits for whoever knows it.
    Ignorant { name: String },
    /// Nothing can be written down.
    Outbox(outbox::Error),
}

impl Stop {
    pub(super) fn held(code: &'static str, why: String) -> Self {
        Self::Held { code, why }
    }

    pub(super) fn failed(why: &str) -> Self {
        Self::Failed { why: why.to_owned() }
    }

    fn later(why: String) -> Self {
        Self::Later { after: Duration::ZERO, why }
    }

    /// Writes it down, and returns what the row is then: what has been tried often enough is at its end.
    pub(super) fn write(self, outbox: &Outbox, job: &Job) -> Result<Job, Error> {
        Ok(match self {
            Self::Held { code, why } => outbox.advance(job, Progress::Held { code, why })?,
            // Whoever comes before its time has not waited for anything to be better.
            Self::Later { after, why } if !job.is_due() => outbox.put_off(job, after, &why)?,
            Self::Later { after, why } => match wait_after(job.attempts) {
                Some(wait) => outbox.postpone(job, after.max(wait), &why)?,
                None => outbox.advance(job, Progress::Failed { why })?,
            },
            Self::Ignorant { name } => {
                outbox.put_off(job, WAIT, &Error::Ignorant { name }.to_string())?
            }
            Self::Failed { why } => outbox.advance(job, Progress::Failed { why })?,
            Self::Outbox(error) => return Err(error.into()),
        })
    }
}

/// How long to wait before the next attempt after so many; none where it was tried often enough.
pub fn wait_after(attempts: u32) -> Option<Duration> {
    let wait = WAIT.saturating_mul(1 << attempts.min(10)).min(LONGEST);
    (attempts < ATTEMPTS).then_some(wait)
}

impl From<relay::Error> for Stop {
    fn from(error: relay::Error) -> Self {
        use relay::Error as E;
        let why = error.to_string();
        match error {
            E::Unreachable { .. } | E::Busy { .. } | E::Disk { .. } | E::Costly { .. } => {
                Self::later(why)
            }
            E::Git(error) if error.is_passing() => Self::later(why),
            // Somebody else is at the ref, for a moment.
            E::Declined { why: said } if is_passing(&said) => Self::later(why),
            E::Moved { .. } => Self::held(MOVED, why),
            E::Declined { .. } => Self::held("declined", why),
            E::Refused(Refusal::Objects(_)) => Self::held(OBJECTS, why),
            E::Refused(_) | E::Bundle(_) | E::Unlike { .. } | E::TooMuch { .. } => {
                Self::held("refused", why)
            }
            _ => Self::Failed { why },
        }
    }
}

impl From<github::Error> for Stop {
    fn from(error: github::Error) -> Self {
        let why = error.to_string();
        match error.later() {
            Some(after) => Self::Later { after, why },
            None => Self::Failed { why },
        }
    }
}

impl From<outbox::Error> for Stop {
    fn from(error: outbox::Error) -> Self {
        Self::Outbox(error)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error {
            Error::Outbox(error) => error.into(),
            Error::Relay(error) => error.into(),
            Error::GitHub(error) => error.into(),
            Error::Ignorant { name } => Self::Ignorant { name },
            error @ (Error::Overtaken { .. }
            | Error::Waiting { .. }
            | Error::OnItsWay
            | Error::Audit(_)
            | Error::Ended(_)
            | Error::Rules(_)) => Self::Failed { why: error.to_string() },
        }
    }
}

impl From<tokio::task::JoinError> for Stop {
    fn from(error: tokio::task::JoinError) -> Self {
        Self::Failed { why: error.to_string() }
    }
}

/// Another is at the ref; or has a branch where this one would be a directory, which does not pass.
fn is_passing(said: &str) -> bool {
    said.contains("cannot lock ref") && !said.contains("' exists; cannot create")
}

/// So often it is tried again: some two days, at the longest wait.
const ATTEMPTS: u32 = 50;

/// The first wait for what may be better later; it doubles.
const WAIT: Duration = Duration::from_secs(30);

const LONGEST: Duration = Duration::from_hours(1);
