//! The keys that sign run tokens, and the file they stand in.
//!
//! ```text
//! # The first key signs; every key verifies. To rotate: put a new one first, and take the old one out
//! # when the last token that it has signed has expired.
//! 2026-11 = 6f1e…  (32 bytes as 64 hexadecimal digits, or as base64)
//! 2026-10 = 90aa…
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ring::hmac;

use crate::base::{b64, hex};

/// At least one key; the first signs. Tokens are for one audience, or for nobody by name.
pub struct RunTokenKeys {
    keys: Vec<RunTokenKey>,
    audience: Option<Box<str>>,
}

/// A key and the name that tokens call it by.
pub(super) struct RunTokenKey {
    id: Box<str>,
    hmac: hmac::Key,
}

/// Why there are no keys. A key itself is never shown.
#[derive(Debug, thiserror::Error)]
pub enum RunTokenKeysError {
    #[error("the run token keys in `{}` cannot be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("line {line} of the run token keys is not `id = key`")]
    Form { line: usize },
    #[error("line {line} of the run token keys: `{id}` is not a key's id; {KEY_ID_RULE}")]
    Id { line: usize, id: String },
    #[error(
        "line {line} of the run token keys: the key `{id}` has {characters} characters; it must be 32 \
         bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes one)"
    )]
    Key { line: usize, id: String, characters: usize },
    #[error("line {line} of the run token keys: `{id}` is there already; give each key its own id")]
    Twice { line: usize, id: String },
    #[error(
        "there are no run token keys; write `id = key`, with 64 hexadecimal digits (`openssl rand -hex 32`)"
    )]
    Empty,
}

impl RunTokenKeys {
    /// # Errors
    /// The file cannot be read or understood.
    pub fn read_file(path: &Path) -> Result<Self, RunTokenKeysError> {
        let read = fs::read_to_string(path);
        Self::parse_keys(
            &read.map_err(|source| RunTokenKeysError::Read { path: path.into(), source })?,
        )
    }

    /// Reads lines of `id = key`; empty lines and those that begin with `#` say nothing.
    ///
    /// # Errors
    /// The first line that is wrong.
    pub fn parse_keys(text: &str) -> Result<Self, RunTokenKeysError> {
        let mut keys = Self { keys: vec![], audience: None };
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if !line.is_empty() && !line.starts_with('#') {
                let key = RunTokenKey::parse_line(number, line)?;
                if keys.find_key(&key.id).is_some() {
                    return Err(RunTokenKeysError::Twice { line: number, id: key.id.into() });
                }
                keys.keys.push(key);
            }
        }
        if keys.keys.is_empty() { Err(RunTokenKeysError::Empty) } else { Ok(keys) }
    }

    /// Names the installation that tokens are for. Keys with a name make and take tokens of that name only, and keys without
    /// a name those without.
    #[must_use]
    pub fn for_audience(self, audience: Option<&str>) -> Self {
        Self { audience: audience.map(Into::into), ..self }
    }

    pub(super) fn audience(&self) -> Option<&str> {
        self.audience.as_deref()
    }

    pub(super) fn signing_key(&self) -> &RunTokenKey {
        self.keys.first().expect("there is at least one key")
    }

    pub(super) fn find_key(&self, id: &str) -> Option<&RunTokenKey> {
        self.keys.iter().find(|key| &*key.id == id)
    }

    /// The ids, as a list to read.
    pub(super) fn format_ids(&self) -> String {
        let ids: Vec<_> = self.keys.iter().map(|key| format!("`{}`", key.id)).collect();
        ids.join(", ")
    }
}

impl RunTokenKey {
    fn parse_line(line: usize, text: &str) -> Result<Self, RunTokenKeysError> {
        let (id, key) = text.split_once('=').ok_or(RunTokenKeysError::Form { line })?;
        let (id, key) = (id.trim(), key.trim());
        if !is_id(id) {
            return Err(RunTokenKeysError::Id { line, id: id.to_owned() });
        }
        let bytes: Option<[u8; 32]> = hex::decode_hex(key).or_else(|| b64::decode_any_base64(key));
        let bytes = bytes.ok_or_else(|| {
            let characters = key.chars().count();
            RunTokenKeysError::Key { line, id: id.to_owned(), characters }
        })?;
        Ok(Self { id: id.into(), hmac: hmac::Key::new(hmac::HMAC_SHA256, &bytes) })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn hmac(&self) -> &hmac::Key {
        &self.hmac
    }
}

impl fmt::Debug for RunTokenKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.id)).finish()
    }
}

/// An id stands in each token between two dots.
fn is_id(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    (1..=MAX_KEY_ID_BYTES).contains(&id.len()) && id.bytes().all(allowed)
}

const KEY_ID_RULE: &str = "use 1 to 32 letters, digits, `_` or `-`";
const MAX_KEY_ID_BYTES: usize = 32;
