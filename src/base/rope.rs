//! A body as the frames in which it arrived. Edits do not copy the frames.
//!
//! Frames are reference-counted slices of the socket reader's buffers. An edit cuts a frame and puts a few bytes
//! between the cuts. The payload stays in the buffer that received it until it is sent.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::io::IoSlice;
use std::mem;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use hyper::body::{Body, Frame, SizeHint};

/// A sequence of bytes in pieces. No piece is empty.
#[derive(Clone, Default)]
pub struct ByteRope {
    /// The first piece. Most bodies are one piece, so they need no list.
    first: Bytes,
    more: VecDeque<Bytes>,
    len: u64,
}

/// A rope, and the edits that are applied when it is sent.
#[derive(Debug, Default)]
pub struct SplicedBytes {
    rope: ByteRope,
    edits: Vec<(Range<u64>, Bytes)>,
}

impl ByteRope {
    /// Adds a frame at the end.
    ///
    /// Frames are kept as they are. Neighbours of 1 KiB or less together are copied into one piece: otherwise a client
    /// that sends its body byte by byte would make this program hold a piece, and perhaps a buffer, for each byte.
    pub fn push(&mut self, frame: Bytes) {
        let last = if self.more.is_empty() { Some(&mut self.first) } else { self.more.back_mut() };
        match last.filter(|last| !last.is_empty()) {
            Some(last) if last.len() + frame.len() <= COALESCE_BYTES => {
                self.len += frame.len() as u64;
                *last = append_small(mem::take(last), &frame);
            }
            _ => self.push_coalesced(frame),
        }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Moves a short body to memory of its own. The body may be a small part of a large read buffer, which would not be
    /// free for the next read as long as the body waits.
    pub fn release_read_buffer(&mut self) {
        if self.more.is_empty() && self.first.len() < OWN_MEMORY_BYTES {
            self.first = Bytes::copy_from_slice(&self.first);
        }
    }

    /// Returns the pieces in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        Some(&self.first).filter(|first| !first.is_empty()).into_iter().chain(&self.more)
    }

    pub fn into_pieces(self) -> VecDeque<Bytes> {
        self.iter().cloned().collect()
    }

    /// Removes and returns the first piece.
    pub fn pop_front(&mut self) -> Option<Bytes> {
        let next = self.more.pop_front().unwrap_or_default();
        let piece = mem::replace(&mut self.first, next);
        self.len -= piece.len() as u64;
        (!piece.is_empty()).then_some(piece)
    }

    /// Returns the bytes in `range`, as far as they exist. Bytes in several pieces are copied, so the function is for
    /// small ranges.
    pub fn copy_range(&self, range: Range<u64>) -> Bytes {
        let mut start = 0;
        let cuts = self.iter().filter_map(|piece| {
            let within = |offset: u64| clamp_offset(offset.saturating_sub(start), piece.len());
            let cut = within(range.start)..within(range.end);
            start += piece.len() as u64;
            (!cut.is_empty()).then(|| piece.slice(cut))
        });
        cuts.reduce(|head, next| append_small(head, &next)).unwrap_or_default()
    }

    /// Returns the bytes in `range`, if they are all in the first piece.
    pub fn peek_range(&self, range: Range<u64>) -> Option<&[u8]> {
        self.first.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    }

    /// Returns the bytes from an offset on.
    pub fn bytes_from(&self, offset: u64) -> impl Iterator<Item = u8> {
        let mut before = offset;
        self.iter().flat_map(move |piece| {
            let skipped = clamp_offset(before, piece.len());
            before -= skipped as u64;
            piece[skipped..].iter().copied()
        })
    }

    /// Replaces each range by the bytes beside it.
    ///
    /// # Panics
    ///
    /// Panics if the ranges are not in order, overlap, or reach past the end.
    #[must_use]
    pub fn apply_edits(mut self, edits: impl IntoIterator<Item = (Range<u64>, Bytes)>) -> Self {
        let mut spliced = Self::default();
        let mut at = 0;
        for (range, bytes) in edits {
            assert!(at <= range.start && range.start <= range.end, "edits are in order");
            self.take_front(range.start - at, |piece| spliced.push_coalesced(piece));
            self.take_front(range.end - range.start, drop);
            spliced.push_coalesced(bytes);
            at = range.end;
        }
        self.take_front(self.len, |piece| spliced.push_coalesced(piece));
        spliced
    }

    fn push_coalesced(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.len += piece.len() as u64;
        if self.first.is_empty() {
            self.first = piece;
        } else {
            self.more.push_back(piece);
        }
    }

    /// Removes the first `len` bytes, and calls `each` with every removed piece.
    fn take_front(&mut self, len: u64, mut each: impl FnMut(Bytes)) {
        assert!(len <= self.len, "the rope is {} bytes long, not {len}", self.len);
        self.len -= len;
        let mut left = clamp_offset(len, usize::MAX);
        while left > 0 && !self.first.is_empty() {
            let piece = if left < self.first.len() {
                self.first.split_to(left)
            } else {
                mem::replace(&mut self.first, self.more.pop_front().unwrap_or_default())
            };
            left -= piece.len();
            each(piece);
        }
    }
}

impl SplicedBytes {
    /// Creates the value. The edits must meet the conditions of [`ByteRope::apply_edits`].
    pub fn new(rope: ByteRope, edits: Vec<(Range<u64>, Bytes)>) -> Self {
        Self { rope, edits }
    }

    /// Returns the length in bytes after all edits.
    pub fn len(&self) -> u64 {
        let change = |length: u64, (range, bytes): &(Range<u64>, Bytes)| {
            (length + bytes.len() as u64).saturating_sub(range.end - range.start)
        };
        self.edits.iter().fold(self.rope.len(), change)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Moves a short body to memory of its own ([`ByteRope::release_read_buffer`]).
    pub fn release_read_buffer(&mut self) {
        self.rope.release_read_buffer();
    }

    /// Applies the edits without a copy of the body.
    pub fn into_rope(self) -> ByteRope {
        if self.edits.is_empty() { self.rope } else { self.rope.apply_edits(self.edits) }
    }

    /// Appends a copy of the edited body to `text`. For short bodies a copy is cheaper than cuts.
    pub fn append_to(self, text: &mut Vec<u8>) {
        if !self.rope.more.is_empty() {
            for piece in self.into_rope().iter() {
                text.extend_from_slice(piece);
            }
            return;
        }
        let (whole, mut at) = (&self.rope.first, 0);
        for (range, bytes) in &self.edits {
            text.extend_from_slice(&whole[at..clamp_offset(range.start, whole.len())]);
            text.extend_from_slice(bytes);
            at = clamp_offset(range.end, whole.len());
        }
        text.extend_from_slice(&whole[at..]);
    }
}

/// Lets a vectored write send all pieces.
impl Buf for ByteRope {
    fn remaining(&self) -> usize {
        clamp_offset(self.len, usize::MAX)
    }

    fn chunk(&self) -> &[u8] {
        &self.first
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(self.iter()).map(|(slice, piece)| {
            *slice = IoSlice::new(piece);
        });
        filled.count()
    }

    fn advance(&mut self, len: usize) {
        self.take_front(len as u64, drop);
    }
}

/// Sends the pieces to hyper one by one.
impl Body for ByteRope {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len)
    }
}

impl From<Bytes> for ByteRope {
    fn from(piece: Bytes) -> Self {
        Self { len: piece.len() as u64, first: piece, more: VecDeque::new() }
    }
}

impl FromIterator<Bytes> for ByteRope {
    fn from_iter<I: IntoIterator<Item = Bytes>>(frames: I) -> Self {
        let mut rope = Self::default();
        frames.into_iter().for_each(|frame| rope.push(frame));
        rope
    }
}

/// Shows sizes only, because a body holds prompts.
impl fmt::Debug for ByteRope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rope {{ len: {}, pieces: {} }}", self.len, self.iter().count())
    }
}

/// Appends `tail` to a small piece. It copies the piece only if its buffer is shared.
fn append_small(piece: Bytes, tail: &[u8]) -> Bytes {
    let mut joined = piece.try_into_mut().unwrap_or_else(|piece| {
        let mut copy = BytesMut::with_capacity(COALESCE_BYTES);
        copy.extend_from_slice(&piece);
        copy
    });
    joined.extend_from_slice(tail);
    joined.freeze()
}

fn clamp_offset(offset: u64, limit: usize) -> usize {
    usize::try_from(offset).map_or(limit, |offset| offset.min(limit))
}

/// The size below which a body is moved to memory of its own, in bytes: half of the size of one read.
const OWN_MEMORY_BYTES: usize = 16 * 1024;

/// The largest size of two neighbours that are copied into one piece, in bytes. Our choice: a 32 MiB body never has
/// more than 65,536 pieces (2 MiB of handles), and frames of the usual 8 KiB or more are not copied.
const COALESCE_BYTES: usize = 1024;
