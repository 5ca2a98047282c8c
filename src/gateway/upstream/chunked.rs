//! A decoder for the chunked transfer coding that works in place (RFC 9112, section 7.1).

use std::ops::Range;

/// A decoder for a chunked body. The body may arrive in pieces of any size.
#[derive(Debug, Default)]
pub(super) struct ChunkedDecoder {
    state: ChunkDecoderState,
    /// The bytes of framing since the last payload byte. The count bounds a body that consists of framing only.
    overhead: usize,
}

/// The result of decoding one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodedChunk {
    /// The number of payload bytes, which are moved to the front of the buffer.
    pub(super) payload: usize,
    /// The number of bytes taken from the buffer. Bytes behind them belong to the next response.
    pub(super) consumed: usize,
    /// True if the body is complete.
    pub(super) complete: bool,
}

/// A position in the framing: size, payload and line end for each chunk, then the trailers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkDecoderState {
    /// Reading a chunk's size: the number of digits so far, and their value.
    Size {
        digits: u8,
        size: u64,
    },
    /// Skipping a chunk extension, up to its carriage return.
    Extension {
        size: u64,
    },
    /// Expecting the line feed behind a size.
    SizeEnd {
        size: u64,
    },
    Payload {
        left: u64,
    },
    PayloadCr,
    PayloadLf,
    /// The start of a trailer line, or of the empty line that ends the body.
    TrailerStart,
    Trailer,
    End,
    Complete,
}

impl ChunkedDecoder {
    /// Decodes as much as possible of `buffer`, and moves the payload of all its chunks together to the front.
    ///
    /// # Errors
    /// Returns a message if the framing is not valid.
    pub(super) fn decode_buffer(
        &mut self,
        buffer: &mut [u8],
    ) -> Result<DecodedChunk, &'static str> {
        let (mut read, mut payload) = (0, 0);
        while read < buffer.len() && self.state != ChunkDecoderState::Complete {
            // Payload is moved as a block; only framing is read byte by byte.
            if let ChunkDecoderState::Payload { left } = self.state {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len() - read);
                // `payload <= read` always, so the copy never overwrites bytes that are not read yet.
                buffer.copy_within(read..read + length, payload);
                read += length;
                payload += length;
                // Payload is progress, so the allowance for framing starts again.
                self.overhead = 0;
                let left = left - length as u64;
                self.state = if left == 0 {
                    ChunkDecoderState::PayloadCr
                } else {
                    ChunkDecoderState::Payload { left }
                };
            } else if let Some(chunk) = self.whole_chunk(&buffer[read..]) {
                let (start, end) = (read + chunk.start, read + chunk.end);
                buffer.copy_within(start..end, payload);
                payload += end - start;
                read = end + LINE_END.len();
                self.overhead = LINE_END.len();
            } else {
                self.state = self.decode_byte(buffer[read])?;
                read += 1;
            }
        }
        Ok(DecodedChunk {
            payload,
            consumed: read,
            complete: self.state == ChunkDecoderState::Complete,
        })
    }

    /// Returns the place of the payload, if `data` begins with a whole chunk without an extension. Nearly every event of
    /// a stream is such a chunk. Anything else is read byte by byte.
    fn whole_chunk(&self, data: &[u8]) -> Option<Range<usize>> {
        if self.state != ChunkDecoderState::default() || self.overhead > LINE_END.len() {
            return None;
        }
        let (mut size, mut digits) = (0, 0);
        while let Some(digit) = char::from(*data.get(digits)?).to_digit(16) {
            size = size << 4 | usize::try_from(digit).ok()?;
            digits += 1;
            if digits > MAX_SHORT_DIGITS {
                return None;
            }
        }
        let start = digits + LINE_END.len();
        let end = start + size;
        // A size of 0 ends the chunks, and a size without digits is an error.
        let is_whole = size > 0
            && data[digits..].starts_with(LINE_END)
            && data.get(end..).is_some_and(|rest| rest.starts_with(LINE_END));
        is_whole.then_some(start..end)
    }

    /// Reads one byte of framing and returns the next state.
    fn decode_byte(&mut self, byte: u8) -> Result<ChunkDecoderState, &'static str> {
        self.overhead += 1;
        if self.overhead > MAX_OVERHEAD_BYTES {
            return Err("chunk framing is too long");
        }
        match (self.state, byte) {
            // 1. The size line: hexadecimal digits, then an optional extension, which has no meaning here.
            (ChunkDecoderState::Size { digits, size }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if digits == MAX_SIZE_DIGITS {
                    return Err("chunk size is too large");
                }
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                Ok(ChunkDecoderState::Size {
                    digits: digits + 1,
                    size: size << 4 | u64::from(digit),
                })
            }
            (ChunkDecoderState::Size { digits: 0, .. }, _) => Err("chunk size is missing"),
            (
                ChunkDecoderState::Size { size, .. } | ChunkDecoderState::Extension { size },
                b'\r',
            ) => Ok(ChunkDecoderState::SizeEnd { size }),
            // Servers disagree on a bare line feed here. That difference allows smuggling, so the decoder rejects it.
            (ChunkDecoderState::Extension { .. }, b'\n') => {
                Err("bare line feed in a chunk extension")
            }
            (ChunkDecoderState::Size { size, .. }, b';' | b' ' | b'\t')
            | (ChunkDecoderState::Extension { size }, _) => {
                Ok(ChunkDecoderState::Extension { size })
            }
            (ChunkDecoderState::Size { .. }, _) => Err("chunk size is not a number"),
            // 2. A size above 0 starts a chunk. The chunk's payload is followed by a line end.
            (ChunkDecoderState::SizeEnd { size: left @ 1.. }, b'\n') => {
                Ok(ChunkDecoderState::Payload { left })
            }
            // The next chunk starts with its size again.
            (ChunkDecoderState::PayloadCr, b'\r') => Ok(ChunkDecoderState::PayloadLf),
            (ChunkDecoderState::PayloadLf, b'\n') => Ok(ChunkDecoderState::default()),
            // 3. A size of 0 ends the chunks. Trailer lines are skipped up to an empty line.
            (ChunkDecoderState::TrailerStart, b'\r') => Ok(ChunkDecoderState::End),
            (ChunkDecoderState::SizeEnd { size: 0 } | ChunkDecoderState::Trailer, b'\n') => {
                Ok(ChunkDecoderState::TrailerStart)
            }
            (ChunkDecoderState::TrailerStart | ChunkDecoderState::Trailer, _) => {
                Ok(ChunkDecoderState::Trailer)
            }
            (ChunkDecoderState::End, b'\n') => Ok(ChunkDecoderState::Complete),
            _ => Err("chunk is not followed by a line end"),
        }
    }
}

impl Default for ChunkDecoderState {
    fn default() -> Self {
        Self::Size { digits: 0, size: 0 }
    }
}

const LINE_END: &[u8] = b"\r\n";

/// The largest number of hexadecimal digits in the size of a chunk that is read as a whole. No buffer holds a chunk with
/// more digits.
const MAX_SHORT_DIGITS: usize = 6;

/// The largest number of hexadecimal digits in a size. Fifteen digits are 2^60 bytes; one digit more could overflow
/// sums.
const MAX_SIZE_DIGITS: u8 = 15;

/// The largest number of framing bytes in a row. Real servers send no extensions or trailers of that size; hyper allows
/// 16 KiB of each.
const MAX_OVERHEAD_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ChunkedDecoder;

    /// Decodes a body in pieces of a size. Returns the payload, and the result of each piece's decoding.
    fn decode(body: &[u8], piece: usize) -> (Vec<u8>, Result<bool, &'static str>) {
        let (mut decoder, mut payload, mut is_complete) =
            (ChunkedDecoder::default(), vec![], false);
        for piece in body.chunks(piece) {
            let mut buffer = piece.to_vec();
            match decoder.decode_buffer(&mut buffer) {
                Ok(progress) => {
                    payload.extend_from_slice(&buffer[..progress.payload]);
                    is_complete = progress.complete;
                }
                Err(why) => return (payload, Err(why)),
            }
        }
        (payload, Ok(is_complete))
    }

    fn body() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop::sample::select(vec![
            "5\r\nhello\r\n",
            "00A\r\n0123456789\r\n",
            "1\r\n\r\r\n",
            "3;x=y\r\nabc\r\n",
            "0\r\n",
            "\r\n",
            "a: b\r\n",
            "2",
            "\r",
            "\n",
            "0000003\r\nabc\r\n",
            "ffffff",
            "x",
        ]);
        prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat().into_bytes())
    }

    proptest! {
        /// A chunk that is read as a whole is read as it is byte by byte.
        #[test]
        fn pieces_of_any_size_decode_to_the_same_body(body in body(), piece in 1_usize..40) {
            let (bytewise, end) = decode(&body, 1);
            let (payload, other_end) = decode(&body, piece);
            prop_assert_eq!(end, other_end);
            if end.is_ok() {
                prop_assert_eq!(bytewise, payload);
            }
        }
    }
}
