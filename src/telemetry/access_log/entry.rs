//! One line of the access log.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::base::sanitize::SanitizedText;
use crate::base::timestamp::TimestampFormatter;
use crate::llm::budget::TokenUsage;

/// The keys of every line, in order. Readers may rely on the order: a new key is added at the end, and no key moves.
pub const FIELD_KEYS: [&str; 20] = [
    "time",
    "runId",
    "attempt",
    "method",
    "uri",
    "status",
    "bytes",
    "request_bytes",
    "model",
    "request_id",
    "litellm_call_id",
    "litellm_response_cost",
    "upstream_time",
    "first_byte_time",
    "request_time",
    "usage_input",
    "usage_output",
    "usage_source",
    "outcome",
    "trace_id",
];

/// The facts about a request at its end.
#[derive(Clone, Copy, Debug)]
pub struct AccessLogEntry<'a> {
    /// The time when the request ended.
    pub time: SystemTime,
    pub method: &'a str,
    /// The path of the request's route; `None` if the path is not served. The log never contains a client's own path.
    pub uri: Option<&'static str>,
    /// The status that was sent. As in nginx, 499 means that the client left before the gateway sent a status.
    pub status: u16,
    /// The bytes of the response body that were sent.
    pub bytes: u64,
    /// The bytes of the request body that were read.
    pub request_bytes: u64,
    pub model: Option<&'a str>,
    /// The gateway's request id, which the gateway sends to LiteLLM as the call id.
    pub request_id: &'a str,
    /// The call id in the upstream's response.
    pub litellm_call_id: Option<&'a str>,
    /// The cost in the upstream's response, in dollars.
    pub litellm_response_cost: Option<&'a str>,
    /// The time from sending the request upstream to the last byte of its response.
    pub upstream_time: Option<Duration>,
    /// The time from the start of the request to the first byte of the response body.
    pub first_byte_time: Option<Duration>,
    pub request_time: Duration,
    pub usage: Option<&'a TokenUsage>,
    /// The outcome of the call, or the code that the request was refused with.
    pub outcome: &'static str,
}

/// The fields that are equal in every line of a run.
#[derive(Clone, Debug)]
pub(super) struct AccessLogRunFields {
    /// `runId=… attempt=…`, or the same two members of a JSON object.
    pub(super) identity: Arc<str>,
    /// The trace that the run belongs to, or `-`.
    pub(super) trace: Arc<str>,
}

impl AccessLogEntry<'_> {
    /// Returns a line without the values of a request. Every key must be present, so keys without a value get `-`, 0 or
    /// zero time.
    pub fn without_values(time: SystemTime, outcome: &'static str) -> Self {
        Self {
            time,
            method: "-",
            uri: None,
            status: 0,
            bytes: 0,
            request_bytes: 0,
            model: None,
            request_id: "-",
            litellm_call_id: None,
            litellm_response_cost: None,
            upstream_time: None,
            first_byte_time: None,
            request_time: Duration::ZERO,
            usage: None,
            outcome,
        }
    }

    /// Appends the whole line with its line end. `clock` formats the time.
    pub(super) fn append_to(
        &self,
        constant: &AccessLogRunFields,
        clock: &mut TimestampFormatter,
        buffer: &mut Vec<u8>,
    ) {
        // The order of the calls below is the order of `FIELD_KEYS`. Text from outside goes through `push_text`.
        let mut line = AccessLogFieldWriter(buffer);
        line.0.extend_from_slice(b"time=");
        line.0.extend_from_slice(clock.format_time(self.time));
        line.0.push(b' ');
        line.0.extend_from_slice(constant.identity.as_bytes());
        line.push_text(" method=", Some(self.method));
        line.push_word(" uri=", self.uri.unwrap_or("-"));
        line.push_number(" status=", Some(self.status.into()));
        line.push_number(" bytes=", Some(self.bytes));
        line.push_number(" request_bytes=", Some(self.request_bytes));
        line.push_text(" model=", self.model);
        line.push_text(" request_id=", Some(self.request_id));
        line.push_text(" litellm_call_id=", self.litellm_call_id);
        line.push_text(" litellm_response_cost=", self.litellm_response_cost);
        line.push_seconds(" upstream_time=", self.upstream_time);
        line.push_seconds(" first_byte_time=", self.first_byte_time);
        line.push_seconds(" request_time=", Some(self.request_time));
        line.push_number(" usage_input=", self.usage.map(|usage| usage.input.0));
        line.push_number(" usage_output=", self.usage.map(|usage| usage.output.0));
        line.push_word(" usage_source=", self.usage.map_or("-", |usage| usage.source.as_str()));
        line.push_word(" outcome=", self.outcome);
        line.push_word(" trace_id=", &constant.trace);
        line.0.push(b'\n');
    }
}

/// Adds the number of suppressed lines to the line that was appended last.
pub(super) fn append_repeats(repeats: u64, buffer: &mut Vec<u8>) {
    // The line end is removed and written again behind the new field.
    buffer.pop();
    let mut line = AccessLogFieldWriter(buffer);
    line.push_number(" repeats=", Some(repeats));
    line.0.push(b'\n');
}

/// A writer of keys and values. Each value has its own form, and no value needs an allocation.
struct AccessLogFieldWriter<'a>(&'a mut Vec<u8>);

impl AccessLogFieldWriter<'_> {
    /// Appends a word of the gateway's own, which needs no escaping.
    fn push_word(&mut self, key: &str, word: &str) {
        self.0.extend_from_slice(key.as_bytes());
        self.0.extend_from_slice(word.as_bytes());
    }

    /// Appends text from outside, sanitized.
    fn push_text(&mut self, key: &str, text: Option<&str>) {
        self.0.extend_from_slice(key.as_bytes());
        SanitizedText(text.unwrap_or("-")).append_to(self.0);
    }

    fn push_number(&mut self, key: &str, number: Option<u64>) {
        match number {
            Some(number) => self.push_word(key, itoa::Buffer::new().format(number)),
            None => self.push_word(key, "-"),
        }
    }

    /// Appends seconds with three decimals, as nginx writes `$request_time`.
    fn push_seconds(&mut self, key: &str, time: Option<Duration>) {
        let Some(time) = time else { return self.push_word(key, "-") };
        self.push_word(key, itoa::Buffer::new().format(time.as_secs()));
        let millis = time.subsec_millis();
        // Three digits with leading zeros, which a number formatter would drop.
        let digit = |place: u32| b"0123456789"[(millis / place % 10) as usize];
        self.0.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
    }
}
