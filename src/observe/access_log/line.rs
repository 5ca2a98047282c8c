//! One line.

use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::budget::Usage;
use crate::observe::printable::Printable;
use crate::protocol::Route;

/// The keys of every line, in order. Readers may rely on it: keys are added at the end, never moved.
pub const KEYS: [&str; 20] = [
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

/// What is known of a request when it has ended.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// When the request ended.
    pub time: SystemTime,
    pub method: &'a str,
    /// `None` where the path is not served: a client's own text is never logged.
    pub route: Option<Route>,
    /// The status sent; nginx writes 499 where the client left before one was.
    pub status: u16,
    /// Bytes of the response body that were sent.
    pub bytes: u64,
    /// Bytes of the request body that were read.
    pub request_bytes: u64,
    pub model: Option<&'a str>,
    /// Ours, which LiteLLM is asked to use as its call id.
    pub request_id: &'a str,
    /// As the upstream sent it.
    pub litellm_call_id: Option<&'a str>,
    /// As the upstream sent it, in dollars.
    pub litellm_response_cost: Option<&'a str>,
    /// From sending the request upstream to the last byte of its response.
    pub upstream_time: Option<Duration>,
    /// From the start of the request to the first byte of the response body.
    pub first_byte_time: Option<Duration>,
    pub request_time: Duration,
    pub usage: Option<&'a Usage>,
    /// How the call ended, or the code it was refused with.
    pub outcome: &'static str,
}

impl Line<'_> {
    /// The line that stands for a number of others.
    pub(super) fn repeated(time: SystemTime) -> Self {
        Self {
            time,
            method: "-",
            route: None,
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
            outcome: "repeated",
        }
    }

    /// Appends the line with its end. `identity` is `runId=… attempt=…`, `trace` the id of the run's.
    pub(super) fn append_to(&self, identity: &str, trace: &str, buffer: &mut Vec<u8>) {
        let mut line = Appender(buffer);
        line.time(self.time);
        line.0.push(b' ');
        line.0.extend_from_slice(identity.as_bytes());
        line.text(" method=", Some(self.method));
        line.word(" uri=", self.route.map_or("-", Route::path));
        line.number(" status=", Some(self.status.into()));
        line.number(" bytes=", Some(self.bytes));
        line.number(" request_bytes=", Some(self.request_bytes));
        line.text(" model=", self.model);
        line.text(" request_id=", Some(self.request_id));
        line.text(" litellm_call_id=", self.litellm_call_id);
        line.text(" litellm_response_cost=", self.litellm_response_cost);
        line.seconds(" upstream_time=", self.upstream_time);
        line.seconds(" first_byte_time=", self.first_byte_time);
        line.seconds(" request_time=", Some(self.request_time));
        line.number(" usage_input=", self.usage.map(|usage| usage.input.0));
        line.number(" usage_output=", self.usage.map(|usage| usage.output.0));
        line.word(" usage_source=", self.usage.map_or("-", |usage| usage.source.as_str()));
        line.word(" outcome=", self.outcome);
        line.word(" trace_id=", trace);
        line.0.push(b'\n');
    }
}

/// Adds the number of repeated lines to the line that was appended last.
pub(super) fn append_repeats(repeats: u64, buffer: &mut Vec<u8>) {
    buffer.pop();
    let mut line = Appender(buffer);
    line.number(" repeats=", Some(repeats));
    line.0.push(b'\n');
}

/// Appends keys and values, each in its form, without an allocation.
struct Appender<'a>(&'a mut Vec<u8>);

impl Appender<'_> {
    /// RFC 3339 in UTC with milliseconds.
    fn time(&mut self, time: SystemTime) {
        let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + LATEST);
        write!(self.0, "time={}", humantime::format_rfc3339_millis(time))
            .expect("a Vec takes every write, and the time can be written");
    }

    /// A word of our own.
    fn word(&mut self, key: &str, word: &str) {
        self.0.extend_from_slice(key.as_bytes());
        self.0.extend_from_slice(word.as_bytes());
    }

    /// Text from outside.
    fn text(&mut self, key: &str, text: Option<&str>) {
        self.0.extend_from_slice(key.as_bytes());
        Printable(text.unwrap_or("-")).append_to(self.0);
    }

    fn number(&mut self, key: &str, number: Option<u64>) {
        match number {
            Some(number) => self.word(key, itoa::Buffer::new().format(number)),
            None => self.word(key, "-"),
        }
    }

    /// Seconds with three decimals, as nginx writes `$request_time`.
    fn seconds(&mut self, key: &str, time: Option<Duration>) {
        let Some(time) = time else { return self.word(key, "-") };
        self.word(key, itoa::Buffer::new().format(time.as_secs()));
        let millis = time.subsec_millis();
        let digit = |place: u32| b"0123456789"[(millis / place % 10) as usize];
        self.0.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
    }
}

/// Since 1970, and just short of the year 9999, the last that RFC 3339 can write: a clock may be wrong,
/// a request goes on.
const LATEST: Duration = Duration::from_hours(8_000 * 365 * 24);
