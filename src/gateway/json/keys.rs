//! The open arrays and objects, and the keys seen in each, so that none is taken twice.
//!
//! A key of up to 15 bytes is remembered as itself, packed into 128 bits; that is nearly every key
//! of an LLM request. A longer one is remembered by its length and a 64-bit hash, seeded at random
//! for each document. Two long keys of one length collide with a probability of 2⁻⁶⁴, which would
//! refuse a good request; a duplicate is never missed.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use super::{Invalid, Kind};

/// Keys that may be live at one time, in all open objects together. A key leaves when its object
/// ends, so this bounds memory (1 MiB at most), not the length of a conversation. Our choice.
pub const LIVE_KEYS: usize = 16_384;

/// A member's key, unescaped, where it is no longer than [`Key::MAX`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// More than [`Key::MAX`] for a long key.
    len: u8,
    /// Zeros from `len` on.
    bytes: [u8; Self::MAX],
}

/// The arrays and objects that are open, outermost first, and their keys.
#[derive(Default)]
pub(super) struct Keys {
    /// The key that is being read, or was read last.
    pub(super) name: Name,
    /// Offset of that key's opening quote.
    pub(super) at: u64,
    open: Vec<Open>,
    /// The keys of objects with few of them. Each object owns a stretch, the innermost the last.
    few: Vec<Fingerprint>,
    live: usize,
}

enum Open {
    Array,
    Object {
        /// Where in [`Keys::few`] its stretch begins.
        first: usize,
        /// Its keys, once there are more than [`FEW`].
        many: Option<HashSet<Fingerprint>>,
    },
}

/// A key as its bytes arrive.
pub(super) struct Name {
    /// All of a short key; of a long one, the block that is being filled.
    block: [u8; Key::MAX],
    filled: usize,
    len: u64,
    /// The earlier blocks of a long key. Whole blocks, because a hasher need not give one answer
    /// for the same bytes in other pieces.
    hasher: Option<DefaultHasher>,
    seed: RandomState,
}

/// A short key itself, or the length and hash of a long one: equal keys have equal fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Fingerprint(u128);

impl Key {
    /// Bytes of the longest key that is kept. No field of an LLM protocol, LiteLLM's included, has
    /// a longer name.
    pub const MAX: usize = 64;

    /// The key, unless it is longer than [`Key::MAX`] bytes.
    pub fn as_str(&self) -> Option<&str> {
        let bytes = self.bytes.get(..usize::from(self.len))?;
        str::from_utf8(bytes).ok()
    }
}

impl Keys {
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    pub(super) fn innermost(&self) -> Option<Kind> {
        self.open.last().map(|open| match open {
            Open::Array => Kind::Array,
            Open::Object { .. } => Kind::Object,
        })
    }

    pub(super) fn open(&mut self, kind: Kind) {
        self.open.push(match kind {
            Kind::Object => Open::Object { first: self.few.len(), many: None },
            _ => Open::Array,
        });
    }

    /// Forgets the innermost array or object and its keys.
    pub(super) fn close(&mut self) {
        if let Some(Open::Object { first, many }) = self.open.pop() {
            self.live -= self.few.len() - first + many.map_or(0, |keys| keys.len());
            self.few.truncate(first);
        }
    }

    pub(super) fn begin(&mut self, at: u64) {
        self.at = at;
        self.name.clear();
    }

    /// Takes the key that was read into the innermost object.
    pub(super) fn end(&mut self) -> Result<(), Invalid> {
        let key = self.name.fingerprint();
        if !self.insert(key) {
            let key = self.name.key().as_str().unwrap_or("…").into();
            return Err(Invalid::DuplicateKey { at: self.at, key });
        }
        self.live += 1;
        if self.live > LIVE_KEYS {
            return Err(Invalid::TooManyKeys { at: self.at, limit: LIVE_KEYS });
        }
        Ok(())
    }

    /// Whether the key is new to the innermost object.
    fn insert(&mut self, key: Fingerprint) -> bool {
        let Some(Open::Object { first, many }) = self.open.last_mut() else { return true };
        if let Some(keys) = many {
            return keys.insert(key);
        }
        if self.few[*first..].contains(&key) {
            return false;
        }
        self.few.push(key);
        if self.few.len() - *first > FEW {
            *many = Some(self.few.drain(*first..).collect());
        }
        true
    }
}

impl Name {
    fn clear(&mut self) {
        self.filled = 0;
        self.len = 0;
        self.hasher = None;
    }

    /// Adds bytes to the key, and says how many that was.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> usize {
        let len = bytes.len();
        self.len += len as u64;
        while !bytes.is_empty() {
            if self.filled == self.block.len() {
                self.hasher.get_or_insert_with(|| self.seed.build_hasher()).write(&self.block);
                self.filled = 0;
            }
            let room = bytes.len().min(self.block.len() - self.filled);
            self.block[self.filled..][..room].copy_from_slice(&bytes[..room]);
            self.filled += room;
            bytes = &bytes[room..];
        }
        len
    }

    pub(super) fn key(&self) -> Key {
        let mut key = Key { len: u8::MAX, bytes: [0; Key::MAX] };
        if let Ok(len) = u8::try_from(self.len)
            && usize::from(len) <= Key::MAX
        {
            key.len = len;
            key.bytes[..self.filled].copy_from_slice(&self.block[..self.filled]);
        }
        key
    }

    fn fingerprint(&mut self) -> Fingerprint {
        let mut packed = [0; 16];
        if let Some(short) = packed[..PACKED].get_mut(..self.filled)
            && self.hasher.is_none()
        {
            short.copy_from_slice(&self.block[..self.filled]);
            return Fingerprint(u128::from_le_bytes(packed) | u128::from(self.len) << 120);
        }
        let mut hasher = self.hasher.take().unwrap_or_else(|| self.seed.build_hasher());
        hasher.write(&self.block[..self.filled]);
        let long = 0xff << 120 | u128::from(self.len) << 64;
        Fingerprint(long | u128::from(hasher.finish()))
    }
}

impl Default for Key {
    fn default() -> Self {
        Self { len: 0, bytes: [0; Self::MAX] }
    }
}

impl Default for Name {
    fn default() -> Self {
        Self { block: [0; Key::MAX], filled: 0, len: 0, hasher: None, seed: RandomState::new() }
    }
}

impl PartialEq<str> for Key {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == Some(other)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str().unwrap_or("…"))
    }
}

/// Keys of one object that are compared one by one: below this it beats a hash table.
const FEW: usize = 32;

/// Bytes of a key that fit into a fingerprint, with one left for the length.
const PACKED: usize = 15;
