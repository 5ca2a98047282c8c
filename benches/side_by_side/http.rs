//! A minimal HTTP/1.1 parser for both ends of the benchmark: it finds the beginning and the end of a message.
//!
//! Both ends must cost far less than the measured proxy, so nothing is copied unless a head arrives in pieces, and
//! nothing is interpreted but the length of the body.

use anyhow::{Context as _, Result, ensure};

/// The parts that [`MessageReader::feed`] finds, in order.
pub(crate) enum MessagePart<'a> {
    /// The start line and the headers, up to and including the empty line.
    Head(&'a [u8]),
    /// A part of the body, with the transfer coding removed.
    Body(&'a [u8]),
}

/// Reads one message; [`reset`](Self::reset) prepares it for the next one.
#[derive(Default)]
pub(crate) struct MessageReader {
    head: Vec<u8>,
    expected: ExpectedBody,
}

#[derive(Default)]
enum ExpectedBody {
    #[default]
    Head,
    Body(u64),
    Chunks(ChunkReader),
    Nothing,
}

impl MessageReader {
    /// Takes bytes from the socket and returns how many of them belong to this message.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        mut sink: impl FnMut(MessagePart<'_>) -> Result<()>,
    ) -> Result<usize> {
        let mut used = 0;
        if matches!(self.expected, ExpectedBody::Head) {
            used = self.feed_head(bytes, &mut sink)?;
        }
        let rest = &bytes[used..];
        match &mut self.expected {
            ExpectedBody::Head | ExpectedBody::Nothing => (),
            ExpectedBody::Body(left) => {
                let take = rest.len().min(usize::try_from(*left)?);
                sink(MessagePart::Body(&rest[..take]))?;
                *left -= take as u64;
                used += take;
            }
            ExpectedBody::Chunks(chunks) => used += chunks.feed(rest, &mut sink)?,
        }
        if self.body_ended() {
            self.expected = ExpectedBody::Nothing;
        }
        Ok(used)
    }

    /// Returns whether the message is complete.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.expected, ExpectedBody::Nothing)
    }

    pub(crate) fn reset(&mut self) {
        self.expected = ExpectedBody::Head;
    }

    fn feed_head(
        &mut self,
        bytes: &[u8],
        sink: &mut impl FnMut(MessagePart<'_>) -> Result<()>,
    ) -> Result<usize> {
        let kept = self.head.len();
        let head = if kept == 0 {
            bytes
        } else {
            self.head.extend_from_slice(bytes);
            self.head.as_slice()
        };
        let Some(end) = memchr::memmem::find(head, b"\r\n\r\n") else {
            if kept == 0 {
                self.head.extend_from_slice(bytes);
            }
            return Ok(bytes.len());
        };
        let head = &head[..end + 4];
        self.expected = expected_body(head)?;
        let used = head.len() - kept;
        sink(MessagePart::Head(head))?;
        self.head.clear();
        Ok(used)
    }

    fn body_ended(&self) -> bool {
        match &self.expected {
            ExpectedBody::Head => false,
            ExpectedBody::Body(left) => *left == 0,
            ExpectedBody::Chunks(chunks) => matches!(chunks.at, ChunkState::End),
            ExpectedBody::Nothing => true,
        }
    }
}

/// Returns the status code of a response head.
pub(crate) fn status_code(head: &[u8]) -> Result<u16> {
    let code = head.get(9..12).context("a response head of less than 12 bytes")?;
    Ok(std::str::from_utf8(code)?.parse()?)
}

fn expected_body(head: &[u8]) -> Result<ExpectedBody> {
    for line in head.split(|byte| *byte == b'\n').skip(1) {
        if let Some(length) = header_value(line, b"content-length:") {
            return Ok(ExpectedBody::Body(std::str::from_utf8(length)?.trim().parse()?));
        }
        if let Some(coding) = header_value(line, b"transfer-encoding:") {
            ensure!(coding.trim_ascii().eq_ignore_ascii_case(b"chunked"), "an unknown coding");
            return Ok(ExpectedBody::Chunks(ChunkReader::default()));
        }
    }
    Ok(ExpectedBody::Body(0))
}

fn header_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = line.split_at_checked(name.len())?;
    start.eq_ignore_ascii_case(name).then_some(rest)
}

/// Decodes chunked transfer coding.
#[derive(Default)]
struct ChunkReader {
    at: ChunkState,
    left: usize,
}

#[derive(Default)]
enum ChunkState {
    #[default]
    Size,
    Data,
    /// The line break after the data.
    Break,
    /// After the last chunk; holds how many bytes of the current trailer line were read.
    Trailer(usize),
    End,
}

impl ChunkReader {
    fn feed(
        &mut self,
        bytes: &[u8],
        sink: &mut impl FnMut(MessagePart<'_>) -> Result<()>,
    ) -> Result<usize> {
        let mut used = 0;
        while used < bytes.len() && !matches!(self.at, ChunkState::End) {
            if matches!(self.at, ChunkState::Data) {
                let take = self.left.min(bytes.len() - used);
                sink(MessagePart::Body(&bytes[used..used + take]))?;
                used += take;
                self.left -= take;
                if self.left == 0 {
                    self.at = ChunkState::Break;
                }
            } else {
                self.step(bytes[used])?;
                used += 1;
            }
        }
        Ok(used)
    }

    /// Reads one byte of framing.
    fn step(&mut self, byte: u8) -> Result<()> {
        match (&mut self.at, byte) {
            (ChunkState::Size, b'\n') if self.left == 0 => self.at = ChunkState::Trailer(0),
            (ChunkState::Size, b'\n') => self.at = ChunkState::Data,
            (ChunkState::Break, b'\n') => self.at = ChunkState::Size,
            (ChunkState::Trailer(0), b'\n') => self.at = ChunkState::End,
            (ChunkState::Trailer(read), b'\n') => *read = 0,
            (ChunkState::Size | ChunkState::Break | ChunkState::Trailer(_), b'\r') => (),
            (ChunkState::Trailer(read), _) => *read += 1,
            (ChunkState::Size, digit) => {
                let digit = char::from(digit).to_digit(16).context("a chunk size is not hex")?;
                self.left = self.left * 16 + digit as usize;
            }
            (ChunkState::Break | ChunkState::Data | ChunkState::End, _) => {
                anyhow::bail!("a chunk longer than announced")
            }
        }
        Ok(())
    }
}
