//! Removes the usage chunk from a chat stream if the gateway requested the chunk and the client did
//! not.
//!
//! All other bytes are forwarded unchanged. A frame from which nothing is removed is forwarded
//! without a copy. Bytes are held back only while they may be the beginning of that chunk.
//!
//! **Invariant:** the forwarded bytes are the same however the stream was split into frames.

use std::mem;
use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

use super::EventTooLargeError;
use super::report::{ResponseReport, StreamEventClass};
use super::sse::{SseBlockKind, SseEvent, SseParser};

/// A filter that forwards a stream's events without the usage chunk.
#[derive(Debug, Default)]
pub(super) struct UsageChunkFilter {
    blocks: SseParser,
    /// True if the previous block was removed.
    has_hidden: bool,
    /// True if the begun event is being forwarded, because it cannot be the usage chunk.
    is_forwarding: bool,
}

impl UsageChunkFilter {
    /// Reads a frame, and returns the bytes to forward to the client.
    ///
    /// # Errors
    /// Returns [`EventTooLargeError`] if an event is too long.
    pub(super) fn filter_frame(
        &mut self,
        frame: Bytes,
        report: &mut ResponseReport,
    ) -> Result<Bytes, EventTooLargeError> {
        let mut passed = ForwardedBytes::default();
        let mut at = 0;
        // Each round handles one block: 1. match a repeated event, or parse the block; 2. forward
        // or remove the block; 3. stop if the budget truncates the stream. After the last block,
        // the begun event is released if it cannot be the usage chunk.
        loop {
            let is_between = self.blocks.is_between_blocks();
            if is_between && at == frame.len() {
                break;
            }
            // Between two blocks, no bytes are held back and no event is being forwarded.
            if is_between && let Some(taken) = report.on_repeated_event(&frame[at..]) {
                self.has_hidden = false;
                passed.forward_range(&frame, at..at + taken);
                at += taken;
            } else {
                let Some(block) = self.blocks.next_block(&frame[at..])? else { break };
                let had_let_go = mem::take(&mut self.is_forwarding);
                let bytes = block.bytes();
                self.has_hidden = match (block.kind, block.parse_event()) {
                    // The line feed of a CR LF pair shares the fate of the block that it belongs
                    // to.
                    (SseBlockKind::LineFeed, _) => self.has_hidden,
                    (_, Some(event)) => {
                        // Both checks must agree. The second makes the decision the same as the one
                        // that `release_held` takes on a beginning of the event.
                        report.on_event(&event, bytes).is_usage_chunk() && may_be_usage_chunk(bytes)
                    }
                    (_, None) => false,
                };
                let end = at + block.consumed;
                if !self.has_hidden {
                    // Carried bytes were held back in earlier frames, unless `release_held` already
                    // forwarded them.
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

    /// Forwards the begun event as soon as it cannot be the usage chunk. `frame[at..]` is the
    /// event's latest part.
    fn release_held(&mut self, frame: &Bytes, at: usize, passed: &mut ForwardedBytes) {
        if at == frame.len() {
            return;
        }
        if let Some(begun) = self.blocks.partial_event()
            && !self.is_forwarding
        {
            if may_be_usage_chunk(begun) {
                return;
            }
            // Held bytes of earlier frames come first. The part of this frame follows as a range.
            passed.forward_copy(frame, &begun[..begun.len() - (frame.len() - at)]);
        }
        self.is_forwarding = true;
        passed.forward_range(frame, at..frame.len());
    }

    /// Returns [`SseParser::buffer_bytes`] of the inner parser.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.blocks.buffer_bytes()
    }

    /// Returns [`SseParser::open_event_bytes`] of the inner parser.
    pub(super) fn open_event_bytes(&self) -> usize {
        self.blocks.open_event_bytes()
    }

    /// Reads an event that the stream's end completes, and returns the event if it was held back.
    pub(super) fn end_of_stream(&mut self, report: &mut ResponseReport) -> Option<Bytes> {
        let begun = self.blocks.partial_event()?;
        let class = SseEvent::from_lines(begun)
            .map_or(StreamEventClass::Other, |event| report.on_event(&event, begun));
        if self.is_forwarding
            || begun.is_empty()
            || (class.is_usage_chunk() && may_be_usage_chunk(begun))
        {
            return None;
        }
        Some(Bytes::copy_from_slice(begun))
    }
}

/// Returns true if a block with this beginning may be removed.
///
/// If the result is `false` for a beginning, the result is `false` for every continuation. So the
/// filter can forward the beginning of an event before its end is known, and the decision is the
/// same for every split.
fn may_be_usage_chunk(beginning: &[u8]) -> bool {
    if beginning.len() > MAX_USAGE_CHUNK_BYTES {
        return false;
    }
    let Some(at) = memmem::find(beginning, CHOICES_KEY) else { return true };
    // The beginning may stop anywhere inside `"choices":[]`; an unfinished match stays possible.
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

/// The forwarded part of a frame: a range of the frame as long as one range suffices, otherwise a
/// copy.
#[derive(Debug, Default)]
struct ForwardedBytes {
    copied: Vec<u8>,
    /// The range to forward behind the copied bytes.
    range: Range<usize>,
}

impl ForwardedBytes {
    /// Forwards a range of the frame.
    fn forward_range(&mut self, frame: &Bytes, range: Range<usize>) {
        // Adjacent ranges merge. A gap forces the earlier range into the copy.
        if self.range.end == range.start && !self.range.is_empty() {
            self.range.end = range.end;
        } else {
            self.copied.extend_from_slice(&frame[mem::replace(&mut self.range, range)]);
        }
    }

    /// Forwards bytes that are not part of this frame.
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

/// The maximum length of a usage chunk in bytes. Real usage chunks are under 2 KiB, including
/// LiteLLM's cost breakdown.
const MAX_USAGE_CHUNK_BYTES: usize = 16 * 1024;
