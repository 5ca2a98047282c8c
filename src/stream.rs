//! Reads a copy of a response as it passes: the tokens it used, its cost, how it ended.
//!
//! The exchange shows each frame to an [`Observer`] and sends on what that returns, at once. In
//! pass-through that is the frame itself. For a chat client that did not ask for usage it is the
//! frame less the usage chunk that we asked for: the only case in which bytes are ever held back,
//! and only while they may be the beginning of that chunk.
//!
//! Events are read by the WHATWG rules: any line end, a byte order mark, comments, data on many
//! lines, cuts anywhere. An event that the stream's orderly end has ended is read too, though
//! the rules would drop it: providers leave out the last empty line, and the count is in there.
//!
//! A stream whose output is limited is cut behind the event that goes over what was granted, and
//! ended in the way its protocol understands ([`Observer::limited`]).
//!
//! **Invariant:** what is observed and what goes on are the same however the response was split
//! into frames, and nothing is allocated for a frame whose events end in it and report nothing, but
//! for the text of a limited Responses stream, which the end of that protocol repeats.

mod body;
mod delta;
mod filter;
mod limit;
mod pattern;
mod report;
mod sse;
mod tally;
mod unknown;
mod whole;
mod written;

use bytes::Bytes;

use self::body::Body;
use self::filter::Filter;
use self::report::Report;
use self::sse::{Blocks, Event};
use crate::budget::{Nanodollars, Tokens, Usage};
use crate::protocol::{Protocol, Route};

pub use limit::{Allowance, Cutoff, OUTPUT_LIMIT_REACHED};

/// Bytes of one event, its line ends included; SPEC G7 sets it. It bounds what is kept per stream.
pub const MAX_EVENT: usize = 8 * 1024 * 1024;

/// Reads one response.
///
/// ```
/// use bytes::Bytes;
/// use cogni_gateway::protocol::Route;
/// use cogni_gateway::stream::{Finish, Format, Observer, UsageChunk};
///
/// let mut observer = Observer::new(Route::Messages, Format::Sse, UsageChunk::Show);
/// let frame = Bytes::from_static(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
/// assert_eq!(observer.frame(frame.clone())?, frame);
/// assert_eq!(observer.finish(), Finish::Terminated);
/// # Ok::<(), cogni_gateway::stream::Oversize>(())
/// ```
#[derive(Debug)]
pub struct Observer {
    reader: Reader,
    report: Report,
}

/// How the response's body is to be read: its content type, where nothing encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `text/event-stream`.
    Sse,
    /// `application/json`.
    Json,
    /// Anything else: it passes unread.
    Opaque,
}

/// What becomes of a chat stream's usage chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageChunk {
    /// The client asked for it.
    Show,
    /// Only we asked for it.
    Hide,
}

/// How the response ended, by its own words. What came later in this list is not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finish {
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
    "one event of the upstream's stream is over the limit of `{MAX_EVENT}` bytes; have the upstream send less in one event"
)]
pub struct Oversize;

#[derive(Debug)]
enum Reader {
    Sse(Blocks),
    Filtered(Filter),
    Json(Box<Body>),
    Opaque,
}

impl Format {
    /// The format that a response's `content-type` and `content-encoding` declare. What is encoded cannot be read.
    pub fn of(content_type: Option<&[u8]>, encoding: Option<&[u8]>) -> Self {
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

impl Observer {
    pub fn new(route: Route, format: Format, usage_chunk: UsageChunk) -> Self {
        let reader = match (format, usage_chunk) {
            // Only chat has a chunk that can be asked for.
            (Format::Sse, UsageChunk::Hide) if route.protocol() == Protocol::Chat => {
                Reader::Filtered(Filter::default())
            }
            (Format::Sse, _) => Reader::Sse(Blocks::default()),
            (Format::Json, _) => Reader::Json(Box::default()),
            (Format::Opaque, _) => Reader::Opaque,
        };
        Self { reader, report: Report::new(route) }
    }

    /// Has the stream cut where it goes on after it has written what was granted. A unary body is
    /// there as a whole or not at all: it is never cut.
    #[must_use]
    pub fn limited(mut self, allowance: Allowance) -> Self {
        let shows_usage = match self.reader {
            Reader::Sse(_) => true,
            Reader::Filtered(_) => false,
            Reader::Json(_) | Reader::Opaque => return self,
        };
        self.report.limit(allowance, shows_usage);
        self
    }

    /// Whether every byte goes on and none is added, so that the length stays what it was.
    pub fn is_transparent(&self) -> bool {
        !matches!(self.reader, Reader::Filtered(_)) && !self.report.is_limited()
    }

    /// Reads a frame; returns what goes on to the client, which may be empty. If the stream
    /// [is cut](Self::is_cut) by it, that is all, and ends the stream.
    ///
    /// After [`Oversize`] the response is to be cut: the observer has lost its place in it.
    pub fn frame(&mut self, frame: Bytes) -> Result<Bytes, Oversize> {
        if self.is_cut() {
            return Ok(Bytes::new());
        }
        match &mut self.reader {
            Reader::Sse(blocks) => return observe(blocks, frame, &mut self.report),
            Reader::Filtered(filter) => return filter.frame(frame, &mut self.report),
            Reader::Json(body) => body.read(&frame, &mut self.report),
            Reader::Opaque => (),
        }
        Ok(frame)
    }

    /// The upstream has ended in order: reads an event that lacks only its empty line, and returns
    /// what was held back and now goes on.
    pub fn end(&mut self) -> Option<Bytes> {
        if self.is_cut() {
            return None;
        }
        match &mut self.reader {
            Reader::Sse(blocks) => {
                let begun = blocks.unended()?;
                self.report.hear(&Event::from_lines(begun)?, begun);
                None
            }
            Reader::Filtered(filter) => filter.end(&mut self.report),
            Reader::Json(_) | Reader::Opaque => None,
        }
    }

    /// The usage as the provider reported it, once it has reported both sides of it.
    ///
    /// Some upstreams send a running total with every chat chunk: until [`Self::finish`] says that
    /// the response has ended, the output may still grow.
    pub fn usage(&self) -> Option<Usage> {
        self.report.usage()
    }

    /// What the provider has reported so far, zero where it has not: of a Messages stream that was
    /// cut, the exact input. The better half of an estimate.
    pub fn usage_so_far(&self) -> Option<Usage> {
        self.report.so_far()
    }

    /// LiteLLM's own figure, from the usage chunk or object. A cross-check, never a charge: a model
    /// that it cannot price costs nothing there.
    pub fn cost(&self) -> Option<Nanodollars> {
        self.report.cost()
    }

    pub fn finish(&self) -> Finish {
        self.report.finish()
    }

    /// Whether what passed last is an error, or the beginning of an event that may become one.
    pub fn may_be_error(&self) -> bool {
        let is_in_event = match &self.reader {
            Reader::Sse(blocks) => blocks.is_in_event(),
            Reader::Filtered(filter) => filter.is_in_event(),
            Reader::Json(_) | Reader::Opaque => false,
        };
        is_in_event || self.report.has_error()
    }

    /// Whether the stream has written more than it was granted: what [`Self::frame`] returned last
    /// has ended it for the client, and the upstream has nothing more to say.
    pub fn is_cut(&self) -> bool {
        self.report.is_cut()
    }

    /// What the text that was seen comes to, estimated on the high side: what a stream is charged
    /// where nobody reports. May be more than was granted, which bounds it.
    pub fn output_estimate(&self) -> Tokens {
        self.report.written().estimate()
    }

    /// What the text that was seen comes to at least: who reports less is not believed.
    pub fn output_at_least(&self) -> Tokens {
        self.report.written().at_least()
    }

    /// Texts that were seen so far: grows with each event that brings one.
    pub fn texts(&self) -> u64 {
        self.report.written().pieces()
    }
}

fn observe(blocks: &mut Blocks, frame: Bytes, report: &mut Report) -> Result<Bytes, Oversize> {
    let mut at = 0;
    loop {
        let is_between = blocks.is_between();
        if is_between && at == frame.len() {
            return Ok(frame);
        }
        if is_between && let Some(taken) = report.hear_repeated(&frame[at..]) {
            at += taken;
        } else {
            let Some(block) = blocks.next(&frame[at..])? else { return Ok(frame) };
            at += block.taken;
            let Some(event) = block.event() else { continue };
            report.hear(&event, block.bytes());
        }
        if let Some(end) = report.cut() {
            return Ok([&frame[..at], &end].concat().into());
        }
    }
}
