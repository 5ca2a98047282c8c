//! What `cat-file --batch` prints, read as it comes: objects may be larger than memory.

use std::ops::ControlFlow;

use super::ObjectId;

/// The head of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
    pub name: ObjectId,
    pub kind: String,
    pub size: u64,
}

/// A part of what is printed.
#[derive(Debug, PartialEq, Eq)]
pub enum BatchPart<'a> {
    Head(&'a ObjectHeader),
    /// Of the object before; in pieces of any size.
    Content(&'a [u8]),
    /// The object before is complete.
    End,
}

/// Where the reading stands.
#[derive(Debug, Default)]
pub struct BatchReader {
    line: Vec<u8>,
    /// Bytes of content to come, and then one for the line's end.
    left: Option<u64>,
}

/// Something else was printed: an object is missing.
#[derive(Debug, PartialEq, Eq)]
pub struct BatchFormatError;

impl BatchReader {
    /// Takes the next piece.
    pub fn push(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(BatchPart<'_>),
    ) -> Result<(), BatchFormatError> {
        while !piece.is_empty() {
            piece = match self.left {
                None => match self.parse_head(piece, &mut take)? {
                    ControlFlow::Continue(rest) => rest,
                    ControlFlow::Break(()) => return Ok(()),
                },
                Some(0) => {
                    self.left = None;
                    take(BatchPart::End);
                    &piece[1..]
                }
                Some(left) => {
                    let length = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
                    take(BatchPart::Content(&piece[..length]));
                    self.left = Some(left - length as u64);
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
        self.left = Some(object.size);
        take(BatchPart::Head(&object));
        Ok(ControlFlow::Continue(&piece[end + 1..]))
    }
}

/// `<name> <kind> <size>`, as `--batch-check` prints it, too.
pub fn parse_object_header(line: &[u8]) -> Option<ObjectHeader> {
    let mut words = str::from_utf8(line).ok()?.split(' ');
    let name = ObjectId::parse(words.next()?.as_bytes())?;
    let (kind, size) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    words.next().is_none().then_some(ObjectHeader { name, kind, size })
}
