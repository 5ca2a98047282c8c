//! The frames in which a first process reports the output and the end of each command of a
//! [list](super::command_list), on its own standard output.
//!
//! A frame is a kind (1 byte), a length (4 bytes, big-endian), and as many bytes as the length says. The frames of one
//! command are any number of `O` (a piece of its standard output) and then one `E` (its end). The first process alone
//! writes frames: a command prints into a pipe of its own. So no output can be taken for a frame.

use std::ops::ControlFlow;

/// One part of the frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FramePart<'a> {
    /// A piece, of any size, of the present command's standard output.
    Output(&'a [u8]),
    /// The end of the present command. The next part belongs to the next command.
    End(CommandEnd),
}

/// The end of one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandEnd {
    /// The exit status, or 128 and the number of the signal that killed the command.
    pub status: u8,
    /// True if the command was killed because it printed more than its limit.
    pub is_over_limit: bool,
    /// The beginning and the end of the command's standard error.
    pub said: Vec<u8>,
}

/// The state of the parser between two pieces.
#[derive(Debug, Default)]
pub struct FrameReader {
    state: ReaderState,
    /// The bytes of an incomplete head, or of an incomplete end. At most [`MAX_END_BYTES`].
    pending: Vec<u8>,
}

#[derive(Debug, Default)]
enum ReaderState {
    /// The parser is in the five bytes before a frame's content.
    #[default]
    Head,
    /// The parser is in the content of an `O`; the value is the number of bytes to come.
    Output(usize),
    /// The parser is in the content of an `E`; the value is the length of the content.
    End(usize),
}

/// The bytes are not frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameFormatError;

impl FrameReader {
    /// Parses the next piece and passes each part in it to `take`. Looks at each byte once.
    ///
    /// # Errors
    /// Returns an error if the bytes are not frames. The reader must not be used after an error.
    pub fn push(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(FramePart<'_>),
    ) -> Result<(), FrameFormatError> {
        while !piece.is_empty() {
            piece = match self.state {
                ReaderState::Head => match self.complete(piece, HEAD_BYTES) {
                    ControlFlow::Continue(rest) => {
                        self.state = parse_head(&self.pending)?;
                        self.pending.clear();
                        rest
                    }
                    ControlFlow::Break(()) => return Ok(()),
                },
                ReaderState::Output(left) => {
                    let (output, rest) = piece.split_at(left.min(piece.len()));
                    take(FramePart::Output(output));
                    self.state = match left - output.len() {
                        0 => ReaderState::Head,
                        left => ReaderState::Output(left),
                    };
                    rest
                }
                ReaderState::End(length) => match self.complete(piece, length) {
                    ControlFlow::Continue(rest) => {
                        take(FramePart::End(parse_end(&self.pending)?));
                        (self.state, self.pending) = (ReaderState::Head, vec![]);
                        rest
                    }
                    ControlFlow::Break(()) => return Ok(()),
                },
            };
        }
        Ok(())
    }

    /// Adds bytes of the piece to the pending bytes until there are `length`. Returns the rest of the piece then.
    fn complete<'a>(&mut self, piece: &'a [u8], length: usize) -> ControlFlow<(), &'a [u8]> {
        let (own, rest) = piece.split_at((length - self.pending.len()).min(piece.len()));
        self.pending.extend_from_slice(own);
        if self.pending.len() == length {
            ControlFlow::Continue(rest)
        } else {
            ControlFlow::Break(())
        }
    }
}

fn parse_head(head: &[u8]) -> Result<ReaderState, FrameFormatError> {
    let (kind, length) = head.split_first().ok_or(FrameFormatError)?;
    let length = u32::from_be_bytes(length.try_into().map_err(|_| FrameFormatError)?);
    let length = usize::try_from(length).map_err(|_| FrameFormatError)?;
    match (*kind, length) {
        (OUTPUT_KIND, 1..=MAX_OUTPUT_FRAME_BYTES) => Ok(ReaderState::Output(length)),
        (END_KIND, MIN_END_BYTES..=MAX_END_BYTES) => Ok(ReaderState::End(length)),
        _ => Err(FrameFormatError),
    }
}

fn parse_end(content: &[u8]) -> Result<CommandEnd, FrameFormatError> {
    let [status, is_over_limit @ (0 | 1), stderr @ ..] = content else {
        return Err(FrameFormatError);
    };
    Ok(CommandEnd { status: *status, is_over_limit: *is_over_limit == 1, said: stderr.to_owned() })
}

/// Encodes a piece of output of 1 to [`MAX_OUTPUT_FRAME_BYTES`] bytes.
pub fn encode_output(output: &[u8]) -> Vec<u8> {
    encode_frame(OUTPUT_KIND, &[output])
}

/// Encodes the end of a command, with at most [`MAX_SAID_BYTES`] of its standard error.
pub fn encode_end(CommandEnd { status, is_over_limit, said: stderr }: &CommandEnd) -> Vec<u8> {
    let stderr = &stderr[..stderr.len().min(MAX_SAID_BYTES)];
    encode_frame(END_KIND, &[&[*status, u8::from(*is_over_limit)], stderr])
}

fn encode_frame(kind: u8, contents: &[&[u8]]) -> Vec<u8> {
    let length = contents.iter().map(|content| content.len()).sum::<usize>();
    // A longer content gets a length that the reader refuses.
    let head = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let mut frame = Vec::with_capacity(HEAD_BYTES + length);
    frame.push(kind);
    frame.extend_from_slice(&head);
    for content in contents {
        frame.extend_from_slice(content);
    }
    frame
}

/// The maximum length of one piece of output. Our choice: as much as a pipe usually holds.
pub const MAX_OUTPUT_FRAME_BYTES: usize = 64 << 10;

/// The maximum number of bytes of standard error in an end. Our choice: git's error messages have a few lines.
pub const MAX_SAID_BYTES: usize = 4 << 10;

const OUTPUT_KIND: u8 = b'O';
const END_KIND: u8 = b'E';

/// The length of the kind and the length of a frame.
const HEAD_BYTES: usize = 5;

/// The length of an end without standard error: the status, and the flag of the limit.
const MIN_END_BYTES: usize = 2;
const MAX_END_BYTES: usize = MIN_END_BYTES + MAX_SAID_BYTES;
