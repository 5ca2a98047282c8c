//! What admission changed in a body, for whoever wants to know why.

use std::borrow::Cow;

/// One change to a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// The field's name, safe to print and of bounded length.
    pub field: Cow<'static, str>,
    pub what: FieldChangeKind,
    pub why: FieldChangeReason,
}

/// What was done to a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FieldChangeKind {
    /// It does not go up.
    Dropped,
    /// It goes up with a value of ours instead of the client's.
    Overwritten,
    /// It goes up although the client did not send it.
    Forced,
    /// It goes up with less than was asked for.
    Clamped,
    /// Its value goes up under another name.
    Renamed,
}

/// Why a field was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FieldChangeReason {
    /// The upstream has its own name for the model.
    Alias,
    /// A stream has to report what it used.
    Usage,
    /// No more than this is left to spend.
    Budget,
    /// A rule of the operator's says so.
    Rule,
    /// It stands in no table of ours.
    Unknown,
    /// Who calls is said by us.
    Attribution,
    /// It would change the price.
    Price,
    /// It would change which account, version or beta is used.
    Account,
    /// The beta that it needs does not pass.
    Beta,
    /// It would choose another provider or model.
    Routing,
    /// It is an order to the upstream's gateway, which goes on without it.
    Gateway,
    /// It is a hosted tool that asks for nothing outside, and is not granted.
    Hosted,
    /// The provider may keep nothing.
    Storage,
    /// Its name was written with escapes.
    Spelling,
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
    /// The word for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alias => "alias",
            Self::Usage => "usage",
            Self::Budget => "budget",
            Self::Rule => "rule",
            Self::Unknown => "unknown",
            Self::Attribution => "attribution",
            Self::Price => "price",
            Self::Account => "account",
            Self::Beta => "beta",
            Self::Routing => "routing",
            Self::Gateway => "gateway",
            Self::Hosted => "hosted",
            Self::Storage => "storage",
            Self::Spelling => "spelling",
        }
    }

    /// A sentence's half, for people.
    pub fn description(self) -> &'static str {
        match self {
            Self::Alias => "the upstream has its own name for the model",
            Self::Usage => "a stream has to report what it used",
            Self::Budget => "no more than this is left to spend",
            Self::Rule => "a rule says so",
            Self::Unknown => "it is not a field that is known here",
            Self::Attribution => "who calls is said by the gateway",
            Self::Price => "it would change the price",
            Self::Account => "account, version and betas are chosen by the gateway",
            Self::Beta => "the beta that it needs is not in `policy.headers.anthropic_beta`",
            Self::Routing => "it would choose another provider or model",
            Self::Gateway => "the upstream's gateway takes no orders from a client",
            Self::Hosted => {
                "a hosted tool that asks for nothing outside is not granted, and not needed"
            }
            Self::Storage => "the provider may keep nothing, as `stored_state` is not granted",
            Self::Spelling => "its name was written with escapes",
        }
    }
}
