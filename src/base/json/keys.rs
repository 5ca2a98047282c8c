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
    /// `None` for a long key.
    len: Option<usize>,
    /// Zeros from `len` on.
    bytes: [u8; Self::MAX],
}

/// The arrays and objects that are open, outermost first, and their keys.
#[derive(Default)]
pub(super) struct Keys {
    /// The key that is being read, or was read last; or the beginning of the text after it.
    pub(super) name: Name,
    /// Offset of that key's opening quote.
    pub(super) at: u64,
    open: Vec<Open>,
    /// The keys of objects with few of them. Each object owns a stretch, the innermost the last.
    few: Vec<Fingerprint>,
    /// The keys of objects with more than [`FEW`], and the depth of each.
    many: Vec<(usize, HashSet<Fingerprint>)>,
    live: usize,
}

struct Open {
    kind: Kind,
    /// Where in [`Keys::few`] its stretch begins.
    first: usize,
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
struct Fingerprint {
    head: u64,
    /// The length in the top byte, 255 for a long key.
    tail: u64,
}

impl Key {
    /// Bytes of the longest key that is kept. No field of an LLM protocol, LiteLLM's included, has
    /// a longer name.
    pub const MAX: usize = 64;

    /// A key of no more than [`Key::MAX`] bytes.
    pub(super) fn short(key: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        bytes[..key.len()].copy_from_slice(key);
        Self { len: Some(key.len()), bytes }
    }

    /// The key, unless it is longer than [`Key::MAX`] bytes.
    pub fn as_str(&self) -> Option<&str> {
        str::from_utf8(&self.bytes[..self.len?]).ok()
    }
}

impl Keys {
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    /// Whether the innermost is an array or an object.
    pub(super) fn innermost(&self) -> Option<Kind> {
        self.open.last().map(|open| open.kind)
    }

    pub(super) fn open(&mut self, kind: Kind) {
        self.open.push(Open { kind, first: self.few.len() });
    }

    /// Forgets the innermost array or object and its keys.
    pub(super) fn close(&mut self) {
        let depth = self.depth();
        let Some(Open { first, .. }) = self.open.pop() else { return };
        self.live -= self.few.len() - first;
        self.few.truncate(first);
        if let Some((_, keys)) = self.many.pop_if(|(owner, _)| *owner == depth) {
            self.live -= keys.len();
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
        let depth = self.depth();
        if let Some((_, keys)) = self.many.last_mut().filter(|(owner, _)| *owner == depth) {
            return keys.insert(key);
        }
        let first = self.open.last().map_or(0, |open| open.first);
        if self.few[first..].contains(&key) {
            return false;
        }
        self.few.push(key);
        if self.few.len() - first > FEW {
            self.many.push((depth, self.few.drain(first..).collect()));
        }
        true
    }
}

impl Name {
    pub(super) fn clear(&mut self) {
        self.filled = 0;
        self.len = 0;
        self.hasher = None;
    }

    /// Takes the first bytes away, of a name that has not outgrown its block.
    pub(super) fn cut_start(&mut self, bytes: usize) {
        if self.hasher.is_none() {
            self.block.copy_within(bytes..self.filled, 0);
            self.filled -= bytes;
            self.len -= bytes as u64;
        }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
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
    }

    pub(super) fn key(&self) -> Key {
        let mut key = Key { len: None, bytes: [0; Key::MAX] };
        if self.hasher.is_none() {
            key.len = Some(self.filled);
            key.bytes[..self.filled].copy_from_slice(self.filled());
        }
        key
    }

    /// Its length, unescaped.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// All of it, unless it is longer than [`Key::MAX`].
    pub(super) fn as_bytes(&self) -> Option<&[u8]> {
        self.hasher.is_none().then(|| self.filled())
    }

    fn fingerprint(&self) -> Fingerprint {
        if self.hasher.is_none() && self.filled <= Fingerprint::SHORT {
            return Fingerprint::of_short(self.filled());
        }
        let mut hasher = self.hasher.clone().unwrap_or_else(|| self.seed.build_hasher());
        hasher.write(self.filled());
        Fingerprint { head: hasher.finish(), tail: 0xff << 56 | self.len }
    }

    fn filled(&self) -> &[u8] {
        &self.block[..self.filled]
    }
}

impl Fingerprint {
    /// Bytes of a key that fit in, with one left for the length.
    const SHORT: usize = 15;

    /// The first bytes and the last, which overlap in the middle: no loop, no copy.
    fn of_short(key: &[u8]) -> Self {
        let (head, tail) = if let Some((first, last)) = ends::<8>(key) {
            (u64::from_le_bytes(*first), u64::from_le_bytes(*last) >> 8)
        } else if let Some((first, last)) = ends::<4>(key) {
            (u32::from_le_bytes(*first).into(), u32::from_le_bytes(*last).into())
        } else {
            let byte = |at: usize| key.get(at).copied().unwrap_or_default();
            (u32::from_le_bytes([byte(0), byte(1), byte(2), 0]).into(), 0)
        };
        Self { head, tail: (key.len() as u64) << 56 | tail }
    }
}

fn ends<const N: usize>(key: &[u8]) -> Option<(&[u8; N], &[u8; N])> {
    key.first_chunk().zip(key.last_chunk())
}

impl Default for Key {
    fn default() -> Self {
        Self { len: Some(0), bytes: [0; Self::MAX] }
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
