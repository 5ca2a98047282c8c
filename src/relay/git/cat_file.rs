//! A parser for the output of `cat-file --batch`, fed piece by piece because objects may be larger than memory.

use std::ops::ControlFlow;

use super::ObjectId;

/// The header line of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
    pub name: ObjectId,
    pub kind: String,
    pub size: u64,
}

/// One part of the output.
#[derive(Debug, PartialEq, Eq)]
pub enum BatchPart<'a> {
    Head(&'a ObjectHeader),
    /// A piece, of any size, of the object whose header came last.
    Content(&'a [u8]),
    /// The end of the object whose header came last.
    End,
}

/// The state of the parser between two pieces.
#[derive(Debug, Default)]
pub struct BatchReader {
    line: Vec<u8>,
    /// The number of content bytes still to come before the line feed that ends the object. `None` in a header line.
    remaining: Option<u64>,
}

/// The output is not in the expected form, usually because git printed `missing` for an object.
#[derive(Debug, PartialEq, Eq)]
pub struct BatchFormatError;

impl BatchReader {
    /// Parses the next piece and passes each part in it to `take`.
    pub fn push(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(BatchPart<'_>),
    ) -> Result<(), BatchFormatError> {
        while !piece.is_empty() {
            piece = match self.remaining {
                // State 1: in the header line, which may arrive in several pieces.
                None => match self.parse_head(piece, &mut take)? {
                    ControlFlow::Continue(rest) => rest,
                    ControlFlow::Break(()) => return Ok(()),
                },
                // State 3: all content has come; the next byte is the line feed after it.
                Some(0) => {
                    self.remaining = None;
                    take(BatchPart::End);
                    &piece[1..]
                }
                // State 2: in the content. Only the part in this piece is passed on, nothing is stored.
                Some(left) => {
                    let length = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
                    take(BatchPart::Content(&piece[..length]));
                    self.remaining = Some(left - length as u64);
                    &piece[length..]
                }
            };
        }
        Ok(())
    }

    fn parse_head<'a>(
        &mut self,
        piece: &'a [u8],
        take: &mut impl FnMut(BatchPart<'_>),
    ) -> Result<ControlFlow<(), &'a [u8]>, BatchFormatError> {
        let Some(end) = memchr::memchr(b'\n', piece) else {
            self.line.extend_from_slice(piece);
            return Ok(ControlFlow::Break(()));
        };
        self.line.extend_from_slice(&piece[..end]);
        let object = parse_object_header(&self.line).ok_or(BatchFormatError)?;
        self.line.clear();
        self.remaining = Some(object.size);
        take(BatchPart::Head(&object));
        Ok(ControlFlow::Continue(&piece[end + 1..]))
    }
}

/// Parses `<name> <kind> <size>`, the header line of `--batch` and the whole line of `--batch-check`.
pub fn parse_object_header(line: &[u8]) -> Option<ObjectHeader> {
    let mut words = str::from_utf8(line).ok()?.split(' ');
    let name = ObjectId::parse(words.next()?.as_bytes())?;
    let (kind, size) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    words.next().is_none().then_some(ObjectHeader { name, kind, size })
}
