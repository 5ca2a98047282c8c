//! The errors that refuse a body.

use http::StatusCode;

use super::capability::ProviderCapability;
use super::field::ForbiddenReason;

/// An error that refuses a body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyPolicyError {
    #[error("`model` is missing; name the model")]
    NoModel,
    #[error("`{name}` must be {expected}")]
    InvalidField { name: &'static str, expected: &'static str },
    #[error("`{name}` requests more than {limit} answers; request fewer, or use more calls")]
    TooManyChoices { name: &'static str, limit: u32 },
    #[error(
        "model `{}` is not allowed for this run; use one of `{}`",
        model.escape_debug(),
        allowed.join("`, `")
    )]
    ModelNotAllowed { model: Box<str>, allowed: Vec<String> },
    #[error("`{name}` is not allowed, as it {}; leave it out", why.description())]
    FieldNotAllowed { name: Box<str>, why: ForbiddenReason },
    #[error(
        "`{name}` is not allowed in `extra_body`, where the field would replace a top-level field; move `{name}` to the top level"
    )]
    FieldOnlyAtTopLevel { name: &'static str },
    #[error("field `{name}` is unknown; leave the field out")]
    UnknownField { name: Box<str> },
    #[error(
        "`{field}` needs `{}`{}, which this run has not been granted; its operator can grant it, \
         in `policy.body.capabilities` or `CAPABILITIES`",
        capability.name(),
        detail.as_ref().map(|detail| format!(" (`{detail}`)")).unwrap_or_default()
    )]
    CapabilityNotGranted {
        capability: ProviderCapability,
        field: &'static str,
        /// The tool's type or the key within the field.
        detail: Option<Box<str>>,
    },
}

impl BodyPolicyError {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoModel => "model_required",
            Self::InvalidField { .. } | Self::TooManyChoices { .. } => "invalid_field",
            Self::ModelNotAllowed { .. } => "model_not_allowed",
            Self::FieldNotAllowed { .. } | Self::FieldOnlyAtTopLevel { .. } => "field_not_allowed",
            Self::UnknownField { .. } => "unknown_field",
            Self::CapabilityNotGranted { .. } => "capability_not_granted",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::ModelNotAllowed { .. } | Self::CapabilityNotGranted { .. } => {
                StatusCode::FORBIDDEN
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// Returns the field at fault, for the `param` of OpenAI's error format.
    pub fn field_at_fault(&self) -> &str {
        match self {
            Self::NoModel | Self::ModelNotAllowed { .. } => "model",
            Self::InvalidField { name, .. }
            | Self::TooManyChoices { name, .. }
            | Self::FieldOnlyAtTopLevel { name } => name,
            Self::FieldNotAllowed { name, .. } | Self::UnknownField { name } => name,
            Self::CapabilityNotGranted { field, .. } => field,
        }
    }
}
