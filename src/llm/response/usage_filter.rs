//! Takes the usage chunk that we asked for, and the client did not, out of a chat stream.
//!
//! Everything else goes on byte for byte. A frame from which nothing is taken goes on as it is;
//! bytes are held back only while they may be the beginning of that chunk.
//!
//! **Invariant:** what goes on is the same however the stream was split into frames.

use std::mem;
use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

use super::EventTooLargeError;
use super::report::{ResponseReport, StreamEventClass};
use super::sse::{SseBlockKind, SseEvent, SseParser};

/// The events of a stream, less the usage chunk.
#[derive(Debug, Default)]
pub(super) struct UsageChunkFilter {
    blocks: SseParser,
    /// The block before was taken out.
    has_hidden: bool,
    /// The begun event goes on: it cannot be the usage chunk.
    has_let_go: bool,
}

impl UsageChunkFilter {
    pub(super) fn filter_frame(
        &mut self,
        frame: Bytes,
        report: &mut ResponseReport,
    ) -> Result<Bytes, EventTooLargeError> {
        let mut passed = ForwardedBytes::default();
        let mut at = 0;
        loop {
            let is_between = self.blocks.is_between_blocks();
            if is_between && at == frame.len() {
                break;
            }
            // Between two blocks nothing is held back, and nothing has been let go.
            if is_between && let Some(taken) = report.on_repeated_event(&frame[at..]) {
                self.has_hidden = false;
                passed.forward_range(&frame, at..at + taken);
                at += taken;
            } else {
                let Some(block) = self.blocks.next_block(&frame[at..])? else { break };
                let had_let_go = mem::take(&mut self.has_let_go);
                let bytes = block.bytes();
                self.has_hidden = match (block.kind, block.parse_event()) {
                    (SseBlockKind::LineFeed, _) => self.has_hidden,
                    (_, Some(event)) => {
                        report.on_event(&event, bytes).is_usage_chunk() && may_be_usage_chunk(bytes)
                    }
                    (_, None) => false,
                };
                let end = at + block.taken;
                if !self.has_hidden {
                    if !had_let_go {
                        passed.forward_copy(&frame, block.carried_bytes());
                    }
                    passed.forward_range(&frame, at..end);
                }
                at = end;
            }
            if let Some(closing) = report.truncation_bytes() {
                passed.forward_copy(&frame, &closing);
                return Ok(passed.into_forwarded(frame));
            }
        }
        self.release_held(&frame, at, &mut passed);
        Ok(passed.into_forwarded(frame))
    }

    /// Lets the begun event go as soon as it cannot be the usage chunk; `frame[at..]` is its latest part.
    fn release_held(&mut self, frame: &Bytes, at: usize, passed: &mut ForwardedBytes) {
        if at == frame.len() {
            return;
        }
        if let Some(begun) = self.blocks.partial_event()
            && !self.has_let_go
        {
            if may_be_usage_chunk(begun) {
                return;
            }
            passed.forward_copy(frame, &begun[..begun.len() - (frame.len() - at)]);
        }
        self.has_let_go = true;
        passed.forward_range(frame, at..frame.len());
    }

    /// See [`SseParser::is_in_event`].
    pub(super) fn is_in_event(&self) -> bool {
        self.blocks.is_in_event()
    }

    /// Reads an event that the stream's end has ended, and returns it if it was held back.
    pub(super) fn end_of_stream(&mut self, report: &mut ResponseReport) -> Option<Bytes> {
        let begun = self.blocks.partial_event()?;
        let heard = SseEvent::from_lines(begun)
            .map_or(StreamEventClass::Other, |event| report.on_event(&event, begun));
        if self.has_let_go
            || begun.is_empty()
            || (heard.is_usage_chunk() && may_be_usage_chunk(begun))
        {
            return None;
        }
        Some(Bytes::copy_from_slice(begun))
    }
}

/// Whether a block that begins so may be taken out.
///
/// If it says no to a beginning, it says no to everything that begins so: that is what lets us
/// forward the beginning of an event before its end is known, and still always decide alike.
fn may_be_usage_chunk(beginning: &[u8]) -> bool {
    if beginning.len() > MAX_USAGE_CHUNK_BYTES {
        return false;
    }
    let Some(at) = memmem::find(beginning, CHOICES_KEY) else { return true };
    let mut rest = &beginning[at + CHOICES_KEY.len()..];
    for expected in *b":[]" {
        rest = rest.trim_ascii_start();
        match rest.split_first() {
            None => return true,
            Some((byte, after)) if *byte == expected => rest = after,
            Some(_) => return false,
        }
    }
    true
}

/// What of a frame goes on: a range of it as long as that will do, a copy otherwise.
#[derive(Debug, Default)]
struct ForwardedBytes {
    copied: Vec<u8>,
    /// Goes on after what was copied.
    range: Range<usize>,
}

impl ForwardedBytes {
    fn forward_range(&mut self, frame: &Bytes, range: Range<usize>) {
        if self.range.end == range.start && !self.range.is_empty() {
            self.range.end = range.end;
        } else {
            self.copied.extend_from_slice(&frame[mem::replace(&mut self.range, range)]);
        }
    }

    /// Bytes that are not in this frame go on.
    fn forward_copy(&mut self, frame: &Bytes, held: &[u8]) {
        if !held.is_empty() {
            self.copied.extend_from_slice(&frame[mem::take(&mut self.range)]);
            self.copied.extend_from_slice(held);
        }
    }

    fn into_forwarded(mut self, frame: Bytes) -> Bytes {
        if self.copied.is_empty() {
            return if self.range.len() == frame.len() { frame } else { frame.slice(self.range) };
        }
        self.copied.extend_from_slice(&frame[self.range]);
        self.copied.into()
    }
}

const CHOICES_KEY: &[u8] = b"\"choices\"";

/// Real usage chunks are under 2 KiB, LiteLLM's cost breakdown included.
const MAX_USAGE_CHUNK_BYTES: usize = 16 * 1024;
