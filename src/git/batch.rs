//! What `cat-file --batch` prints, read as it comes: objects may be larger than memory.

use std::ops::ControlFlow;

use super::Sha;

/// The head of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub name: Sha,
    pub kind: String,
    pub size: u64,
}

/// A part of what is printed.
#[derive(Debug, PartialEq, Eq)]
pub enum Part<'a> {
    Head(&'a Object),
    /// Of the object before; in pieces of any size.
    Content(&'a [u8]),
    /// The object before is complete.
    End,
}

/// Where the reading stands.
#[derive(Debug, Default)]
pub struct Reader {
    line: Vec<u8>,
    /// Bytes of content to come, and then one for the line's end.
    left: Option<u64>,
}

/// Something else was printed: an object is missing.
#[derive(Debug, PartialEq, Eq)]
pub struct Senseless;

impl Reader {
    /// Takes the next piece.
    pub fn push(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(Part<'_>),
    ) -> Result<(), Senseless> {
        while !piece.is_empty() {
            piece = match self.left {
                None => match self.head(piece, &mut take)? {
                    ControlFlow::Continue(rest) => rest,
                    ControlFlow::Break(()) => return Ok(()),
                },
                Some(0) => {
                    self.left = None;
                    take(Part::End);
                    &piece[1..]
                }
                Some(left) => {
                    let length = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
                    take(Part::Content(&piece[..length]));
                    self.left = Some(left - length as u64);
                    &piece[length..]
                }
            };
        }
        Ok(())
    }

    fn head<'a>(
        &mut self,
        piece: &'a [u8],
        take: &mut impl FnMut(Part<'_>),
    ) -> Result<ControlFlow<(), &'a [u8]>, Senseless> {
        let Some(end) = memchr::memchr(b'\n', piece) else {
            self.line.extend_from_slice(piece);
            return Ok(ControlFlow::Break(()));
        };
        self.line.extend_from_slice(&piece[..end]);
        let object = parsed(&self.line).ok_or(Senseless)?;
        self.line.clear();
        self.left = Some(object.size);
        take(Part::Head(&object));
        Ok(ControlFlow::Continue(&piece[end + 1..]))
    }
}

/// `<name> <kind> <size>`, as `--batch-check` prints it, too.
pub fn parsed(line: &[u8]) -> Option<Object> {
    let mut words = str::from_utf8(line).ok()?.split(' ');
    let name = Sha::parse(words.next()?.as_bytes())?;
    let (kind, size) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    words.next().is_none().then_some(Object { name, kind, size })
}
