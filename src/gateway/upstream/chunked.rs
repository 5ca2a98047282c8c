//! A decoder for the chunked transfer coding that works in place (RFC 9112, section 7.1).

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

/// The largest number of hexadecimal digits in a size. Fifteen digits are 2^60 bytes; one digit more could overflow
/// sums.
const MAX_SIZE_DIGITS: u8 = 15;

/// The largest number of framing bytes in a row. Real servers send no extensions or trailers of that size; hyper allows
/// 16 KiB of each.
const MAX_OVERHEAD_BYTES: usize = 16 * 1024;
