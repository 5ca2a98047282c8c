//! A minimal HTTP/1.1 parser for both ends of the benchmark: it finds the beginning and the end of a message.
//!
//! Both ends must cost far less than the measured proxy, so nothing is copied unless a head arrives in pieces, and
//! nothing is interpreted but the length of the body.

use anyhow::{Context as _, Result, ensure};

/// The parts that [`Reader::feed`] finds, in order.
pub(crate) enum Part<'a> {
    /// The start line and the headers, up to and including the empty line.
    Head(&'a [u8]),
    /// A part of the body, with the transfer coding removed.
    Body(&'a [u8]),
}

/// Reads one message; [`reset`](Self::reset) prepares it for the next one.
#[derive(Default)]
pub(crate) struct Reader {
    head: Vec<u8>,
    expected: Expected,
}

#[derive(Default)]
enum Expected {
    #[default]
    Head,
    Body(u64),
    Chunks(Chunks),
    Nothing,
}

impl Reader {
    /// Takes bytes from the socket and returns how many of them belong to this message.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        mut sink: impl FnMut(Part<'_>) -> Result<()>,
    ) -> Result<usize> {
        let mut used = 0;
        if matches!(self.expected, Expected::Head) {
            used = self.feed_head(bytes, &mut sink)?;
        }
        let rest = &bytes[used..];
        match &mut self.expected {
            Expected::Head | Expected::Nothing => (),
            Expected::Body(left) => {
                let take = rest.len().min(usize::try_from(*left)?);
                sink(Part::Body(&rest[..take]))?;
                *left -= take as u64;
                used += take;
            }
            Expected::Chunks(chunks) => used += chunks.feed(rest, &mut sink)?,
        }
        if self.body_ended() {
            self.expected = Expected::Nothing;
        }
        Ok(used)
    }

    /// Returns whether the message is complete.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.expected, Expected::Nothing)
    }

    pub(crate) fn reset(&mut self) {
        self.expected = Expected::Head;
    }

    fn feed_head(
        &mut self,
        bytes: &[u8],
        sink: &mut impl FnMut(Part<'_>) -> Result<()>,
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
        self.expected = expected(head)?;
        let used = head.len() - kept;
        sink(Part::Head(head))?;
        self.head.clear();
        Ok(used)
    }

    fn body_ended(&self) -> bool {
        match &self.expected {
            Expected::Head => false,
            Expected::Body(left) => *left == 0,
            Expected::Chunks(chunks) => matches!(chunks.at, At::End),
            Expected::Nothing => true,
        }
    }
}

/// Returns the status code of a response head.
pub(crate) fn status(head: &[u8]) -> Result<u16> {
    let code = head.get(9..12).context("a response head of less than 12 bytes")?;
    Ok(std::str::from_utf8(code)?.parse()?)
}

fn expected(head: &[u8]) -> Result<Expected> {
    for line in head.split(|byte| *byte == b'\n').skip(1) {
        if let Some(length) = value(line, b"content-length:") {
            return Ok(Expected::Body(std::str::from_utf8(length)?.trim().parse()?));
        }
        if let Some(coding) = value(line, b"transfer-encoding:") {
            ensure!(coding.trim_ascii().eq_ignore_ascii_case(b"chunked"), "an unknown coding");
            return Ok(Expected::Chunks(Chunks::default()));
        }
    }
    Ok(Expected::Body(0))
}

fn value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = line.split_at_checked(name.len())?;
    start.eq_ignore_ascii_case(name).then_some(rest)
}

/// Decodes chunked transfer coding.
#[derive(Default)]
struct Chunks {
    at: At,
    left: usize,
}

#[derive(Default)]
enum At {
    #[default]
    Size,
    Data,
    /// The line break after the data.
    Break,
    /// After the last chunk; holds how many bytes of the current trailer line were read.
    Trailer(usize),
    End,
}

impl Chunks {
    fn feed(
        &mut self,
        bytes: &[u8],
        sink: &mut impl FnMut(Part<'_>) -> Result<()>,
    ) -> Result<usize> {
        let mut used = 0;
        while used < bytes.len() && !matches!(self.at, At::End) {
            if matches!(self.at, At::Data) {
                let take = self.left.min(bytes.len() - used);
                sink(Part::Body(&bytes[used..used + take]))?;
                used += take;
                self.left -= take;
                if self.left == 0 {
                    self.at = At::Break;
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
            (At::Size, b'\n') if self.left == 0 => self.at = At::Trailer(0),
            (At::Size, b'\n') => self.at = At::Data,
            (At::Break, b'\n') => self.at = At::Size,
            (At::Trailer(0), b'\n') => self.at = At::End,
            (At::Trailer(read), b'\n') => *read = 0,
            (At::Size | At::Break | At::Trailer(_), b'\r') => (),
            (At::Trailer(read), _) => *read += 1,
            (At::Size, digit) => {
                let digit = char::from(digit).to_digit(16).context("a chunk size is not hex")?;
                self.left = self.left * 16 + digit as usize;
            }
            (At::Break | At::Data | At::End, _) => anyhow::bail!("a chunk longer than announced"),
        }
        Ok(())
    }
}
