//! The key that names a run's branch.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The key of a run's branch `sandbox/<key>`. Several runs may have the same key, and add commits to the same branch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BranchKey(String);

/// A branch that the relay may move. The type has no value that is not below `sandbox/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxBranch(BranchKey);

/// The sources of a key, in the order of their priority. An empty text counts as absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchKeySources<'a> {
    /// The key that the caller chose.
    pub explicit: Option<&'a str>,
    /// The work item that the run is about.
    pub work_item: Option<&'a str>,
    /// The key of the agent's state. The state outlives the work that a branch is for, so this source counts only if
    /// `may_use_state` is true.
    pub state: Option<&'a str>,
    pub may_use_state: bool,
}

/// The reason why a text is not a key. A text is never changed into a key: two texts would then share one branch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BranchKeyError {
    #[error(
        "`{0}` cannot name a branch; use 1 to {MAX_KEY_BYTES} letters, digits, `.`, `_` or `-`, and begin with a letter or \
         a digit"
    )]
    InvalidCharacters(String),
    #[error(
        "`{0}` cannot name a branch; git allows no `..`, no `.` at the end and no `.lock` at the end"
    )]
    NotARefName(String),
    #[error("`{0}` is the run's id, and no two runs could share its branch; name the work instead")]
    RunId(String),
}

impl BranchKey {
    /// Checks a text against the rules for every key.
    pub fn parse(text: &str) -> Result<Self, BranchKeyError> {
        let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        // A first character like `-` would be read as an option, and `.` would hide a directory.
        let begins_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !begins_well || text.len() > MAX_KEY_BYTES || !text.bytes().all(is_inner) {
            return Err(BranchKeyError::InvalidCharacters(escape_for_message(text)));
        }
        // Git itself forbids `.lock`. A file system that ignores case takes the other spellings for the same file.
        let is_lock = text.len() >= 5 && text[text.len() - 5..].eq_ignore_ascii_case(".lock");
        if text.contains("..") || text.ends_with('.') || is_lock {
            return Err(BranchKeyError::NotARefName(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }

    /// Returns the key of a run, or `None` if the run has no key, and so no branch.
    ///
    /// # Errors
    /// Returns an error if the first source that is not empty has no valid key. Later sources are not tried then, since
    /// the work would end up on a branch that the caller did not mean.
    pub fn from_sources(
        sources: BranchKeySources<'_>,
        run: &str,
    ) -> Result<Option<Self>, BranchKeyError> {
        let BranchKeySources { explicit, work_item, state, may_use_state } = sources;
        // The agent's state names a branch only on request.
        let state = state.filter(|_| may_use_state);
        let chosen =
            [explicit, work_item, state].into_iter().flatten().find(|text| !text.is_empty());
        let Some(text) = chosen else { return Ok(None) };
        // A run's own ID is almost always a mistake of the caller: no later run could continue the branch.
        if text == run {
            return Err(BranchKeyError::RunId(escape_for_message(text)));
        }
        Self::parse(text).map(Some)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SandboxBranch {
    pub fn from_key(key: BranchKey) -> Self {
        Self(key)
    }

    pub fn key(&self) -> &BranchKey {
        &self.0
    }

    /// Returns the full ref name, `refs/heads/sandbox/<key>`.
    pub fn to_ref(&self) -> String {
        format!("refs/heads/{self}")
    }
}

impl fmt::Display for BranchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Formats the branch's name, `sandbox/<key>`.
impl fmt::Display for SandboxBranch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sandbox/{}", self.0)
    }
}

impl TryFrom<String> for BranchKey {
    type Error = BranchKeyError;

    fn try_from(text: String) -> Result<Self, BranchKeyError> {
        Self::parse(&text)
    }
}

impl From<BranchKey> for String {
    fn from(key: BranchKey) -> Self {
        key.0
    }
}

/// Escapes and cuts a text for a message, because a client chose the text.
fn escape_for_message(text: &str) -> String {
    text.chars().take(MAX_KEY_BYTES + 1).flat_map(char::escape_debug).collect()
}

/// The longest key in bytes. Enough for a work item's title, and short enough for a file name with suffixes.
const MAX_KEY_BYTES: usize = 100;
