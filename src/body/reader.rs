//! A body as it arrives: scanned once, kept in the frames it came in.

use bytes::Bytes;

use super::inside::{Found, Inside};
use crate::base::json::{Document, Invalid, Limits, Scanner, read_whole};
use crate::base::rope::Rope;
use crate::protocol::Route;

/// Takes a body frame by frame.
pub struct Reader {
    route: Route,
    rope: Rope,
    scanner: Scanner<Inside>,
}

/// A body that is acceptable JSON, and what was seen in it.
#[derive(Debug)]
pub struct Body {
    pub(super) route: Route,
    pub(super) rope: Rope,
    pub(super) document: Document,
    pub(super) found: Found,
}

impl Reader {
    pub fn new(route: Route) -> Self {
        let scanner = Scanner::watched(Limits::default(), Inside::new(route));
        Self { route, rope: Rope::default(), scanner }
    }

    /// Takes one more frame. After an error every call answers with that error.
    ///
    /// # Errors
    /// See [`Invalid`].
    pub fn push(&mut self, frame: Bytes) -> Result<(), Invalid> {
        self.scanner.feed(&frame)?;
        self.rope.push(frame);
        Ok(())
    }

    /// Bytes so far.
    pub fn len(&self) -> u64 {
        self.rope.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rope.is_empty()
    }

    /// The whole, once the last frame has been taken.
    ///
    /// # Errors
    /// See [`Invalid`].
    pub fn finish(self) -> Result<Body, Invalid> {
        let (document, inside) = self.scanner.finish_watched()?;
        Ok(Body::new(self.route, self.rope, document, inside))
    }
}

impl Body {
    /// Reads a body that came in one frame.
    ///
    /// # Errors
    /// See [`Invalid`].
    pub fn read(route: Route, frame: Bytes) -> Result<Self, Invalid> {
        if let Some((document, inside)) = read_whole(Limits::default(), &frame, Inside::new(route))
        {
            return Ok(Self::new(route, frame.into(), document, inside));
        }
        let mut reader = Reader::new(route);
        reader.push(frame)?;
        reader.finish()
    }

    /// Completes a body of any size: its media are read now, as all of their bytes are there.
    fn new(route: Route, rope: Rope, document: Document, inside: Inside) -> Self {
        let mut found = inside.into_found();
        found.media.read(&rope);
        Self { route, rope, document, found }
    }

    pub fn route(&self) -> Route {
        self.route
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.rope.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rope.is_empty()
    }
}
