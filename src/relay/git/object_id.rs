//! The name of a git object.

use std::fmt;
use std::str::FromStr;

use hex::FromHex;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use serde::{Deserialize, Serialize};

/// A SHA-1 name. The mirror refuses repositories that use another hash when it opens them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectId([u8; 20]);

/// An error for a text that is not 40 hexadecimal digits.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an object's name has 40 hexadecimal digits")]
pub struct ObjectIdError;

impl ObjectId {
    /// The name that git prints in place of a missing object: 40 zeros.
    pub const NONE: Self = Self([0; 20]);

    /// Parses exactly 40 lower-case digits, as git prints them.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = str::from_utf8(text).ok()?;
        let is_lower = !text.bytes().any(|byte| byte.is_ascii_uppercase());
        <[u8; 20]>::from_hex(text).ok().filter(|_| is_lower).map(Self)
    }

    /// Returns the name that git gives to an object of this kind and content.
    pub fn hash_object(kind: &str, content: &[u8]) -> Self {
        let mut object = format!("{kind} {}\0", content.len()).into_bytes();
        object.extend_from_slice(content);
        let mut name = [0; 20];
        name.copy_from_slice(digest(&SHA1_FOR_LEGACY_USE_ONLY, &object).as_ref());
        Self(name)
    }
}

impl FromStr for ObjectId {
    type Err = ObjectIdError;

    fn from_str(text: &str) -> Result<Self, ObjectIdError> {
        Self::parse(text.as_bytes()).ok_or(ObjectIdError)
    }
}

impl TryFrom<String> for ObjectId {
    type Error = ObjectIdError;

    fn try_from(text: String) -> Result<Self, ObjectIdError> {
        text.parse()
    }
}

impl From<ObjectId> for String {
    fn from(sha: ObjectId) -> Self {
        sha.to_string()
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
