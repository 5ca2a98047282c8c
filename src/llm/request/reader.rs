//! A body as it arrives: scanned once, kept in the frames it came in.

use bytes::Bytes;

use super::capability_scanner::{BodyFindings, CapabilityScanner};
use crate::base::json::{JsonDocument, JsonError, JsonLimits, JsonScanner, read_whole};
use crate::base::rope::ByteRope;
use crate::llm::protocol::GatewayRoute;

/// Takes a body frame by frame.
pub struct BodyReader {
    route: GatewayRoute,
    rope: ByteRope,
    scanner: JsonScanner<CapabilityScanner>,
}

/// A body that is acceptable JSON, and what was seen in it.
#[derive(Debug)]
pub struct ScannedBody {
    pub(super) route: GatewayRoute,
    pub(super) rope: ByteRope,
    pub(super) document: JsonDocument,
    pub(super) found: BodyFindings,
}

impl BodyReader {
    pub fn new(route: GatewayRoute) -> Self {
        let scanner =
            JsonScanner::with_visitor(JsonLimits::default(), CapabilityScanner::new(route));
        Self { route, rope: ByteRope::default(), scanner }
    }

    /// Takes one more frame. After an error every call answers with that error.
    ///
    /// # Errors
    /// See [`JsonError`].
    pub fn push(&mut self, frame: Bytes) -> Result<(), JsonError> {
        self.scanner.feed_frame(&frame)?;
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
    /// See [`JsonError`].
    pub fn finish_body(self) -> Result<ScannedBody, JsonError> {
        let (document, inside) = self.scanner.finish_with_visitor()?;
        Ok(ScannedBody::new(self.route, self.rope, document, inside))
    }
}

impl ScannedBody {
    /// Reads a body that came in one frame.
    ///
    /// # Errors
    /// See [`JsonError`].
    pub fn scan_frame(route: GatewayRoute, frame: Bytes) -> Result<Self, JsonError> {
        if let Some((document, inside)) =
            read_whole(JsonLimits::default(), &frame, CapabilityScanner::new(route))
        {
            return Ok(Self::new(route, frame.into(), document, inside));
        }
        let mut reader = BodyReader::new(route);
        reader.push(frame)?;
        reader.finish_body()
    }

    /// Completes a body of any size: its media are read now, as all of their bytes are there.
    fn new(
        route: GatewayRoute,
        rope: ByteRope,
        document: JsonDocument,
        inside: CapabilityScanner,
    ) -> Self {
        let mut found = inside.into_findings();
        found.media.read_media(&rope);
        Self { route, rope, document, found }
    }

    pub fn route(&self) -> GatewayRoute {
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
