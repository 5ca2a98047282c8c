//! The chunked transfer coding, decoded in place (RFC 9112, section 7.1).

/// Decodes a chunked body, whatever the pieces it arrives in.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    state: State,
    /// Bytes of framing since the last payload byte, so that framing alone cannot go on for ever.
    overhead: usize,
}

/// What one buffer held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    /// Payload, moved to the front of the buffer.
    pub(super) payload: usize,
    /// Bytes taken from the buffer; what follows belongs to the next response.
    pub(super) consumed: usize,
    /// Whether the body is complete.
    pub(super) complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
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

impl Decoder {
    /// Takes what it can from `buffer`, moving the payload of all its chunks together at the front.
    ///
    /// # Errors
    /// What is wrong with the framing.
    pub(super) fn decode(&mut self, buffer: &mut [u8]) -> Result<Decoded, &'static str> {
        let (mut read, mut payload) = (0, 0);
        while read < buffer.len() && self.state != State::Complete {
            if let State::Payload { left } = self.state {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len() - read);
                buffer.copy_within(read..read + length, payload);
                read += length;
                payload += length;
                self.overhead = 0;
                let left = left - length as u64;
                self.state = if left == 0 { State::PayloadCr } else { State::Payload { left } };
            } else {
                self.state = self.step(buffer[read])?;
                read += 1;
            }
        }
        Ok(Decoded { payload, consumed: read, complete: self.state == State::Complete })
    }

    fn step(&mut self, byte: u8) -> Result<State, &'static str> {
        self.overhead += 1;
        if self.overhead > MAX_OVERHEAD_BYTES {
            return Err("chunk framing is too long");
        }
        match (self.state, byte) {
            (State::Size { digits, size }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if digits == MAX_SIZE_DIGITS {
                    return Err("chunk size is too large");
                }
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                Ok(State::Size { digits: digits + 1, size: size << 4 | u64::from(digit) })
            }
            (State::Size { digits: 0, .. }, _) => Err("chunk size is missing"),
            (State::Size { size, .. } | State::Extension { size }, b'\r') => {
                Ok(State::SizeEnd { size })
            }
            (State::Extension { .. }, b'\n') => Err("bare line feed in a chunk extension"),
            (State::Size { size, .. }, b';' | b' ' | b'\t') | (State::Extension { size }, _) => {
                Ok(State::Extension { size })
            }
            (State::Size { .. }, _) => Err("chunk size is not a number"),
            (State::SizeEnd { size: left @ 1.. }, b'\n') => Ok(State::Payload { left }),
            (State::PayloadCr, b'\r') => Ok(State::PayloadLf),
            (State::PayloadLf, b'\n') => Ok(State::default()),
            (State::TrailerStart, b'\r') => Ok(State::End),
            (State::SizeEnd { size: 0 } | State::Trailer, b'\n') => Ok(State::TrailerStart),
            (State::TrailerStart | State::Trailer, _) => Ok(State::Trailer),
            (State::End, b'\n') => Ok(State::Complete),
            _ => Err("chunk is not followed by a line end"),
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self::Size { digits: 0, size: 0 }
    }
}

/// Fifteen digits are 2^60 bytes; one more could overflow sums.
const MAX_SIZE_DIGITS: u8 = 15;

/// Room for extensions and trailers that nobody sends; hyper allows 16 KiB of each.
const MAX_OVERHEAD_BYTES: usize = 16 * 1024;
