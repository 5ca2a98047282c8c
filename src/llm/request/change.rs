//! The changes that admission made in a body, as records for the audit, for metrics and for
//! `explain`.

use std::borrow::Cow;

/// One change to a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// The field's name, safe to print and of bounded length.
    pub field: Cow<'static, str>,
    pub what: FieldChangeKind,
    pub why: FieldChangeReason,
}

/// The kind of change made to a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FieldChangeKind {
    /// The field is not sent upstream.
    Dropped,
    /// The field is sent upstream with a value that the gateway chose instead of the client's
    /// value.
    Overwritten,
    /// The gateway added the field; the client did not send the field.
    Forced,
    /// The field is sent upstream with a lower value than the client requested.
    Clamped,
    /// The field's value is sent upstream under another name.
    Renamed,
}

/// The reason for a change to a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FieldChangeReason {
    /// The upstream calls the model by another name.
    Alias,
    /// A stream must report its usage.
    Usage,
    /// The remaining budget is no larger.
    Budget,
    /// No model writes so many tokens.
    Excess,
    /// An operator's rule changes the field.
    Rule,
    /// No table of this gateway contains the field.
    Unknown,
    /// The gateway itself states the caller's identity to the upstream.
    Attribution,
    /// The field would change the price.
    Price,
    /// The field would change the account, the version or the beta that the upstream uses.
    Account,
    /// The request does not pass the beta that the field needs.
    Beta,
    /// The field would select another provider or model.
    Routing,
    /// The field is an instruction to the upstream's own gateway. The call works without the field.
    Gateway,
    /// The field is a hosted tool that requests no outside access, and the run's operator has not
    /// granted the tool.
    HostedTool,
    /// The provider must not store anything.
    Storage,
    /// The client wrote the field's name with escapes.
    EscapedName,
}

impl FieldChangeKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dropped => "dropped",
            Self::Overwritten => "overwritten",
            Self::Forced => "forced",
            Self::Clamped => "clamped",
            Self::Renamed => "renamed",
        }
    }
}

impl FieldChangeReason {
    /// Returns the label value for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alias => "alias",
            Self::Usage => "usage",
            Self::Budget => "budget",
            Self::Excess => "excess",
            Self::Rule => "rule",
            Self::Unknown => "unknown",
            Self::Attribution => "attribution",
            Self::Price => "price",
            Self::Account => "account",
            Self::Beta => "beta",
            Self::Routing => "routing",
            Self::Gateway => "gateway",
            Self::HostedTool => "hosted",
            Self::Storage => "storage",
            Self::EscapedName => "spelling",
        }
    }

    /// Returns the reason as a clause for a human reader.
    pub fn description(self) -> &'static str {
        match self {
            Self::Alias => "the upstream has its own name for the model",
            Self::Usage => "a stream must report its usage",
            Self::Budget => "the remaining budget allows no more",
            Self::Excess => "no model writes so many tokens",
            Self::Rule => "an operator's rule requires the change",
            Self::Unknown => "the gateway does not know the field",
            Self::Attribution => "the gateway itself states who calls",
            Self::Price => "the field would change the price",
            Self::Account => "account, version and betas are chosen by the gateway",
            Self::Beta => "the beta that the field needs is not in `policy.headers.anthropic_beta`",
            Self::Routing => "the field would choose another provider or model",
            Self::Gateway => "a client cannot give instructions to the upstream's gateway",
            Self::HostedTool => {
                "a hosted tool without outside access is not granted, and not needed"
            }
            Self::Storage => "the provider may keep nothing, as `stored_state` is not granted",
            Self::EscapedName => "the field's name was written with escapes",
        }
    }
}
