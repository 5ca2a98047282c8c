//! Partial limits from a flag, a file or an agent's entry.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::SandboxLimits;

/// The limits that one source sets. A missing limit is taken from the next source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitOverrides {
    #[serde(with = "humantime_serde")]
    pub max_runtime: Option<Duration>,
    pub max_memory: Option<ByteSize>,
    pub pids: Option<u32>,
    pub cpus: Option<f64>,
    /// The maximum number of stored bytes of each of stdout and stderr.
    pub max_output: Option<ByteSize>,
    /// The maximum size of a workspace directory that was made for runs.
    pub max_workspace: Option<ByteSize>,
}

/// A number of bytes; its text may end in `k`, `m` or `g` for KiB, MiB or GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl LimitOverrides {
    /// Returns these limits, with the missing ones from `below`.
    #[must_use]
    pub fn with_defaults(self, below: Self) -> Self {
        Self {
            max_runtime: self.max_runtime.or(below.max_runtime),
            max_memory: self.max_memory.or(below.max_memory),
            pids: self.pids.or(below.pids),
            cpus: self.cpus.or(below.cpus),
            max_output: self.max_output.or(below.max_output),
            max_workspace: self.max_workspace.or(below.max_workspace),
        }
    }

    /// Returns the complete limits, with the defaults for the missing ones.
    pub fn resolve_limits(self) -> SandboxLimits {
        let default = SandboxLimits::default();
        let bytes = |size: ByteSize| usize::try_from(size.0).unwrap_or(usize::MAX);
        SandboxLimits {
            max_runtime: self.max_runtime.unwrap_or(default.max_runtime),
            max_memory: self.max_memory.map_or(default.max_memory, |size| size.0),
            pids: self.pids.unwrap_or(default.pids),
            cpus: self.cpus.unwrap_or(default.cpus),
            max_output_bytes: self.max_output.map_or(default.max_output_bytes, bytes),
            max_workspace: self.max_workspace.map_or(default.max_workspace, |size| size.0),
        }
    }
}

impl std::str::FromStr for ByteSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (number, shift) = match text.char_indices().last() {
            Some((at, 'k' | 'K')) => (&text[..at], 10),
            Some((at, 'm' | 'M')) => (&text[..at], 20),
            Some((at, 'g' | 'G')) => (&text[..at], 30),
            _ => (text, 0),
        };
        let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        size.map(Self).ok_or("give a number of bytes, or with k, m or g, such as 512m")
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ByteSizeVisitor)
    }
}

struct ByteSizeVisitor;

impl de::Visitor<'_> for ByteSizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, or a text such as \"512m\"")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<ByteSize, E> {
        u64::try_from(number)
            .map(ByteSize)
            .map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}
