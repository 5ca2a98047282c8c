//! The keys that sign run tokens, and the file that contains them.
//!
//! ```text
//! # The first key signs; every key verifies. To rotate the keys: put a new key first, and remove the old key
//! # when the last token that the old key has signed has expired.
//! 2026-11 = 6f1e…  (32 bytes as 64 hexadecimal digits, or as base64)
//! 2026-10 = 90aa…
//! ```

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ring::hmac;

use crate::base::key_bytes::parse_key_bytes;
use crate::base::regular_file::read_secret_file;

/// The keys of run tokens: at least one key, of which the first signs. The tokens are for one named audience, or for no
/// audience.
pub struct RunTokenKeys {
    keys: Vec<RunTokenKey>,
    audience: Option<Box<str>>,
}

/// A key, and the id that tokens name it by.
pub(super) struct RunTokenKey {
    id: Box<str>,
    hmac: hmac::Key,
}

/// The reason why the keys cannot be used. An error never contains a key.
#[derive(Debug, thiserror::Error)]
pub enum RunTokenKeysError {
    #[error("the run token keys in `{}` cannot be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("line {line} of the run token keys is not `id = key`")]
    MalformedLine { line: usize },
    #[error("line {line} of the run token keys: `{id}` is not a key's id; {KEY_ID_RULE}")]
    InvalidId { line: usize, id: String },
    #[error(
        "line {line} of the run token keys: the key `{id}` has {characters} characters; it must be 32 \
         bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes one)"
    )]
    InvalidKey { line: usize, id: String, characters: usize },
    #[error("line {line} of the run token keys: `{id}` occurs twice; give each key its own id")]
    DuplicateId { line: usize, id: String },
    #[error(
        "there are no run token keys; write `id = key`, with 64 hexadecimal digits (`openssl rand -hex 32`)"
    )]
    Empty,
}

impl RunTokenKeys {
    /// Reads the keys from a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or parsed.
    pub fn read_file(path: &Path) -> Result<Self, RunTokenKeysError> {
        let read = read_secret_file(path);
        Self::parse_keys(
            &read.map_err(|source| RunTokenKeysError::Read { path: path.into(), source })?,
        )
    }

    /// Parses lines of the form `id = key`. Empty lines and lines that begin with `#` are ignored.
    ///
    /// # Errors
    /// Returns an error for the first invalid line, or if there is no key.
    pub fn parse_keys(text: &str) -> Result<Self, RunTokenKeysError> {
        let mut keys = Self { keys: vec![], audience: None };
        // The line numbers start at 1, as editors count.
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if !line.is_empty() && !line.starts_with('#') {
                let key = RunTokenKey::parse_line(number, line)?;
                // A second key of the same id would never be found, and its tokens would be rejected without a reason.
                if keys.find_key(&key.id).is_some() {
                    return Err(RunTokenKeysError::DuplicateId { line: number, id: key.id.into() });
                }
                keys.keys.push(key);
            }
        }
        if keys.keys.is_empty() { Err(RunTokenKeysError::Empty) } else { Ok(keys) }
    }

    /// Sets the installation that tokens are for. Keys with an audience make and accept only tokens of that audience.
    /// Keys without an audience make and accept only tokens without one.
    #[must_use]
    pub fn for_audience(self, audience: Option<&str>) -> Self {
        Self { audience: audience.map(Into::into), ..self }
    }

    pub(super) fn audience(&self) -> Option<&str> {
        self.audience.as_deref()
    }

    pub(super) fn signing_key(&self) -> &RunTokenKey {
        // `parse_keys` is the only way to make keys, and it rejects an empty file.
        self.keys.first().expect("there is at least one key")
    }

    pub(super) fn find_key(&self, id: &str) -> Option<&RunTokenKey> {
        self.keys.iter().find(|key| &*key.id == id)
    }

    /// Returns the ids of the keys as a list for messages.
    pub(super) fn format_ids(&self) -> String {
        let ids: Vec<_> = self.keys.iter().map(|key| format!("`{}`", key.id)).collect();
        ids.join(", ")
    }
}

impl RunTokenKey {
    fn parse_line(line: usize, text: &str) -> Result<Self, RunTokenKeysError> {
        let (id, key) = text.split_once('=').ok_or(RunTokenKeysError::MalformedLine { line })?;
        let (id, key) = (id.trim(), key.trim());
        if !is_id(id) {
            return Err(RunTokenKeysError::InvalidId { line, id: id.to_owned() });
        }
        // 64 hexadecimal digits are valid base64, too, so hexadecimal is tried first.
        let bytes = parse_key_bytes(key);
        let bytes = bytes.ok_or_else(|| {
            // The error states the length only. The key itself must not get into a log.
            let characters = key.chars().count();
            RunTokenKeysError::InvalidKey { line, id: id.to_owned(), characters }
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
        // The ids only: a key must not get into debug output.
        f.debug_list().entries(self.keys.iter().map(|key| &key.id)).finish()
    }
}

/// Returns true if a text is a valid key id. An id is between two dots in each token, so it must not contain a dot.
fn is_id(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    (1..=MAX_KEY_ID_BYTES).contains(&id.len()) && id.bytes().all(allowed)
}

/// The rule that [`is_id`] checks, for error messages.
const KEY_ID_RULE: &str = "use 1 to 32 letters, digits, `_` or `-`";
/// The largest length of a key's id, in bytes. The value is our choice.
const MAX_KEY_ID_BYTES: usize = 32;
