//! Who a run is, for billing and for records.

use std::cell::Cell;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderValue;
use serde_json::{Map, Value};

use crate::base::hex;
use crate::base::trace_context::{SpanId, TraceContext, TraceId};

/// What the host says about a run. None of it comes from the sandbox.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunIdentity {
    pub run: String,
    pub attempt: String,
    /// The billing account, which LiteLLM knows as the end user.
    pub account: String,
    /// Further facts for LiteLLM's spend logs: `graph_id` and the tracing fields.
    pub metadata: Map<String, Value>,
    /// Whose books the run's calls stand in, where it has a service's.
    pub deployment: Option<String>,
    /// The span that the run is part of.
    pub trace: Option<TraceContext>,
}

/// The id of one request. The upstream learns it as the call id, so it joins all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId([u8; 36]);

/// What is wrong with a name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a valid {what}; {NAME_RULE}")]
pub struct RunIdentityError {
    what: &'static str,
    given: String,
}

impl RunIdentity {
    /// Checks the names, which stand in headers, logs and labels as they are.
    ///
    /// # Errors
    /// The first name that is empty, too long, or has a character that would need escaping somewhere.
    /// Only the account may be missing: not every upstream bills one.
    pub fn validate(&self) -> Result<(), RunIdentityError> {
        let names =
            [("run id", &self.run), ("attempt", &self.attempt), ("billing account", &self.account)];
        let optional = |what: &str, name: &str| what == "billing account" && name.is_empty();
        let invalid =
            names.into_iter().find(|(what, name)| !is_name(name) && !optional(what, name));
        invalid.map_or(Ok(()), |(what, given)| Err(RunIdentityError { what, given: given.clone() }))
    }

    /// The trace that the run is part of: the one it was given, else the one that LiteLLM is told of, where that has a
    /// name that all can read.
    pub fn trace_context(&self) -> Option<TraceContext> {
        let told =
            || self.metadata.get("existing_trace_id")?.as_str().and_then(TraceId::parse_trace_id);
        self.trace.or_else(|| told().map(|trace| TraceContext::root_context(trace, true)))
    }

    /// The metadata, and whose books there are: nobody who begins a run can say so in our place.
    pub fn litellm_metadata(&self) -> Map<String, Value> {
        let mut facts = self.metadata.clone();
        if let Some(deployment) = &self.deployment {
            facts.insert(DEPLOYMENT_FIELD.into(), Value::from(deployment.clone()));
        }
        facts
    }

    /// The run's metadata as LiteLLM reads it, in ASCII so that a header can hold it.
    pub fn spend_logs_metadata(&self) -> String {
        let attempt = self
            .attempt
            .parse::<u64>()
            .map_or_else(|_| Value::from(self.attempt.clone()), Value::from);
        let mut metadata = self.litellm_metadata();
        metadata.insert("run_id".into(), Value::from(self.run.clone()));
        metadata.insert("attempt".into(), attempt);
        escape_non_ascii(&Value::Object(metadata).to_string())
    }
}

impl RequestId {
    /// A new id, a UUID of version 7 (RFC 9562); those of one worker ascend.
    pub fn new() -> Self {
        SEQUENCE.with(|sequence| Self::format_uuid(sequence.next_halves(SystemTime::now())))
    }

    fn format_uuid((high, low): (u64, u64)) -> Self {
        let (high, low) = (high.to_be_bytes(), low.to_be_bytes());
        let mut text = [b'-'; 36];
        hex::encode_hex(&high[..4], &mut text[..8]);
        hex::encode_hex(&high[4..6], &mut text[9..13]);
        hex::encode_hex(&high[6..], &mut text[14..18]);
        hex::encode_hex(&low[..2], &mut text[19..23]);
        hex::encode_hex(&low[2..], &mut text[24..]);
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a uuid is written in ASCII")
    }

    /// The request as a span of its run's trace: the id's last 16 digits, which hold what is random about it.
    pub fn span_id(self) -> SpanId {
        let (first, last) = (&self.as_str()[19..23], &self.as_str()[24..]);
        let digits =
            |text| u64::from_str_radix(text, 16).expect("a uuid is written in hexadecimal");
        let span = digits(first) << 48 | digits(last);
        SpanId::new(span.to_be_bytes()).expect("a uuid's variant is not zero")
    }

    pub fn to_header(self) -> HeaderValue {
        HeaderValue::from_bytes(&self.0).expect("a uuid is a valid header value")
    }
}

/// What makes the ids of one thread: nothing is shared with another.
struct RequestIdSequence {
    /// The time of the last id, in parts of 4,096 to the millisecond, or one more than that of the one before.
    last: Cell<u64>,
    made: Cell<u64>,
    /// Its keys are secret and random, so that nobody guesses an id from those before.
    random: RandomState,
}

thread_local! {
    static SEQUENCE: RequestIdSequence =
        RequestIdSequence { last: Cell::new(0), made: Cell::new(0), random: RandomState::new() };
}

impl RequestIdSequence {
    /// The halves of the next id.
    fn next_halves(&self, now: SystemTime) -> (u64, u64) {
        let time = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let milliseconds = time.as_secs() * 1000 + u64::from(time.subsec_millis());
        let part = u64::from(time.subsec_nanos() % 1_000_000) * 4096 / 1_000_000;
        let time = (milliseconds << 12 | part).max(self.last.get() + 1);
        self.last.set(time);
        let made = self.made.get() + 1;
        self.made.set(made);
        let high = (time >> 12) << 16 | UUID_VERSION << 12 | time & 0xfff;
        (high, self.random.hash_one(made) >> 2 | UUID_VARIANT << 62)
    }
}

const UUID_VERSION: u64 = 7;
const UUID_VARIANT: u64 = 0b10;

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a key of a run's metadata says who the run is, or whose records its calls join. Only the host decides that:
/// a caller of the service may not set such a key.
pub fn is_reserved_key(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    RESERVED_METADATA_KEYS.contains(&&*key) || key.starts_with(RESERVED_METADATA_PREFIX)
}

/// Whether a text may stand in headers, logs and labels as it is.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@/-".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(allowed)
}

/// Outside of strings JSON is ASCII, so whatever is not stands in a string and can be escaped.
fn escape_non_ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() && character != '\u{7f}' {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    escaped
}

/// The field of LiteLLM's spend logs that says whose books a call stands in. LiteLLM has deployments of its own.
const DEPLOYMENT_FIELD: &str = "cogni_deployment_id";

/// Keys of a run's metadata that [`is_reserved_key`] knows, beside those with its prefix. A trace is entered by the
/// header `traceparent`, which the trace's owner gives away.
const RESERVED_METADATA_KEYS: [&str; 4] = ["graph_id", "run_id", "attempt", "existing_trace_id"];

const RESERVED_METADATA_PREFIX: &str = "cogni_";

/// What [`is_name`] asks for.
pub const NAME_RULE: &str = "use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`";

/// Longer than any id in use, and short enough for a label.
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
