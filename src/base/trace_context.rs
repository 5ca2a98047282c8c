//! W3C Trace Context: the trace to which a piece of work belongs and the span around the work, as the header
//! `traceparent` carries them.

use std::fmt;
use std::str::FromStr;

use http::HeaderValue;
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::metrics::count_as_f64;

/// The id of a trace, which all its spans share. It is never zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceId([u8; 16]);

/// The id of a span, a part of a trace. It is never zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SpanId([u8; 8]);

/// The trace that a caller continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: TraceId,
    /// The caller's span, if it has one.
    pub parent: Option<SpanId>,
    /// True if the caller records its spans, so that this program's spans have a parent.
    pub is_sampled: bool,
}

/// An error for a text that is not a `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give a W3C traceparent, such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
pub struct TraceparentError;

impl TraceId {
    /// Creates a random id.
    pub fn random() -> Self {
        Self(random_nonzero())
    }

    /// Parses a trace id of 32 lower-case hexadecimal digits.
    pub fn parse_trace_id(digits: &str) -> Option<Self> {
        parse_nonzero_hex(digits).map(Self)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns true if the trace belongs to the given share of all traces. Every process gives the same answer.
    pub fn is_sampled_at(&self, share: f64) -> bool {
        let last = self.0.last_chunk().expect("an id has 16 bytes");
        // The last seven bytes are random in every id.
        let place = u64::from_be_bytes(*last) & RANDOM_BITS_MASK;
        count_as_f64(place) < share * count_as_f64(RANDOM_BITS_MASK + 1)
    }
}

impl SpanId {
    /// Creates a random id.
    pub fn random() -> Self {
        Self(random_nonzero())
    }

    /// Returns the id of these bytes; `None` for zero, which means no span.
    pub fn new(bytes: [u8; 8]) -> Option<Self> {
        (bytes != [0; 8]).then_some(Self(bytes))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TraceContext {
    /// Returns the context of a trace without a parent span.
    pub fn root_context(trace: TraceId, is_sampled: bool) -> Self {
        Self { trace, parent: None, is_sampled }
    }

    /// Returns the header `traceparent` for calls that belong to `span`.
    pub fn traceparent(&self, span: &SpanId) -> HeaderValue {
        let mut text = *b"00-00000000000000000000000000000000-0000000000000000-00";
        hex::encode_to_slice(self.trace.0, &mut text[3..35]).expect("two digits for each byte");
        hex::encode_to_slice(span.0, &mut text[36..52]).expect("two digits for each byte");
        text[54] += u8::from(self.is_sampled);
        HeaderValue::from_bytes(&text).expect("digits and dashes are a valid header value")
    }
}

/// Parses `00-TRACE-SPAN-FLAGS`. A later version may have more fields behind these; they are ignored.
impl FromStr for TraceContext {
    type Err = TraceparentError;

    fn from_str(given: &str) -> Result<Self, TraceparentError> {
        let (head, more) = given.split_at_checked(TRACEPARENT_BYTES).ok_or(TraceparentError)?;
        let mut parts = head.split('-');
        let mut next = || parts.next().ok_or(TraceparentError);
        let [version, trace, span, flags] = [next()?, next()?, next()?, next()?];
        let is_known = match version {
            // Version `ff` is invalid. A later version begins like version 00 and may have more fields.
            "00" => more.is_empty(),
            "ff" => false,
            _ => {
                parse_lowercase_hex::<1>(version).is_some()
                    && (more.is_empty() || more.starts_with('-'))
            }
        };
        if !is_known {
            return Err(TraceparentError);
        }
        Ok(Self {
            trace: TraceId::parse_trace_id(trace).ok_or(TraceparentError)?,
            parent: Some(SpanId(parse_nonzero_hex(span).ok_or(TraceparentError)?)),
            is_sampled: parse_lowercase_hex::<1>(flags).ok_or(TraceparentError)?[0] & SAMPLED_FLAG
                != 0,
        })
    }
}

/// Formats the context as a `traceparent`. A missing span is written as zeros.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parent = SpanId(self.parent.map_or([0; 8], |span| span.0));
        write!(f, "00-{}-{parent}-0{}", self.trace, u8::from(self.is_sampled))
    }
}

impl Serialize for TraceContext {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TraceContext {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Parses exactly `2 * BYTES` lower-case digits that are not all zero.
fn parse_nonzero_hex<const BYTES: usize>(digits: &str) -> Option<[u8; BYTES]> {
    parse_lowercase_hex(digits).filter(|bytes| *bytes != [0; BYTES])
}

fn parse_lowercase_hex<const BYTES: usize>(digits: &str) -> Option<[u8; BYTES]> {
    let is_small = !digits.bytes().any(|digit| digit.is_ascii_uppercase());
    let mut bytes = [0; BYTES];
    (is_small && hex::decode_to_slice(digits, &mut bytes).is_ok()).then_some(bytes)
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    let mut text = [0; 32];
    let text = &mut text[..2 * bytes.len()];
    hex::encode_to_slice(bytes, text).expect("two digits for each byte");
    f.write_str(std::str::from_utf8(text).expect("digits are ASCII"))
}

fn random_nonzero<const BYTES: usize>() -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    while bytes == [0; BYTES] {
        SystemRandom::new().fill(&mut bytes).expect("the kernel has random numbers");
    }
    bytes
}

/// The length of a `traceparent` of version 00, in bytes. Later versions begin with the same form.
const TRACEPARENT_BYTES: usize = 55;

/// The bits that W3C requires to be random.
const RANDOM_BITS_MASK: u64 = (1 << 56) - 1;

/// The flag of version 00 that says that the caller records its spans.
const SAMPLED_FLAG: u8 = 1;
