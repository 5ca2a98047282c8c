//! What images and documents cost at least that a request carries, by their own first bytes.
//!
//! They are compressed: a page of a document that a provider bills with 3,000 tokens can be 100 bytes long. So what is
//! reserved for them goes by what they are, beside their length. While a body is scanned, only the places of media are
//! noted; they are read when the body is complete.
//!
//! **Invariant:** what cannot be read, says nothing or says what cannot be is taken for the most that such a medium costs, or for
//! a long document.

mod base64;
mod document;
mod image;

use self::base64::{Base64, decode};
use crate::base::rope::Rope;

/// What a text is that carries a medium, by how the text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    Image,
    Document,
}

/// The media of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Media {
    /// With the tokens of a frontier model.
    images: u64,
    documents: u64,
    /// Those that are in the body, until they are read: where each text begins.
    inline: Vec<(Medium, u64)>,
}

impl Media {
    /// Notes a medium whose text begins at this offset of the body.
    pub(super) fn note(&mut self, medium: Medium, at: u64) {
        if self.inline.len() < MAX_READ {
            self.inline.push((medium, at));
        } else {
            self.add(medium, None);
        }
    }

    /// Counts a document of which nothing can be read.
    pub(super) fn add_document(&mut self) {
        self.add(Medium::Document, None);
    }

    /// Counts so many media that are fetched: as large images.
    pub(super) fn fetch(&mut self, count: u64) {
        self.images = self.images.saturating_add(count.saturating_mul(image::MAX_TOKENS));
    }

    /// Reads what was noted, from the complete body.
    pub(super) fn read(&mut self, body: &Rope) {
        let mut left = MAX_READ_BYTES;
        for (medium, at) in std::mem::take(&mut self.inline) {
            let most = left.min(match medium {
                Medium::Image => image::MAX_HEAD_BYTES,
                Medium::Document => document::MAX_BYTES,
            });
            let mut bytes = decode(body, at, most);
            let tokens = match medium {
                Medium::Image => image::tokens(&mut bytes),
                Medium::Document => document::tokens(&mut bytes),
            };
            left -= bytes.read();
            self.add(medium, tokens);
        }
    }

    /// Tokens of all of them, for a model.
    pub(super) fn tokens(&self, model: &str) -> u64 {
        // OpenAI bills images of this model with 33 times the tokens of its others.
        let factor = if model.contains("gpt-4o-mini") { 33 } else { 1 };
        self.images.saturating_mul(factor).saturating_add(self.documents)
    }

    fn add(&mut self, medium: Medium, tokens: Option<u64>) {
        let (sum, unread) = match medium {
            Medium::Image => (&mut self.images, image::MAX_TOKENS),
            Medium::Document => (&mut self.documents, document::UNREAD_TOKENS),
        };
        *sum = sum.saturating_add(tokens.unwrap_or(unread));
    }
}

impl Medium {
    /// The medium whose text begins so: a `data:` address, or base64.
    pub(super) fn of(start: &[u8]) -> Option<Self> {
        let Some(inline) =
            start.first_chunk::<5>().filter(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
        else {
            return Self::of_base64(start);
        };
        let start = &start[inline.len()..];
        let is = |kind: &[u8]| {
            start.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind))
        };
        if is(b"image/") {
            return Some(Self::Image);
        }
        is(b"application/").then_some(Self::Document)
    }

    fn of_base64(start: &[u8]) -> Option<Self> {
        if start.starts_with(b"JVBERi0") {
            return Some(Self::Document);
        }
        let is_image = SIGNATURES.iter().any(|signature| start.starts_with(signature));
        is_image.then_some(Self::Image)
    }
}

/// Base64 of the first bytes of PNG, JPEG, GIF and WebP.
const SIGNATURES: [&[u8]; 4] = [b"iVBORw0KGgo", b"/9j/", b"R0lGOD", b"UklGR"];

/// Media of one request that are read; providers take a hundred.
const MAX_READ: usize = 256;

/// Text of one request that is read for what its media are, beside the reading of all of it.
const MAX_READ_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::Medium;

    #[test]
    fn a_medium_is_known_by_its_first_bytes() {
        for (start, medium) in [
            (&b"iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA"[..], Some(Medium::Image)),
            (b"data:image/png;base64,iVBORw0KGgo", Some(Medium::Image)),
            (b"R0lGODlhAQABAIAAAAAAAP", Some(Medium::Image)),
            (b"/9j/4AAQSkZJRgABAQ", Some(Medium::Image)),
            (b"data:image/avif;base64,AAAA", Some(Medium::Image)),
            (b"JVBERi0xLjcK", Some(Medium::Document)),
            (b"DATA:application/pdf;base64,AAAA", Some(Medium::Document)),
            (b"data:text/plain,hello", None),
            (b"hello", None),
            (b"", None),
        ] {
            assert_eq!(Medium::of(start), medium, "{}", String::from_utf8_lossy(start));
        }
    }
}
