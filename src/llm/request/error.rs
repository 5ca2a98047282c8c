//! The errors that refuse a body.

use http::StatusCode;

use super::capability::ProviderCapability;

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

/// The reason why a field is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForbiddenReason {
    /// The field would choose the upstream, its credentials or the data sent with the call.
    Upstream,
    /// The field would select another model than the allowed one.
    Routing,
    /// The field would turn one call into many calls or a long one.
    Retry,
    /// The field would change the recorded cost of the call.
    Price,
    /// The field would keep the call out of the records, or send the records elsewhere.
    Record,
    /// The field would change how the upstream's gateway works.
    Gateway,
}

impl ForbiddenReason {
    /// Returns the effect that the field would have, as a clause to follow "it".
    pub fn description(self) -> &'static str {
        match self {
            Self::Upstream => "would choose the upstream or its credentials",
            Self::Routing => "would choose other models than the one that is allowed",
            Self::Retry => "would make one call many or endless",
            Self::Price => "would change what the call is said to cost",
            Self::Record => "would change what is recorded of the call",
            Self::Gateway => "is an order to the upstream's gateway",
        }
    }
}
