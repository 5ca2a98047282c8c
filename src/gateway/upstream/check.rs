//! Whether the upstream can be reached, and accepts our key: asked without a call that costs anything.

use http::StatusCode;

use super::models::{self, list_models};
use super::outage::{FailureCause, KEY_HINT, innermost};
use super::{UpstreamConfig, UpstreamError};

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
pub async fn probe(config: &UpstreamConfig) -> Result<(), ProbeError> {
    match Box::pin(list_models(config)).await {
        Err(models::ModelListError::Upstream(error)) => Err(ProbeError::of(&error)),
        Err(models::ModelListError::Late) => {
            let detail = models::ModelListError::Late.to_string();
            Err(ProbeError::Unreachable { cause: FailureCause::Timeout, detail })
        }
        Err(
            error @ (models::ModelListError::Authorities(_) | models::ModelListError::Headers(_)),
        ) => Err(ProbeError::Unreachable { cause: FailureCause::Other, detail: innermost(&error) }),
        Err(models::ModelListError::Refused(
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN),
        )) => Err(ProbeError::KeyRefused(status.as_u16())),
        Ok(_) | Err(models::ModelListError::Refused(_) | models::ModelListError::Unreadable) => {
            Ok(())
        }
    }
}

impl ProbeError {
    fn of(error: &UpstreamError) -> Self {
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
