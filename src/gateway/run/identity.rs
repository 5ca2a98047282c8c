//! The identity of a run, for billing and for records.

use std::cell::Cell;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderValue;
use serde_json::{Map, Value};

use crate::base::trace_context::{SpanId, TraceContext, TraceId};

/// The host's statements about a run. No part comes from the sandbox.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunIdentity {
    pub run: String,
    pub attempt: String,
    /// The billing account, which LiteLLM knows as the end user.
    pub account: String,
    /// Further facts for LiteLLM's spend logs: `graph_id` and the tracing fields.
    pub metadata: Map<String, Value>,
    /// The name of the billing records that the run's calls belong to, if a service has started the run.
    pub deployment: Option<String>,
    /// The span that the run belongs to.
    pub trace: Option<TraceContext>,
}

/// The id of one request. The upstream receives the id as the call id, so the id joins all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId([u8; 36]);

/// An error for a name that is not valid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is not a valid {what}; {NAME_RULE}")]
pub struct RunIdentityError {
    what: &'static str,
    value: String,
}

impl RunIdentity {
    /// Checks the names. Headers, logs and labels contain the names without escaping.
    ///
    /// # Errors
    /// Returns an error for the first name that is empty, too long, or has a character that would need escaping
    /// somewhere. Only the account may be missing, because not every upstream bills an account.
    pub fn validate(&self) -> Result<(), RunIdentityError> {
        let names =
            [("run id", &self.run), ("attempt", &self.attempt), ("billing account", &self.account)];
        let optional = |what: &str, name: &str| what == "billing account" && name.is_empty();
        let invalid =
            names.into_iter().find(|(what, name)| !is_name(name) && !optional(what, name));
        invalid.map_or(Ok(()), |(what, given)| Err(RunIdentityError { what, value: given.clone() }))
    }

    /// Returns the trace that the run belongs to: the trace of the host, else the trace in LiteLLM's metadata, if the
    /// latter has a valid trace id.
    pub fn trace_context(&self) -> Option<TraceContext> {
        let from_metadata =
            || self.metadata.get("existing_trace_id")?.as_str().and_then(TraceId::parse_trace_id);
        // The metadata names a trace without a span, so the run has no parent span.
        self.trace.or_else(|| from_metadata().map(|trace| TraceContext::root_context(trace, true)))
    }

    /// Returns the metadata with the name of the deployment.
    pub fn litellm_metadata(&self) -> Map<String, Value> {
        let mut facts = self.metadata.clone();
        // Inserted last: the gateway's value replaces any value that the starter of the run has put there.
        if let Some(deployment) = &self.deployment {
            facts.insert(DEPLOYMENT_FIELD.into(), Value::from(deployment.clone()));
        }
        facts
    }

    /// Returns the run's metadata as LiteLLM reads it, in ASCII, so that a header can hold it.
    pub fn spend_logs_metadata(&self) -> String {
        // A numeric attempt becomes a JSON number, any other attempt a text.
        let attempt = self
            .attempt
            .parse::<u64>()
            .map_or_else(|_| Value::from(self.attempt.clone()), Value::from);
        let mut metadata = self.litellm_metadata();
        // These two replace values of the same name, so the metadata cannot claim another run.
        metadata.insert("run_id".into(), Value::from(self.run.clone()));
        metadata.insert("attempt".into(), attempt);
        escape_non_ascii(&Value::Object(metadata).to_string())
    }
}

impl RequestId {
    /// Creates a new id, a UUID of version 7 (RFC 9562). The ids of one worker ascend.
    pub fn new() -> Self {
        SEQUENCE.with(|sequence| Self::format_uuid(sequence.next_halves(SystemTime::now())))
    }

    fn format_uuid((high, low): (u64, u64)) -> Self {
        let bits = u128::from(high) << 64 | u128::from(low);
        let mut digits = [0; 32];
        // The loop has no branch, so the compiler converts many bytes at a time.
        for (pair, byte) in digits.as_chunks_mut().0.iter_mut().zip(bits.to_be_bytes()) {
            *pair = [hex_digit(byte >> 4), hex_digit(byte & 15)];
        }
        let mut text = [b'-'; 36];
        text[..8].copy_from_slice(&digits[..8]);
        text[9..13].copy_from_slice(&digits[8..12]);
        text[14..18].copy_from_slice(&digits[12..16]);
        text[19..23].copy_from_slice(&digits[16..20]);
        text[24..].copy_from_slice(&digits[20..]);
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a uuid is written in ASCII")
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the request's span id in the run's trace: the last 16 digits of the id, which hold its random part.
    pub fn span_id(self) -> SpanId {
        let (first, last) = (&self.as_str()[19..23], &self.as_str()[24..]);
        let digits =
            |text| u64::from_str_radix(text, 16).expect("a uuid is written in hexadecimal");
        let span = digits(first) << 48 | digits(last);
        // The variant bits are `10`, so the id can never be zero, which a span id must not be.
        SpanId::new(span.to_be_bytes()).expect("a uuid's variant is not zero")
    }

    pub fn to_header(self) -> HeaderValue {
        HeaderValue::from_bytes(&self.0).expect("a uuid is a valid header value")
    }
}

/// The generator of one thread's ids. Threads share no state, so no lock is needed.
struct RequestIdSequence {
    /// The time of the last id, in units of 1/4096 millisecond. If the clock has not advanced, the value is one more
    /// than that of the id before.
    last: Cell<u64>,
    generated: Cell<u64>,
    /// A hasher with secret random keys, so that an id cannot be guessed from earlier ids.
    random: RandomState,
}

thread_local! {
    static SEQUENCE: RequestIdSequence =
        RequestIdSequence { last: Cell::new(0), generated: Cell::new(0), random: RandomState::new() };
}

impl RequestIdSequence {
    /// Returns the two halves of the next id.
    fn next_halves(&self, now: SystemTime) -> (u64, u64) {
        // A clock before 1970 counts as 1970. The counter below keeps the ids ascending.
        let time = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let milliseconds = time.as_secs() * 1000 + u64::from(time.subsec_millis());
        // The part of the millisecond in 1/4096, which fits the 12 bits behind the version.
        let part = u64::from(time.subsec_nanos() % 1_000_000) * 4096 / 1_000_000;
        // A clock that stands still or is set back must not repeat an id.
        let time = (milliseconds << 12 | part).max(self.last.get() + 1);
        self.last.set(time);
        let made = self.generated.get() + 1;
        self.generated.set(made);
        // RFC 9562: 48 bits of milliseconds, 4 bits of version, 12 bits of the finer time.
        let high = (time >> 12) << 16 | UUID_VERSION << 12 | time & 0xfff;
        // The counter makes each hash input unique. The two upper bits give way to the variant.
        (high, self.random.hash_one(made) >> 2 | UUID_VARIANT << 62)
    }
}

/// Returns the lower-case digit of a number below 16.
fn hex_digit(number: u8) -> u8 {
    number + if number < 10 { b'0' } else { b'a' - 10 }
}

/// The version field of a UUID of version 7.
const UUID_VERSION: u64 = 7;
/// The variant field of RFC 9562.
const UUID_VARIANT: u64 = 0b10;

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns true if a key of a run's metadata identifies the run, or the records that its calls join. Only the host sets
/// such keys; a caller of the service may not.
pub fn is_reserved_key(key: &str) -> bool {
    // Letter case does not matter: a reserved key in capitals is reserved, too.
    let key = key.to_ascii_lowercase();
    RESERVED_METADATA_KEYS.contains(&&*key) || key.starts_with(RESERVED_METADATA_PREFIX)
}

/// Returns true if a text can be used in headers, logs and labels without escaping.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@/-".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(allowed)
}

/// Escapes the characters of a JSON text that are not ASCII. Outside of strings, JSON is ASCII; such a character is
/// therefore always in a string and can be escaped.
fn escape_non_ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        // DEL is ASCII, but a header value must not contain it.
        if character.is_ascii() && character != '\u{7f}' {
            escaped.push(character);
        } else {
            // JSON escapes are UTF-16 units, so a character outside of the basic plane becomes two escapes.
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    escaped
}

/// The field of LiteLLM's spend logs that names the service whose billing records include a call. LiteLLM has
/// deployments of its own.
const DEPLOYMENT_FIELD: &str = "cogni_deployment_id";

/// The keys of a run's metadata that [`is_reserved_key`] knows, in addition to keys with the prefix. A caller joins a
/// trace with the header `traceparent`, which the trace's owner hands out, and not with a key.
const RESERVED_METADATA_KEYS: [&str; 4] = ["graph_id", "run_id", "attempt", "existing_trace_id"];

/// The prefix of all further reserved keys.
const RESERVED_METADATA_PREFIX: &str = "cogni_";

/// The rule that [`is_name`] checks, for error messages.
pub const NAME_RULE: &str = "use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`";

/// The largest length of a name, in bytes. The value is longer than any id in use, and short enough for a label.
const MAX_NAME_BYTES: usize = 128;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::{Duration, UNIX_EPOCH};

    use uuid::Uuid;

    use super::{RequestId, SEQUENCE};

    #[test]
    fn request_ids_are_uuids_that_ascend_and_differ() {
        let ids: Vec<_> = (0..10_000).map(|_| RequestId::new()).collect();
        assert!(ids.is_sorted_by_key(RequestId::as_str));
        let random: BTreeSet<_> = ids.iter().map(|id| &id.as_str()[19..]).collect();
        assert_eq!(random.len(), ids.len());
        for id in ids {
            let uuid = Uuid::parse_str(id.as_str()).unwrap();
            assert_eq!((uuid.get_version_num(), uuid.get_variant()), (7, uuid::Variant::RFC4122));
            assert_eq!(id.span_id().to_string(), id.as_str()[19..].replace('-', ""));
        }
    }

    /// A clock that is set back makes no id twice.
    #[test]
    fn request_ids_ascend_when_the_clock_does_not() {
        let at = |seconds| {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            RequestId::format_uuid(SEQUENCE.with(|sequence| sequence.next_halves(time)))
        };
        let ids = [4_000_000_000, 4_000_000_000, 1_000_000_000, 0].map(at);
        assert!(ids.is_sorted_by_key(RequestId::as_str), "{ids:?}");
        assert!(ids[0].as_str().starts_with("03a35294-4000-7"), "{ids:?}");
    }
}
