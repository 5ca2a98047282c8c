//! The scopes of a grant: the kinds of API calls that the grant allows.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One scope of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrantScope {
    /// List agents, and read the grant's own runs.
    Read,
    /// Begin runs, as chats or otherwise, and cancel the grant's own runs.
    Runs,
    /// Report what calls have cost.
    Billing,
    /// Read and cancel the runs of all grants.
    Admin,
    /// Read the questions about tool calls of all grants, and answer those of other grants; if the grant names agents or
    /// accounts, only those about their runs.
    Approve,
}

impl GrantScope {
    /// Every scope, in the order of display.
    pub const ALL: [Self; 5] = [Self::Read, Self::Runs, Self::Billing, Self::Admin, Self::Approve];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Runs => "runs",
            Self::Billing => "billing",
            Self::Admin => "admin",
            Self::Approve => "approve",
        }
    }
}

impl fmt::Display for GrantScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for GrantScope {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|access| access.as_str() == given);
        found.ok_or("give read, runs, billing, admin or approve")
    }
}
