//! Patterns of a grant: one name, or all names with a common beginning.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name, or a beginning of names if the pattern ends with `*`.
///
/// ```
/// # use cogni_gateway::service::auth::GrantPattern;
/// let ours: GrantPattern = "https://github.com/acme/*".parse().unwrap();
/// assert!(ours.matches("https://github.com/acme/site"));
/// assert!(!ours.matches("https://github.com/acme-evil/site"));
/// assert!("sandbox:agent".parse::<GrantPattern>().unwrap().matches("sandbox:agent"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GrantPattern(String);

impl GrantPattern {
    pub fn matches(&self, text: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(beginning) => text.starts_with(beginning),
            None => text == self.0,
        }
    }

    /// Returns the pattern's only name; `None` if the pattern matches many names.
    pub fn exact_text(&self) -> Option<&str> {
        (!self.0.ends_with('*')).then_some(&*self.0)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GrantPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for GrantPattern {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        // Only one `*`, and only at the end: a `*` in the middle would look like a glob and match literally.
        let inner = given.strip_suffix('*').unwrap_or(given);
        let is_plain = inner.chars().all(|c| c.is_ascii_graphic() && c != '*');
        if given.is_empty() || !is_plain || given.len() > MAX_PATTERN_BYTES {
            return Err("give a name, or the beginning of names and a `*`");
        }
        Ok(Self(given.to_owned()))
    }
}

impl TryFrom<String> for GrantPattern {
    type Error = &'static str;

    fn try_from(given: String) -> Result<Self, Self::Error> {
        given.parse()
    }
}

impl From<GrantPattern> for String {
    fn from(pattern: GrantPattern) -> Self {
        pattern.0
    }
}

/// The maximum length of a pattern, in bytes. Our choice: longer than any URL of a repository that is in use.
const MAX_PATTERN_BYTES: usize = 512;
