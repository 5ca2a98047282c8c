//! What kinds of call a grant is for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrantScope {
    /// List agents, and look at its own runs.
    Read,
    /// Begin runs, as chats or otherwise, and end its own.
    Runs,
    /// Report what calls have cost.
    Billing,
    /// Look at everybody's runs, and end them.
    Admin,
}

impl GrantScope {
    /// All kinds, in the order in which they are shown.
    pub const ALL: [Self; 4] = [Self::Read, Self::Runs, Self::Billing, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Runs => "runs",
            Self::Billing => "billing",
            Self::Admin => "admin",
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
        found.ok_or("give read, runs, billing or admin")
    }
}
