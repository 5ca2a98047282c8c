//! Reads a body while the frames arrive: each byte is scanned once, and the frames are kept
//! uncopied.

use bytes::Bytes;

use super::capability_scanner::{BodyFindings, CapabilityScanner};
use crate::base::json::{JsonDocument, JsonError, JsonLimits, JsonScanner, read_whole};
use crate::base::rope::ByteRope;
use crate::llm::protocol::GatewayRoute;

/// A reader that takes a body frame by frame.
pub struct BodyReader {
    route: GatewayRoute,
    rope: ByteRope,
    scanner: JsonScanner<CapabilityScanner>,
}

/// A body that is acceptable JSON, and the findings of its scan.
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

    /// Takes the next frame. After an error, every later call returns the same error.
    ///
    /// # Errors
    /// Returns the [`JsonError`] of the first byte that is not acceptable JSON.
    pub fn push(&mut self, frame: Bytes) -> Result<(), JsonError> {
        self.scanner.feed_frame(&frame)?;
        self.rope.push(frame);
        Ok(())
    }

    /// Returns the number of bytes taken so far.
    pub fn len(&self) -> u64 {
        self.rope.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rope.is_empty()
    }

    /// Completes the scan after the last frame.
    ///
    /// # Errors
    /// Returns a [`JsonError`] if the body is incomplete or not acceptable JSON.
    pub fn finish_body(self) -> Result<ScannedBody, JsonError> {
        let (document, inside) = self.scanner.finish_with_visitor()?;
        Ok(ScannedBody::new(self.route, self.rope, document, inside))
    }
}

impl ScannedBody {
    /// Reads a body that arrived in a single frame.
    ///
    /// # Errors
    /// Returns a [`JsonError`] if the frame is not one acceptable JSON document.
    pub fn scan_frame(route: GatewayRoute, frame: Bytes) -> Result<Self, JsonError> {
        // The fast path reads a whole document without the incremental scanner's state. If the fast
        // path declines, the incremental scanner repeats the work and names the error.
        if let Some((document, inside)) =
            read_whole(JsonLimits::default(), &frame, CapabilityScanner::new(route))
        {
            return Ok(Self::new(route, frame.into(), document, inside));
        }
        let mut reader = BodyReader::new(route);
        reader.push(frame)?;
        reader.finish_body()
    }

    /// Completes a body of any size. The media are read here, because only now all of their bytes
    /// are present.
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

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.rope.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rope.is_empty()
    }
}
