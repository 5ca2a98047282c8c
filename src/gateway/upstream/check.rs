//! A free probe of the upstream: can the upstream be reached, and does the upstream accept the gateway's key?

use http::StatusCode;

use super::models::{self, list_models};
use super::outage::{FailureCause, KEY_HINT, innermost};
use super::{UpstreamConfig, UpstreamError};

/// The reason why calls to the upstream would fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeError {
    /// The upstream does not answer. `cause` and `detail` are for the operator.
    Unreachable { cause: FailureCause, detail: String },
    /// The upstream answers that the key is not accepted. The value is the HTTP status.
    KeyRefused(u16),
}

/// Requests the upstream's list of models. An upstream that answers without such a list is reachable, too.
///
/// # Errors
/// Returns an error if the upstream is not reached, or does not accept the key.
pub async fn probe(config: &UpstreamConfig) -> Result<(), ProbeError> {
    match Box::pin(list_models(config)).await {
        Err(models::ModelListError::Upstream(error)) => Err(ProbeError::of(&error)),
        Err(models::ModelListError::Timeout) => {
            let detail = models::ModelListError::Timeout.to_string();
            Err(ProbeError::Unreachable { cause: FailureCause::Timeout, detail })
        }
        // The call was never sent: the local settings cannot be used.
        Err(error @ (models::ModelListError::CaFile(_) | models::ModelListError::Headers(_))) => {
            Err(ProbeError::Unreachable { cause: FailureCause::Other, detail: innermost(&error) })
        }
        // Only these two statuses speak about the key. Any other status still proves that the upstream answers.
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

    /// Returns a message for any reader. The message does not contain the upstream's address.
    pub fn public(&self) -> String {
        match self {
            Self::Unreachable { cause, .. } => format!("upstream_unreachable: {cause}"),
            Self::KeyRefused(status) => {
                format!("upstream_auth: the key is not accepted ({status})")
            }
        }
    }

    /// Returns a message for the operator.
    pub fn found(&self) -> String {
        match self {
            Self::Unreachable { cause, detail } => {
                format!("cannot reach the upstream ({cause}): {detail}")
            }
            Self::KeyRefused(status) => {
                format!("the upstream answers {status}: the key is not accepted")
            }
        }
    }

    /// Returns the advice for the operator.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Unreachable { cause, .. } => cause.hint(),
            Self::KeyRefused(_) => KEY_HINT,
        }
    }
}
