//! The open arrays and objects, and the keys of each. The scanner uses them to find a key that an object has twice.
//!
//! A key of up to 15 bytes is stored itself, packed into 128 bits; nearly every key of an LLM request is so short. A
//! longer key is stored as its length and a 64-bit hash, with a random seed for each document. Two long keys of the
//! same length collide with a probability of 2⁻⁶⁴. A collision would refuse a valid request. A duplicate is always
//! found.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use super::{JsonError, JsonType};

/// The largest number of keys that are live at one time, in all open objects together. Our choice. A key is removed
/// when its object ends, so this number limits memory (1 MiB at most) and not the length of a conversation.
pub const MAX_LIVE_KEYS: usize = 16_384;

/// The unescaped key of a member. A key longer than [`JsonKey::MAX_BYTES`] is not stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JsonKey {
    /// The length of the key; `None` for a key longer than [`JsonKey::MAX_BYTES`].
    len: Option<usize>,
    /// The bytes of the key. All bytes from `len` on are zero.
    bytes: [u8; Self::MAX_BYTES],
}

/// The open arrays and objects, with the outermost first, and their keys.
#[derive(Default)]
pub(super) struct JsonKeyStack {
    /// The last key, or the part of it that has been read. After the key, the beginning of its text value takes this
    /// place.
    pub(super) name: JsonKeyBuffer,
    /// The offset of the opening quote of the last key.
    pub(super) at: u64,
    open: Vec<OpenJsonContainer>,
    /// The keys of objects with at most [`LINEAR_SEARCH_MAX`] keys. Each object owns a range, and the innermost object
    /// owns the last range.
    few: Vec<KeyFingerprint>,
    /// The keys of objects with more than [`LINEAR_SEARCH_MAX`] keys, with the depth of each object.
    many: Vec<(usize, HashSet<KeyFingerprint>)>,
    live: usize,
}

struct OpenJsonContainer {
    kind: JsonType,
    /// The index in [`JsonKeyStack::few`] of the container's first key.
    first: usize,
}

/// A buffer for a key, which receives the bytes as they arrive.
pub(super) struct JsonKeyBuffer {
    /// A whole short key, or the current block of a long key.
    block: [u8; JsonKey::MAX_BYTES],
    filled: usize,
    len: u64,
    /// The hash of the earlier blocks of a long key. It receives whole blocks only, because a hasher may return another
    /// hash for the same bytes if they come in other pieces.
    hasher: Option<DefaultHasher>,
    seed: RandomState,
}

/// A short key itself, or the length and hash of a long key. Equal keys have equal fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct KeyFingerprint {
    head: u64,
    /// The top byte is the length of the key; it is 255 for a long key.
    tail: u64,
}

impl JsonKey {
    /// The largest length of a stored key, in bytes. Our choice: no field of an LLM protocol, LiteLLM's included, has a
    /// longer name.
    pub const MAX_BYTES: usize = 64;

    /// Stores a key of at most [`JsonKey::MAX_BYTES`] bytes.
    pub(super) fn from_short(key: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..key.len()].copy_from_slice(key);
        Self { len: Some(key.len()), bytes }
    }

    /// Returns the key; `None` if it is longer than [`JsonKey::MAX_BYTES`].
    pub fn as_str(&self) -> Option<&str> {
        str::from_utf8(self.as_bytes()?).ok()
    }

    /// Returns the bytes of the key; `None` if it is longer than [`JsonKey::MAX_BYTES`].
    pub fn as_bytes(&self) -> Option<&[u8]> {
        self.bytes.get(..self.len?)
    }
}

impl JsonKeyStack {
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    /// Returns the type of the innermost container.
    pub(super) fn innermost_type(&self) -> Option<JsonType> {
        self.open.last().map(|open| open.kind)
    }

    pub(super) fn open_container(&mut self, kind: JsonType) {
        self.open.push(OpenJsonContainer { kind, first: self.few.len() });
    }

    /// Removes the innermost array or object and its keys.
    pub(super) fn close_container(&mut self) {
        let depth = self.depth();
        let Some(OpenJsonContainer { first, .. }) = self.open.pop() else { return };
        // The innermost object owns the end of `few`, so its keys go with one cut. The hash table is on top only if it is the
        // object's own.
        self.live -= self.few.len() - first;
        self.few.truncate(first);
        if let Some((_, keys)) = self.many.pop_if(|(owner, _)| *owner == depth) {
            self.live -= keys.len();
        }
    }

    pub(super) fn begin_key(&mut self, at: u64) {
        self.at = at;
        self.name.clear_buffer();
    }

    /// Adds the key that was just read to the innermost object.
    pub(super) fn end_key(&mut self) -> Result<(), JsonError> {
        let key = self.name.fingerprint();
        if !self.insert_key(key) {
            let key = self.name.to_key().as_str().unwrap_or("…").into();
            return Err(JsonError::DuplicateKey { at: self.at, key });
        }
        self.live += 1;
        if self.live > MAX_LIVE_KEYS {
            return Err(JsonError::TooManyKeys { at: self.at, limit: MAX_LIVE_KEYS });
        }
        Ok(())
    }

    /// Adds a key to the innermost object. Returns false if the object has the key already.
    fn insert_key(&mut self, key: KeyFingerprint) -> bool {
        let depth = self.depth();
        // An object with many keys owns a hash table. Its keys are no longer in `few`.
        if let Some((_, keys)) = self.many.last_mut().filter(|(owner, _)| *owner == depth) {
            return keys.insert(key);
        }
        let first = self.open.last().map_or(0, |open| open.first);
        if self.few[first..].contains(&key) {
            return false;
        }
        self.few.push(key);
        // The object has too many keys for a linear search now, so they move to a hash table.
        if self.few.len() - first > LINEAR_SEARCH_MAX {
            self.many.push((depth, self.few.drain(first..).collect()));
        }
        true
    }
}

impl JsonKeyBuffer {
    pub(super) fn clear_buffer(&mut self) {
        self.filled = 0;
        self.len = 0;
        self.hasher = None;
    }

    /// Removes the first bytes of a text that fits in one block. A longer text stays as it is.
    pub(super) fn drop_prefix(&mut self, bytes: usize) {
        if self.hasher.is_none() {
            self.block.copy_within(bytes..self.filled, 0);
            self.filled -= bytes;
            self.len -= bytes as u64;
        }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            // The block is full and more bytes follow, so the key is long: hash the block and reuse it.
            if self.filled == self.block.len() {
                self.hasher.get_or_insert_with(|| self.seed.build_hasher()).write(&self.block);
                self.filled = 0;
            }
            let room = bytes.len().min(self.block.len() - self.filled);
            self.block[self.filled..][..room].copy_from_slice(&bytes[..room]);
            self.filled += room;
            bytes = &bytes[room..];
        }
    }

    pub(super) fn to_key(&self) -> JsonKey {
        let mut key = JsonKey { len: None, bytes: [0; JsonKey::MAX_BYTES] };
        if self.hasher.is_none() {
            key.len = Some(self.filled);
            key.bytes[..self.filled].copy_from_slice(self.filled_block());
        }
        key
    }

    /// Returns the length of the unescaped key.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the whole key; `None` if the key is longer than [`JsonKey::MAX_BYTES`].
    pub(super) fn as_bytes(&self) -> Option<&[u8]> {
        self.hasher.is_none().then(|| self.filled_block())
    }

    fn fingerprint(&self) -> KeyFingerprint {
        // A short key is its own fingerprint, which cannot collide.
        if self.hasher.is_none() && self.filled <= KeyFingerprint::MAX_INLINE_BYTES {
            return KeyFingerprint::of_short(self.filled_block());
        }
        // The seed is random, so a client cannot choose two long keys with one hash. The length keeps short and long apart.
        let mut hasher = self.hasher.clone().unwrap_or_else(|| self.seed.build_hasher());
        hasher.write(self.filled_block());
        KeyFingerprint { head: hasher.finish(), tail: 0xff << 56 | self.len }
    }

    fn filled_block(&self) -> &[u8] {
        &self.block[..self.filled]
    }
}

impl KeyFingerprint {
    /// The largest length of a key that is stored itself, in bytes. One of the 16 bytes is the length.
    const MAX_INLINE_BYTES: usize = 15;

    /// Packs a key of at most 15 bytes. The key's first and last bytes are read as two integers, which may overlap in
    /// the middle, so no loop and no copy is needed.
    fn of_short(key: &[u8]) -> Self {
        let (head, tail) = if let Some((first, last)) = first_and_last::<8>(key) {
            (u64::from_le_bytes(*first), u64::from_le_bytes(*last) >> 8)
        } else if let Some((first, last)) = first_and_last::<4>(key) {
            (u32::from_le_bytes(*first).into(), u32::from_le_bytes(*last).into())
        } else {
            let byte = |at: usize| key.get(at).copied().unwrap_or_default();
            (u32::from_le_bytes([byte(0), byte(1), byte(2), 0]).into(), 0)
        };
        Self { head, tail: (key.len() as u64) << 56 | tail }
    }
}

fn first_and_last<const N: usize>(key: &[u8]) -> Option<(&[u8; N], &[u8; N])> {
    key.first_chunk().zip(key.last_chunk())
}

impl Default for JsonKey {
    fn default() -> Self {
        Self { len: Some(0), bytes: [0; Self::MAX_BYTES] }
    }
}

impl Default for JsonKeyBuffer {
    fn default() -> Self {
        Self {
            block: [0; JsonKey::MAX_BYTES],
            filled: 0,
            len: 0,
            hasher: None,
            seed: RandomState::new(),
        }
    }
}

impl PartialEq<str> for JsonKey {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == Some(other)
    }
}

impl fmt::Debug for JsonKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str().unwrap_or("…"))
    }
}

/// The largest number of keys of one object that are compared one by one. Our choice: a linear search is faster than a
/// hash table for so few keys.
const LINEAR_SEARCH_MAX: usize = 32;
