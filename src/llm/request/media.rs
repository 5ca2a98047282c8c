//! What images, documents, sound and video cost at least that a request carries, by their own first bytes.
//!
//! They are compressed: a page of a document that a provider bills with 3,000 tokens can be 100 bytes long, and an hour of
//! video 90 KB. So what is reserved for them goes by what they are, beside their length. While a body is scanned, only the places of media are
//! noted; they are read when the body is complete.
//!
//! **Invariant:** what cannot be read, says nothing or says what cannot be is taken for the most that such a medium costs, or for
//! a long document, a long recording or a video that fills the largest context.

mod audio;
mod base64;
mod document;
mod image;

use memchr::memmem;

use self::base64::{Base64Decoder, decode_string};
use crate::base::rope::ByteRope;

/// What a text is that carries a medium, by how the text begins or by what is said of it. The dearest is the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MediaKind {
    Image,
    Document,
    Audio,
    Video,
}

/// The media of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestMedia {
    /// With the tokens of a frontier model.
    images: u64,
    /// Documents, sound and video.
    others: u64,
    /// Those that are in the body, until they are read: where each text begins.
    inline: Vec<(MediaKind, u64)>,
}

impl RequestMedia {
    /// Notes a medium whose text begins at this offset of the body.
    pub(super) fn note_medium(&mut self, medium: MediaKind, at: u64) {
        if self.inline.len() < MAX_MEDIA_READ {
            self.inline.push((medium, at));
        } else {
            self.add_tokens(medium, None);
        }
    }

    /// Counts a medium of which nothing can be read.
    pub(super) fn add_unread(&mut self, medium: MediaKind) {
        self.add_tokens(medium, None);
    }

    /// Counts so many images that are fetched: as large ones.
    pub(super) fn count_fetched(&mut self, count: u64) {
        self.images = self.images.saturating_add(count.saturating_mul(image::MAX_IMAGE_TOKENS));
    }

    /// Reads what was noted, from the complete body.
    pub(super) fn read_media(&mut self, body: &ByteRope) {
        let mut left = MAX_MEDIA_BYTES_READ;
        for (medium, at) in std::mem::take(&mut self.inline) {
            let most = left.min(match medium {
                MediaKind::Image => image::MAX_HEAD_BYTES,
                MediaKind::Document | MediaKind::Audio => document::MAX_DOCUMENT_BYTES_READ,
                // No form of it bounds its own length.
                MediaKind::Video => 0,
            });
            let mut bytes = decode_string(body, at, most);
            let tokens = match medium {
                MediaKind::Image => image::image_tokens(&mut bytes),
                MediaKind::Document => document::document_tokens(&mut bytes),
                MediaKind::Audio => audio::tokens(&mut bytes, body.len().saturating_sub(at)),
                MediaKind::Video => None,
            };
            left -= bytes.bytes_read();
            self.add_tokens(medium, tokens);
        }
    }

    /// Tokens of all of them, for a model.
    pub(super) fn count_tokens(&self, model: &str) -> u64 {
        // OpenAI bills images of this model with 33 times the tokens of its others.
        let factor = if model.contains("gpt-4o-mini") { 33 } else { 1 };
        self.images.saturating_mul(factor).saturating_add(self.others)
    }

    fn add_tokens(&mut self, medium: MediaKind, tokens: Option<u64>) {
        let (sum, unread) = match medium {
            MediaKind::Image => (&mut self.images, image::MAX_IMAGE_TOKENS),
            MediaKind::Document => (&mut self.others, document::UNREADABLE_DOCUMENT_TOKENS),
            MediaKind::Audio => (&mut self.others, audio::UNREAD_TOKENS),
            MediaKind::Video => (&mut self.others, VIDEO_TOKENS),
        };
        *sum = sum.saturating_add(tokens.unwrap_or(unread));
    }
}

impl MediaKind {
    /// The medium whose text begins so: a `data:` address, or base64.
    pub(super) fn from_prefix(start: &[u8]) -> Option<Self> {
        let Some(inline) =
            start.first_chunk::<5>().filter(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
        else {
            return Self::from_base64_prefix(start);
        };
        let start = &start[inline.len()..];
        if is_kind(start, b"text/") {
            return None;
        }
        let is_data = || memmem::find(start, b";base64,").is_some();
        Self::of_type(start)
            // What has another type, or none, is what the provider makes of it.
            .or_else(|| (is_kind(start, b"application/") || is_data()).then_some(Self::Document))
    }

    /// The medium of a type, as it is said of a text that is elsewhere.
    pub(super) fn of_type(name: &[u8]) -> Option<Self> {
        let kinds: [(&[u8], Self); 4] = [
            (b"image/", Self::Image),
            (b"application/pdf", Self::Document),
            (b"audio/", Self::Audio),
            (b"video/", Self::Video),
        ];
        kinds.into_iter().find(|(kind, _)| is_kind(name, kind)).map(|(_, medium)| medium)
    }

    /// The medium that a key or a type of part is named for: `video_url`, `input_audio`.
    pub(super) fn of_name(name: &[u8]) -> Option<Self> {
        let of = |part: Option<&[u8; 5]>| match part {
            Some(b"audio") => Some(Self::Audio),
            Some(b"video") => Some(Self::Video),
            _ => None,
        };
        of(name.first_chunk()).or_else(|| of(name.last_chunk()))
    }

    fn from_base64_prefix(start: &[u8]) -> Option<Self> {
        if start.starts_with(b"JVBERi0") {
            return Some(Self::Document);
        }
        if start.starts_with(b"UklGR") {
            // The kind of a RIFF stands behind its length.
            return match start.get(12..16) {
                Some(b"QVZF") => Some(Self::Audio),
                Some(b"Vkkg") => Some(Self::Video),
                _ => Some(Self::Image),
            };
        }
        if SOUNDS.iter().any(|signature| start.starts_with(signature)) {
            return Some(Self::Audio);
        }
        // MP4: a short length, and `ftyp`.
        let is_boxed = start.starts_with(b"AAAA") && start.get(6..10) == Some(b"Z0eX");
        if is_boxed || FILMS.iter().any(|signature| start.starts_with(signature)) {
            return Some(Self::Video);
        }
        let is_image = IMAGE_SIGNATURES.iter().any(|signature| start.starts_with(signature));
        is_image.then_some(Self::Image)
    }
}

fn is_kind(name: &[u8], kind: &[u8]) -> bool {
    name.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind))
}

/// Base64 of the first bytes of PNG, JPEG and GIF.
const IMAGE_SIGNATURES: [&[u8]; 3] = [b"iVBORw0KGgo", b"/9j/", b"R0lGOD"];

/// The same of FLAC, Ogg, and MP3 with a title.
const SOUNDS: [&[u8]; 3] = [b"ZkxhQ", b"T2dnUw", b"SUQz"];

/// The same of Matroska, and of MPEG streams.
const FILMS: [&[u8]; 3] = [b"GkXfo", b"AAABu", b"AAABs"];

/// The largest context: Gemini bills 258 tokens for each second, which is an hour.
const VIDEO_TOKENS: u64 = 1_000_000;

/// Media of one request that are read; providers take a hundred.
const MAX_MEDIA_READ: usize = 256;

/// Text of one request that is read for what its media are, beside the reading of all of it.
const MAX_MEDIA_BYTES_READ: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::MediaKind;

    #[test]
    fn a_medium_is_known_by_its_first_bytes() {
        for (start, medium) in [
            (&b"iVBORw0KGgoAAAANSUhEUgAACAAAAAMACAIAAAA"[..], Some(MediaKind::Image)),
            (b"data:image/png;base64,iVBORw0KGgo", Some(MediaKind::Image)),
            (b"R0lGODlhAQABAIAAAAAAAP", Some(MediaKind::Image)),
            (b"/9j/4AAQSkZJRgABAQ", Some(MediaKind::Image)),
            (b"data:image/avif;base64,AAAA", Some(MediaKind::Image)),
            (b"JVBERi0xLjcK", Some(MediaKind::Document)),
            (b"DATA:application/pdf;base64,AAAA", Some(MediaKind::Document)),
            (b"data:audio/flac;base64,ZkxhQw", Some(MediaKind::Audio)),
            (b"data:Video/mp4;base64,AAAA", Some(MediaKind::Video)),
            (b"data:;base64,AAAA", Some(MediaKind::Document)),
            (b"data:x/y;base64,AAAA", Some(MediaKind::Document)),
            (b"ZkxhQwAAACIQABAA", Some(MediaKind::Audio)),
            (b"SUQzBAAAAAAAI1RTU0UAAAAP", Some(MediaKind::Audio)),
            (b"UklGRgAAAABXQVZFZm10IBAAAAAB", Some(MediaKind::Audio)),
            (b"UklGRgAAAABBVkkgTElTVA", Some(MediaKind::Video)),
            (b"UklGRgAAAABXRUJQVlA4WAAA", Some(MediaKind::Image)),
            (b"AAAAIGZ0eXBpc29tAAACAGlzb20", Some(MediaKind::Video)),
            (b"GkXfo59ChoEBQveBAULy", Some(MediaKind::Video)),
            (b"data:text/plain;base64,AAAA", None),
            (b"data: note", None),
            (b"data:text/plain,hello", None),
            (b"hello", None),
            (b"", None),
        ] {
            assert_eq!(MediaKind::from_prefix(start), medium, "{}", String::from_utf8_lossy(start));
        }
    }
}
