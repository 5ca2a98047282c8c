//! Who a run is, for billing and for records.

use std::fmt::Write;

use http::HeaderValue;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::base::trace::{Context, SpanId, TraceId};

/// What the host says about a run. None of it comes from the sandbox.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    pub run: String,
    pub attempt: String,
    /// The billing account, which LiteLLM knows as the end user.
    pub account: String,
    /// Further facts for LiteLLM's spend logs: `graph_id` and the tracing fields.
    pub metadata: Map<String, Value>,
    /// Whose books the run's calls stand in, where it has a service's.
    pub deployment: Option<String>,
    /// The span that the run is part of.
    pub trace: Option<Context>,
}

/// The id of one request. The upstream learns it as the call id, so it joins all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId([u8; 36]);

/// What is wrong with a name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a valid {what}; {NAME_RULE}")]
pub struct Invalid {
    what: &'static str,
    given: String,
}

impl Identity {
    /// Checks the names, which stand in headers, logs and labels as they are.
    ///
    /// # Errors
    /// The first name that is empty, too long, or has a character that would need escaping somewhere.
    /// Only the account may be missing: not every upstream bills one.
    pub fn check(&self) -> Result<(), Invalid> {
        let names =
            [("run id", &self.run), ("attempt", &self.attempt), ("billing account", &self.account)];
        let optional = |what: &str, name: &str| what == "billing account" && name.is_empty();
        let invalid =
            names.into_iter().find(|(what, name)| !is_name(name) && !optional(what, name));
        invalid.map_or(Ok(()), |(what, given)| Err(Invalid { what, given: given.clone() }))
    }

    /// The trace that the run is part of: the one it was given, else the one that LiteLLM is told of, where that has a
    /// name that all can read.
    pub fn trace(&self) -> Option<Context> {
        let told = || self.metadata.get("existing_trace_id")?.as_str().and_then(TraceId::parse);
        self.trace.or_else(|| told().map(|trace| Context::root(trace, true)))
    }

    /// The metadata, and whose books there are: nobody who begins a run can say so in our place.
    pub fn facts(&self) -> Map<String, Value> {
        let mut facts = self.metadata.clone();
        if let Some(deployment) = &self.deployment {
            facts.insert(DEPLOYMENT.into(), Value::from(deployment.clone()));
        }
        facts
    }

    /// The run's metadata as LiteLLM reads it, in ASCII so that a header can hold it.
    pub fn spend_logs_metadata(&self) -> String {
        let attempt = self
            .attempt
            .parse::<u64>()
            .map_or_else(|_| Value::from(self.attempt.clone()), Value::from);
        let mut metadata = self.facts();
        metadata.insert("run_id".into(), Value::from(self.run.clone()));
        metadata.insert("attempt".into(), attempt);
        escape_non_ascii(&Value::Object(metadata).to_string())
    }
}

impl RequestId {
    /// A new id; ids sort by time.
    pub fn new() -> Self {
        let mut text = [0; 36];
        Uuid::now_v7().hyphenated().encode_lower(&mut text);
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a uuid is written in ASCII")
    }

    /// The request as a span of its run's trace: the id's last 16 digits, which hold what is random about it.
    pub fn span(self) -> SpanId {
        let bytes = Uuid::try_parse_ascii(&self.0).expect("it was written by one").into_bytes();
        let last = bytes.last_chunk().expect("a uuid has 16 bytes");
        SpanId::new(*last).expect("a uuid's variant is not zero")
    }

    pub fn to_header(self) -> HeaderValue {
        HeaderValue::from_bytes(&self.0).expect("a uuid is a valid header value")
    }
}

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a key of a run's metadata says who the run is, or whose records its calls join. Only the host decides that:
/// a caller of the service may not set such a key.
pub fn is_reserved_key(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    RESERVED_KEYS.contains(&&*key) || key.starts_with(RESERVED_PREFIX)
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
const DEPLOYMENT: &str = "cogni_deployment_id";

/// Keys of a run's metadata that [`is_reserved_key`] knows, beside those with its prefix. A trace is entered by the
/// header `traceparent`, which the trace's owner gives away.
const RESERVED_KEYS: [&str; 4] = ["graph_id", "run_id", "attempt", "existing_trace_id"];

const RESERVED_PREFIX: &str = "cogni_";

/// What [`is_name`] asks for.
pub const NAME_RULE: &str = "use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`";

/// Longer than any id in use, and short enough for a label.
const MAX_NAME_BYTES: usize = 128;
