//! What images and documents cost at least that a request carries, by how their bytes begin.
//!
//! They are compressed: a page of a document that a provider bills with 3,000 tokens can be 100 bytes long.
//! So what is reserved for them goes by what they are, beside their length.

/// What one medium is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// With the tokens of a frontier model.
    Image(u64),
    Document,
}

/// The media of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Media {
    images: u64,
    documents: u64,
}

impl Media {
    pub(super) fn add(&mut self, medium: Medium) {
        match medium {
            Medium::Image(tokens) => self.images = self.images.saturating_add(tokens),
            Medium::Document => self.documents = self.documents.saturating_add(1),
        }
    }

    /// Tokens of all of them, for a model.
    pub(super) fn tokens(self, model: &str) -> u64 {
        // OpenAI bills images of this model with 33 times the tokens of its others.
        let factor = if model.contains("gpt-4o-mini") { 33 } else { 1 };
        let documents = self.documents.saturating_mul(DOCUMENT);
        self.images.saturating_mul(factor).saturating_add(documents)
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
            let at = memchr::memchr(b',', start).map_or(start.len(), |comma| comma + 1);
            return Self::of_base64(&start[at..]).or(Some(Self::Image(IMAGE)));
        }
        is(b"application/").then_some(Self::Document)
    }

    fn of_base64(start: &[u8]) -> Option<Self> {
        if start.starts_with(b"JVBERi0") {
            return Some(Self::Document);
        }
        let is_image = SIGNATURES.iter().any(|signature| start.starts_with(signature));
        is_image.then(|| Self::Image(pixels(start).map_or(IMAGE, tokens)))
    }
}

/// The pixels of an image, where they stand in its first bytes: of PNG and GIF.
fn pixels(start: &[u8]) -> Option<u64> {
    let mut head = [0; HEAD];
    let length = decode(start, &mut head);
    let head = &head[..length];
    let (width, height) = match head {
        [0x89, b'P', b'N', b'G', ..] => {
            let side = |at: usize| Some(u32::from_be_bytes(*head.get(at..)?.first_chunk()?));
            (side(16)?, side(20)?)
        }
        [b'G', b'I', b'F', ..] => {
            let side = |at: usize| Some(u16::from_le_bytes(*head.get(at..)?.first_chunk()?).into());
            (side(6)?, side(8)?)
        }
        _ => return None,
    };
    Some(u64::from(width) * u64::from(height))
}

/// Reads base64 for as long as it is that and there is room; says how much came of it.
fn decode(text: &[u8], bytes: &mut [u8; HEAD]) -> usize {
    let (mut bits, mut count, mut filled) = (0_u32, 0, 0);
    for digit in text {
        let sextet = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(sextet);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes[filled] = u8::try_from(bits >> count & 0xff).unwrap_or_default();
            filled += 1;
        }
        if filled == HEAD {
            break;
        }
    }
    filled
}

/// Anthropic's rule; OpenAI's and Google's tiles come to less.
fn tokens(pixels: u64) -> u64 {
    pixels.div_ceil(PIXELS_PER_TOKEN).clamp(LEAST_IMAGE, MOST_IMAGE)
}

/// Base64 of the first bytes of PNG, JPEG, GIF and WebP.
const SIGNATURES: [&[u8]; 4] = [b"iVBORw0KGgo", b"/9j/", b"R0lGOD", b"UklGR"];

/// The head of a PNG with the size in it.
const HEAD: usize = 24;

const PIXELS_PER_TOKEN: u64 = 750;

/// A tile of Google's.
const LEAST_IMAGE: u64 = 258;

/// All providers scale larger ones down.
const MOST_IMAGE: u64 = 6000;

/// An image whose size is not in its first bytes.
const IMAGE: u64 = 4000;

/// A hundred pages, as many as most providers take, of 2,000 tokens.
const DOCUMENT: u64 = 200_000;

#[cfg(test)]
mod tests {
    use super::Medium;

    #[test]
    fn a_medium_is_known_by_its_first_bytes() {
        for (start, medium) in [
            // 2048 x 768.
            (&b"iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA"[..], Some(Medium::Image(2098))),
            (
                b"data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAA",
                Some(Medium::Image(2098)),
            ),
            // One pixel.
            (b"R0lGODlhAQABAIAAAAAAAP", Some(Medium::Image(258))),
            (b"/9j/4AAQSkZJRgABAQ", Some(Medium::Image(4000))),
            (b"data:image/avif;base64,AAAA", Some(Medium::Image(4000))),
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
