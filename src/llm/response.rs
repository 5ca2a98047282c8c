//! Reads a copy of a response as it passes: the tokens it used, its cost, how it ended.
//!
//! The exchange shows each frame to an [`ResponseObserver`] and sends on what that returns, at once. In
//! pass-through that is the frame itself. For a chat client that did not ask for usage it is the
//! frame less the usage chunk that we asked for: the only case in which bytes are ever held back,
//! and only while they may be the beginning of that chunk.
//!
//! Events are read by the WHATWG rules: any line end, a byte order mark, comments, data on many
//! lines, cuts anywhere. An event that the stream's orderly end has ended is read too, though
//! the rules would drop it: providers leave out the last empty line, and the count is in there.
//!
//! A stream whose output is limited is cut behind the event that goes over what was granted, and
//! ended in the way its protocol understands ([`ResponseObserver::with_allowance`]).
//!
//! **Invariant:** what is observed and what goes on are the same however the response was split
//! into frames, and nothing is allocated for a frame whose events end in it and report nothing, but
//! for the text of a limited Responses stream, which the end of that protocol repeats.

mod delta;
mod event_pattern;
mod json_usage;
mod output_estimate;
mod output_limiter;
mod report;
mod sse;
mod unknown_text;
mod usage_counts;
mod usage_filter;
mod whole_body;

use bytes::Bytes;

use self::json_usage::JsonUsageScanner;
use self::report::ResponseReport;
use self::sse::{SseEvent, SseParser};
use self::usage_filter::UsageChunkFilter;
use crate::llm::budget::{Nanodollars, TokenUsage, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};

pub use output_limiter::{CallAllowance, CutoffMode, OUTPUT_LIMIT_REACHED_CODE};

/// Bytes of one event, its line ends included; SPEC G7 sets it. It bounds what is kept per stream.
pub const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;

/// Reads one response.
///
/// ```
/// use bytes::Bytes;
/// use cogni_gateway::llm::protocol::GatewayRoute;
/// use cogni_gateway::llm::response::{ResponseFormat, ResponseObserver, StreamEnd, UsageChunkMode};
///
/// let mut observer =
///     ResponseObserver::new(GatewayRoute::Messages, ResponseFormat::Sse, UsageChunkMode::Show);
/// let frame = Bytes::from_static(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
/// assert_eq!(observer.read_frame(frame.clone())?, frame);
/// assert_eq!(observer.stream_end(), StreamEnd::Terminated);
/// # Ok::<(), cogni_gateway::llm::response::EventTooLargeError>(())
/// ```
#[derive(Debug)]
pub struct ResponseObserver {
    reader: FormatReader,
    report: ResponseReport,
}

/// How the response's body is to be read: its content type, where nothing encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFormat {
    /// `text/event-stream`.
    Sse,
    /// `application/json`.
    Json,
    /// Anything else: it passes unread.
    Opaque,
}

/// What becomes of a chat stream's usage chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageChunkMode {
    /// The client asked for it.
    Show,
    /// Only we asked for it.
    Hide,
}

/// How the response ended, by its own words. What came later in this list is not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamEnd {
    /// It has not said that it has ended.
    Unfinished,
    /// `[DONE]`, `message_stop`, `response.completed`, `.incomplete` or `.failed`; a JSON body
    /// whose object is closed.
    Terminated,
    /// An error event, or data with an `error`; LiteLLM sends `[DONE]` after one.
    Errored,
}

/// An event of the stream does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "one event of the upstream's stream is over the limit of `{MAX_EVENT_BYTES}` bytes; have the upstream send less in one event"
)]
pub struct EventTooLargeError;

#[derive(Debug)]
enum FormatReader {
    Sse(SseParser),
    Filtered(UsageChunkFilter),
    Json(Box<JsonUsageScanner>),
    Opaque,
}

impl ResponseFormat {
    /// The format that a response's `content-type` and `content-encoding` declare. What is encoded cannot be read.
    pub fn from_headers(content_type: Option<&[u8]>, encoding: Option<&[u8]>) -> Self {
        let is_plain = encoding.is_none_or(|coding| coding == b"identity");
        let media_type = content_type
            .and_then(|value| value.split(|byte| *byte == b';').next())
            .unwrap_or_default()
            .trim_ascii();
        if is_plain && media_type.eq_ignore_ascii_case(b"text/event-stream") {
            Self::Sse
        } else if is_plain && media_type.eq_ignore_ascii_case(b"application/json") {
            Self::Json
        } else {
            Self::Opaque
        }
    }
}

impl ResponseObserver {
    pub fn new(route: GatewayRoute, format: ResponseFormat, usage_chunk: UsageChunkMode) -> Self {
        let reader = match (format, usage_chunk) {
            // Only chat has a chunk that can be asked for.
            (ResponseFormat::Sse, UsageChunkMode::Hide)
                if route.protocol() == LlmProtocol::Chat =>
            {
                FormatReader::Filtered(UsageChunkFilter::default())
            }
            (ResponseFormat::Sse, _) => FormatReader::Sse(SseParser::default()),
            (ResponseFormat::Json, _) => FormatReader::Json(Box::default()),
            (ResponseFormat::Opaque, _) => FormatReader::Opaque,
        };
        Self { reader, report: ResponseReport::new(route) }
    }

    /// Has the stream cut where it goes on after it has written what was granted. A unary body is
    /// there as a whole or not at all: it is never cut.
    #[must_use]
    pub fn with_allowance(mut self, allowance: CallAllowance) -> Self {
        let shows_usage = match self.reader {
            FormatReader::Sse(_) => true,
            FormatReader::Filtered(_) => false,
            FormatReader::Json(_) | FormatReader::Opaque => return self,
        };
        self.report.set_allowance(allowance, shows_usage);
        self
    }

    /// Whether every byte goes on and none is added, so that the length stays what it was.
    pub fn is_passthrough(&self) -> bool {
        !matches!(self.reader, FormatReader::Filtered(_)) && !self.report.is_limited()
    }

    /// Reads a frame; returns what goes on to the client, which may be empty. If the stream
    /// [is cut](Self::is_truncated) by it, that is all, and ends the stream.
    ///
    /// After [`EventTooLargeError`] the response is to be cut: the observer has lost its place in it.
    pub fn read_frame(&mut self, frame: Bytes) -> Result<Bytes, EventTooLargeError> {
        if self.is_truncated() {
            return Ok(Bytes::new());
        }
        match &mut self.reader {
            FormatReader::Sse(blocks) => return observe_events(blocks, frame, &mut self.report),
            FormatReader::Filtered(filter) => return filter.filter_frame(frame, &mut self.report),
            FormatReader::Json(body) => body.read_frame(&frame, &mut self.report),
            FormatReader::Opaque => (),
        }
        Ok(frame)
    }

    /// The upstream has ended in order: reads an event that lacks only its empty line, and returns
    /// what was held back and now goes on.
    pub fn end_of_body(&mut self) -> Option<Bytes> {
        if self.is_truncated() {
            return None;
        }
        match &mut self.reader {
            FormatReader::Sse(blocks) => {
                let begun = blocks.partial_event()?;
                self.report.on_event(&SseEvent::from_lines(begun)?, begun);
                None
            }
            FormatReader::Filtered(filter) => filter.end_of_stream(&mut self.report),
            FormatReader::Json(_) | FormatReader::Opaque => None,
        }
    }

    /// The usage as the provider reported it, once it has reported both sides of it.
    ///
    /// Some upstreams send a running total with every chat chunk: until [`Self::stream_end`] says that
    /// the response has ended, the output may still grow.
    pub fn reported_usage(&self) -> Option<TokenUsage> {
        self.report.reported_usage()
    }

    /// What the provider has reported so far, zero where it has not: of a Messages stream that was
    /// cut, the exact input. The better half of an estimate.
    pub fn partial_usage(&self) -> Option<TokenUsage> {
        self.report.partial_usage()
    }

    /// LiteLLM's own figure, from the usage chunk or object. A cross-check, never a charge: a model
    /// that it cannot price costs nothing there.
    pub fn reported_cost(&self) -> Option<Nanodollars> {
        self.report.reported_cost()
    }

    pub fn stream_end(&self) -> StreamEnd {
        self.report.stream_end()
    }

    /// Whether what passed last is an error, or the beginning of an event that may become one.
    pub fn may_be_error(&self) -> bool {
        let is_in_event = match &self.reader {
            FormatReader::Sse(blocks) => blocks.is_in_event(),
            FormatReader::Filtered(filter) => filter.is_in_event(),
            FormatReader::Json(_) | FormatReader::Opaque => false,
        };
        is_in_event || self.report.has_error()
    }

    /// Whether the stream has written more than it was granted: what [`Self::read_frame`] returned last
    /// has ended it for the client, and the upstream has nothing more to say.
    pub fn is_truncated(&self) -> bool {
        self.report.is_truncated()
    }

    /// What the text that was seen comes to, estimated on the high side: what a stream is charged
    /// where nobody reports. May be more than was granted, which bounds it.
    pub fn output_estimate(&self) -> Tokens {
        self.report.output_estimate().upper_estimate()
    }

    /// What the text that was seen comes to at least: who reports less is not believed.
    pub fn output_lower_bound(&self) -> Tokens {
        self.report.output_estimate().lower_bound()
    }

    /// Texts that were seen so far: grows with each event that brings one.
    pub fn text_count(&self) -> u64 {
        self.report.output_estimate().text_count()
    }
}

fn observe_events(
    blocks: &mut SseParser,
    frame: Bytes,
    report: &mut ResponseReport,
) -> Result<Bytes, EventTooLargeError> {
    let mut at = 0;
    loop {
        let is_between = blocks.is_between_blocks();
        if is_between && at == frame.len() {
            return Ok(frame);
        }
        if is_between && let Some(taken) = report.on_repeated_event(&frame[at..]) {
            at += taken;
        } else {
            let Some(block) = blocks.next_block(&frame[at..])? else { return Ok(frame) };
            at += block.taken;
            let Some(event) = block.parse_event() else { continue };
            report.on_event(&event, block.bytes());
        }
        if let Some(end) = report.truncation_bytes() {
            return Ok([&frame[..at], &end].concat().into());
        }
    }
}
