//! Whether the upstream can be reached, and accepts our key: asked without a call that costs anything.

use http::StatusCode;

use super::models::{self, models};
use super::outage::{FailureCause, KEY_HINT, innermost};
use super::{Config, Error};

/// Why calls would fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeError {
    /// No answer comes. With what the operator can know of it.
    Unreachable { cause: FailureCause, detail: String },
    /// The answer says that the key is not accepted.
    KeyRefused(u16),
}

/// Asks an upstream for its models. One that has no list of them is reached all the same.
///
/// # Errors
/// The upstream is not reached, or does not accept the key.
pub async fn probe(config: &Config) -> Result<(), ProbeError> {
    match Box::pin(models(config)).await {
        Err(models::Error::Upstream(error)) => Err(ProbeError::of(&error)),
        Err(models::Error::Late) => {
            let detail = models::Error::Late.to_string();
            Err(ProbeError::Unreachable { cause: FailureCause::Timeout, detail })
        }
        Err(error @ (models::Error::Authorities(_) | models::Error::Headers(_))) => {
            Err(ProbeError::Unreachable { cause: FailureCause::Other, detail: innermost(&error) })
        }
        Err(models::Error::Refused(
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN),
        )) => Err(ProbeError::KeyRefused(status.as_u16())),
        Ok(_) | Err(models::Error::Refused(_) | models::Error::Unreadable) => Ok(()),
    }
}

impl ProbeError {
    fn of(error: &Error) -> Self {
        Self::Unreachable { cause: FailureCause::of(error), detail: innermost(error) }
    }

    /// Says what is wrong to everybody: without where the upstream is.
    pub fn public(&self) -> String {
        match self {
            Self::Unreachable { cause, .. } => format!("upstream_unreachable: {cause}"),
            Self::KeyRefused(status) => {
                format!("upstream_auth: the key is not accepted ({status})")
            }
        }
    }

    /// Says what is wrong to the operator.
    pub fn found(&self) -> String {
        match self {
            Self::Unreachable { cause, detail } => format!("it is not reached ({cause}): {detail}"),
            Self::KeyRefused(status) => format!("it answers {status}: the key is not accepted"),
        }
    }

    /// What the operator can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Unreachable { cause, .. } => cause.hint(),
            Self::KeyRefused(_) => KEY_HINT,
        }
    }
}
