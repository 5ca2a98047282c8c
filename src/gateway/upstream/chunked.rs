//! The chunked transfer coding, decoded in place (RFC 9112, section 7.1).

/// Decodes a chunked body, whatever the pieces it arrives in.
#[derive(Debug, Default)]
pub(super) struct ChunkedDecoder {
    state: ChunkDecoderState,
    /// Bytes of framing since the last payload byte, so that framing alone cannot go on for ever.
    overhead: usize,
}

/// What one buffer held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodedChunk {
    /// Payload, moved to the front of the buffer.
    pub(super) payload: usize,
    /// Bytes taken from the buffer; what follows belongs to the next response.
    pub(super) consumed: usize,
    /// Whether the body is complete.
    pub(super) complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkDecoderState {
    /// Reading a chunk's size: digits so far, and their value.
    Size {
        digits: u8,
        size: u64,
    },
    /// Skipping a chunk extension.
    Extension {
        size: u64,
    },
    /// The line feed after a size.
    SizeEnd {
        size: u64,
    },
    Payload {
        left: u64,
    },
    PayloadCr,
    PayloadLf,
    /// At the start of a trailer line, or of the empty line that ends the body.
    TrailerStart,
    Trailer,
    End,
    Complete,
}

impl ChunkedDecoder {
    /// Takes what it can from `buffer`, moving the payload of all its chunks together at the front.
    ///
    /// # Errors
    /// What is wrong with the framing.
    pub(super) fn decode_buffer(
        &mut self,
        buffer: &mut [u8],
    ) -> Result<DecodedChunk, &'static str> {
        let (mut read, mut payload) = (0, 0);
        while read < buffer.len() && self.state != ChunkDecoderState::Complete {
            if let ChunkDecoderState::Payload { left } = self.state {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len() - read);
                buffer.copy_within(read..read + length, payload);
                read += length;
                payload += length;
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

    fn decode_byte(&mut self, byte: u8) -> Result<ChunkDecoderState, &'static str> {
        self.overhead += 1;
        if self.overhead > MAX_OVERHEAD_BYTES {
            return Err("chunk framing is too long");
        }
        match (self.state, byte) {
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
            (ChunkDecoderState::Extension { .. }, b'\n') => {
                Err("bare line feed in a chunk extension")
            }
            (ChunkDecoderState::Size { size, .. }, b';' | b' ' | b'\t')
            | (ChunkDecoderState::Extension { size }, _) => {
                Ok(ChunkDecoderState::Extension { size })
            }
            (ChunkDecoderState::Size { .. }, _) => Err("chunk size is not a number"),
            (ChunkDecoderState::SizeEnd { size: left @ 1.. }, b'\n') => {
                Ok(ChunkDecoderState::Payload { left })
            }
            (ChunkDecoderState::PayloadCr, b'\r') => Ok(ChunkDecoderState::PayloadLf),
            (ChunkDecoderState::PayloadLf, b'\n') => Ok(ChunkDecoderState::default()),
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

/// Fifteen digits are 2^60 bytes; one more could overflow sums.
const MAX_SIZE_DIGITS: u8 = 15;

/// Room for extensions and trailers that nobody sends; hyper allows 16 KiB of each.
const MAX_OVERHEAD_BYTES: usize = 16 * 1024;
