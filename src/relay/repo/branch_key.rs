//! What a run's branch is called.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names the branch of a run: `sandbox/<key>`. Many runs may have the same one, and append to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BranchKey(String);

/// A branch that the relay may move: there is no way to make one that is not below `sandbox/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxBranch(BranchKey);

/// Where a key may come from, in the order in which they are asked. What is empty is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchKeySources<'a> {
    /// Somebody chose it.
    pub explicit: Option<&'a str>,
    /// The work item that the run is about.
    pub work_item: Option<&'a str>,
    /// The key of the agent's state. It outlives the work that a branch is for, so it counts only where that is
    /// asked for.
    pub state: Option<&'a str>,
    pub may_use_state: bool,
}

/// Why a text is no key. It is never made into one: two texts that become the same branch would share it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BranchKeyError {
    #[error(
        "`{0}` cannot name a branch; use 1 to {MAX_KEY_BYTES} letters, digits, `.`, `_` or `-`, and begin with a letter or \
         a digit"
    )]
    Characters(String),
    #[error(
        "`{0}` cannot name a branch; git allows no `..`, no `.` at the end and no `.lock` at the end"
    )]
    Form(String),
    #[error("`{0}` is the run's id, and no two runs could share its branch; name the work instead")]
    Run(String),
}

impl BranchKey {
    /// Checks a text against the rules that hold for every key.
    pub fn parse(text: &str) -> Result<Self, BranchKeyError> {
        let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let begins_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !begins_well || text.len() > MAX_KEY_BYTES || !text.bytes().all(is_inner) {
            return Err(BranchKeyError::Characters(escape_for_message(text)));
        }
        // Git itself forbids `.lock`; on file systems that ignore case the others are the same file.
        let is_lock = text.len() >= 5 && text[text.len() - 5..].eq_ignore_ascii_case(".lock");
        if text.contains("..") || text.ends_with('.') || is_lock {
            return Err(BranchKeyError::Form(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }

    /// The key of a run; `None` where it has none, and so no branch.
    ///
    /// # Errors
    /// The first source that says something says what cannot be a key; the ones after it are not asked, since the
    /// work would end up on a branch that nobody meant.
    pub fn from_sources(
        sources: BranchKeySources<'_>,
        run: &str,
    ) -> Result<Option<Self>, BranchKeyError> {
        let BranchKeySources { explicit, work_item, state, may_use_state } = sources;
        let state = state.filter(|_| may_use_state);
        let given =
            [explicit, work_item, state].into_iter().flatten().find(|text| !text.is_empty());
        let Some(text) = given else { return Ok(None) };
        if text == run {
            return Err(BranchKeyError::Run(escape_for_message(text)));
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

    /// `refs/heads/sandbox/<key>`.
    pub fn to_ref(&self) -> String {
        format!("refs/heads/{self}")
    }
}

impl fmt::Display for BranchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `sandbox/<key>`.
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

/// For messages: whoever sent it chose it.
fn escape_for_message(text: &str) -> String {
    text.chars().take(MAX_KEY_BYTES + 1).flat_map(char::escape_debug).collect()
}

/// Enough for a work item's title, and short enough for a file name beside suffixes.
const MAX_KEY_BYTES: usize = 100;
