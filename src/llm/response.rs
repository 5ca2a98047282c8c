//! Follows a response as it streams, and returns the bytes to forward: normally unchanged, without
//! the usage chunk that only the gateway requested, or cut at the output limit.
//!
//! The exchange passes each frame to a [`ResponseObserver`] and forwards the returned bytes at
//! once. In pass-through mode the returned bytes are the frame itself. For a chat client that did
//! not request usage, they are the frame without the usage chunk that the gateway requested. Only
//! in that case are bytes ever held back, and only while they may be the beginning of that chunk.
//!
//! Events are read by the WHATWG rules: any line end, a byte order mark, comments, data on many
//! lines, cuts at any byte. An event that only the orderly end of the stream completes is read too,
//! although the rules would drop it. Providers omit the last empty line, and that event contains
//! the usage.
//!
//! A stream whose output is limited is truncated behind the event that exceeds the granted output.
//! The gateway then ends the stream in the way that its protocol defines
//! ([`ResponseObserver::with_allowance`]).
//!
//! **Invariant:** the findings and the forwarded bytes are the same however the response was split
//! into frames. A frame whose events end in the frame and report nothing causes no allocation. The
//! exception is the text of a limited Responses stream, because the end of that protocol repeats
//! the text.

mod answer_keys;
mod delta;
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

pub use self::sse::first_event_end;
pub use output_limiter::{CallAllowance, CutoffMode, OUTPUT_LIMIT_REACHED_CODE};
pub use usage_counts::MAX_REPORTED_TOKENS;

/// The maximum length of one event in bytes, including its line ends. SPEC G7 sets the value. It
/// bounds the bytes kept per stream.
pub const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;

/// An observer of one response.
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

/// The format of a response's body: its content type, if no content encoding applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFormat {
    /// `text/event-stream`.
    Sse,
    /// `application/json`.
    Json,
    /// Any other format. The body passes unread.
    Opaque,
}

/// The treatment of a chat stream's usage chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageChunkMode {
    /// The client requested the chunk, so the client receives it.
    Show,
    /// Only the gateway requested the chunk, so the chunk is removed.
    Hide,
}

/// The end of the response, as the response itself states it. A later value in this order replaces
/// an earlier one, never the reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamEnd {
    /// The response has not stated its end.
    Unfinished,
    /// `[DONE]`, `message_stop`, `response.completed`, `.incomplete` or `.failed`; a JSON body
    /// whose object is closed.
    Terminated,
    /// An error event, or data with an `error`. LiteLLM sends `[DONE]` after an error event.
    Errored,
}

/// The error for an event that is longer than [`MAX_EVENT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "one event of the upstream's stream is over the limit of `{MAX_EVENT_BYTES}` bytes; have the upstream send less in one event"
)]
pub struct EventTooLargeError;

#[derive(Debug)]
enum FormatReader {
    Sse(SseParser),
    Filtered(UsageChunkFilter),
    /// The scanner is made for a body that does not arrive in one frame.
    Json(Option<Box<JsonUsageScanner>>),
    Opaque,
}

impl ResponseFormat {
    /// Returns the format that a response's `content-type` and `content-encoding` declare. An
    /// encoded body is [`ResponseFormat::Opaque`].
    pub fn from_headers(content_type: Option<&[u8]>, encoding: Option<&[u8]>) -> Self {
        // Nearly all providers write it so.
        if encoding.is_none() && content_type == Some(b"application/json") {
            return Self::Json;
        }
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
            // Only the chat protocol has a usage chunk that a request can turn on.
            (ResponseFormat::Sse, UsageChunkMode::Hide)
                if route.protocol() == LlmProtocol::Chat =>
            {
                FormatReader::Filtered(UsageChunkFilter::default())
            }
            (ResponseFormat::Sse, _) => FormatReader::Sse(SseParser::default()),
            (ResponseFormat::Json, _) => FormatReader::Json(None),
            (ResponseFormat::Opaque, _) => FormatReader::Opaque,
        };
        Self { reader, report: ResponseReport::new(route) }
    }

    /// Limits the stream's output: the stream is truncated when it continues after it has written
    /// the granted output. A unary body is never truncated, because it arrives as a whole.
    #[must_use]
    pub fn with_allowance(mut self, allowance: CallAllowance) -> Self {
        let shows_usage = match self.reader {
            FormatReader::Sse(_) => true,
            FormatReader::Filtered(_) => false,
            // The report needs no limit here, and such a body stays in pass-through mode.
            FormatReader::Json(_) | FormatReader::Opaque => return self,
        };
        self.report.set_allowance(allowance, shows_usage);
        self
    }

    /// Returns true if every byte is forwarded and none is added, so that the response's length
    /// stays unchanged.
    pub fn is_passthrough(&self) -> bool {
        !matches!(self.reader, FormatReader::Filtered(_)) && !self.report.is_limited()
    }

    /// Reads a frame and returns the bytes to forward to the client, which may be empty. If this
    /// frame [truncates the stream](Self::is_truncated), the returned bytes also end the stream,
    /// and every later call returns nothing.
    ///
    /// # Errors
    /// Returns [`EventTooLargeError`] if an event is too long. The caller must then abort the
    /// response, because the observer has lost its position in the stream.
    pub fn read_frame(&mut self, frame: Bytes) -> Result<Bytes, EventTooLargeError> {
        // The client has its ending; the rest of the upstream's stream is dropped.
        if self.is_truncated() {
            return Ok(Bytes::new());
        }
        match &mut self.reader {
            FormatReader::Sse(blocks) => return observe_events(blocks, frame, &mut self.report),
            FormatReader::Filtered(filter) => return filter.filter_frame(frame, &mut self.report),
            FormatReader::Json(scanner) => read_json_frame(scanner, &frame, &mut self.report),
            FormatReader::Opaque => (),
        }
        Ok(frame)
    }

    /// Handles the orderly end of the upstream's body. Reads an event that lacks only its empty
    /// line, and returns bytes that were held back and must now be forwarded.
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

    /// Returns the usage as the provider reported it, once both input and output are reported.
    ///
    /// Some upstreams send a running total with every chat chunk. Until [`Self::stream_end`]
    /// reports an end, the output may still grow.
    pub fn reported_usage(&self) -> Option<TokenUsage> {
        self.report.reported_usage()
    }

    /// Returns the usage that the provider has reported so far, with zero for missing parts. A
    /// Messages stream that was aborted has the exact input here, which improves an estimate.
    pub fn partial_usage(&self) -> Option<TokenUsage> {
        self.report.partial_usage()
    }

    /// Returns LiteLLM's own cost figure from the usage chunk or object. The figure is a
    /// cross-check, never a charge: LiteLLM reports a cost of zero for a model that it cannot
    /// price.
    pub fn reported_cost(&self) -> Option<Nanodollars> {
        self.report.reported_cost()
    }

    pub fn stream_end(&self) -> StreamEnd {
        self.report.stream_end()
    }

    /// Returns the number of a stream's answers that the provider has ended: by a `finish_reason` or a `stop_reason`, which
    /// come before the usage.
    pub fn finished_answers(&self) -> u32 {
        self.report.finished_answers()
    }

    /// Returns true if the response reported an error, including an orderly end with a failure.
    pub fn has_error(&self) -> bool {
        self.report.has_error()
    }

    /// Returns the number of bytes of an event that has begun and not ended, or 0. The event may become an error. Its
    /// last bytes are at the end of the forwarded bytes, unless they are held back.
    pub fn open_event_bytes(&self) -> usize {
        match &self.reader {
            FormatReader::Sse(blocks) => blocks.open_event_bytes(),
            FormatReader::Filtered(filter) => filter.open_event_bytes(),
            FormatReader::Json(_) | FormatReader::Opaque => 0,
        }
    }

    /// Returns the size of the buffer for an event that is not complete, in bytes, at most [`MAX_EVENT_BYTES`].
    pub fn buffer_bytes(&self) -> usize {
        match &self.reader {
            FormatReader::Sse(blocks) => blocks.buffer_bytes(),
            FormatReader::Filtered(filter) => filter.buffer_bytes(),
            FormatReader::Json(_) | FormatReader::Opaque => 0,
        }
    }

    /// Returns true if the stream wrote more than it was granted. The bytes that
    /// [`Self::read_frame`] returned last have ended the stream for the client, and the upstream's
    /// further bytes are not needed.
    pub fn is_truncated(&self) -> bool {
        self.report.is_truncated()
    }

    /// Returns the tokens of the text seen so far, estimated on the high side. A stream without a
    /// usage report is charged this amount. The estimate may exceed the granted output, which then
    /// bounds the charge.
    pub fn output_estimate(&self) -> Tokens {
        self.report.output_estimate().upper_estimate()
    }

    /// Returns the minimum number of tokens of the text seen so far. A usage report below this
    /// number is not believed.
    pub fn output_lower_bound(&self) -> Tokens {
        self.report.output_estimate().lower_bound()
    }

    /// Returns the number of texts seen so far. The number grows with each event that contains
    /// text.
    pub fn text_count(&self) -> u64 {
        self.report.output_estimate().text_count()
    }
}

/// Reads a frame of a JSON body. The first frame is nearly always the whole body, and then needs no scanner.
fn read_json_frame(
    scanner: &mut Option<Box<JsonUsageScanner>>,
    frame: &[u8],
    report: &mut ResponseReport,
) {
    // Once there is a scanner, it has the state of the earlier frames, and no frame is a whole body.
    if scanner.is_some() || !whole_body::read_whole_body(frame, report) {
        scanner.get_or_insert_default().read_frame(frame, report);
    }
}

fn observe_events(
    blocks: &mut SseParser,
    frame: Bytes,
    report: &mut ResponseReport,
) -> Result<Bytes, EventTooLargeError> {
    let mut at = 0;
    loop {
        // Two ways to read an event. 1. Between blocks, an event that repeats the previous one with
        // another text is matched as a whole, without a parser. 2. Otherwise the parser cuts the
        // next block.
        let is_between = blocks.is_between_blocks();
        if is_between && at == frame.len() {
            return Ok(frame);
        }
        if is_between && let Some(taken) = report.on_repeated_event(&frame[at..]) {
            at += taken;
        } else {
            let Some(block) = blocks.next_block(&frame[at..])? else { return Ok(frame) };
            at += block.consumed;
            let Some(event) = block.parse_event() else { continue };
            report.on_event(&event, block.bytes());
        }
        // The truncation takes effect behind the event just read; the rest of the frame is dropped.
        if let Some(end) = report.truncation_bytes() {
            return Ok([&frame[..at], &end].concat().into());
        }
    }
}
