//! Estimates the tokens of images, documents, audio and video in a request, from the first bytes of
//! each medium.
//!
//! Media are compressed: a document page that a provider bills with 3,000 tokens can be 100 bytes
//! long, and an hour of video 90 KB. So the reservation goes by the content of the media, beside
//! their length. The scan of a body only records the positions of media. They are read when the
//! body is complete.
//!
//! **Invariant:** a medium that is unreadable, lacks its size or states an impossible size counts
//! as the most that such a medium costs. For a document, a recording or a video this is a long
//! document, a long recording, or a video that fills the largest context.

mod audio;
mod base64;
mod document;
mod image;

use memchr::memmem;

use self::base64::{Base64Decoder, decode_string};
use crate::base::rope::ByteRope;

/// The kind of a medium, by the text's prefix or by the declared type. The order is by cost; the
/// last kind is the most expensive.
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
    /// Tokens of all images, as a frontier model counts them.
    images: u64,
    /// Tokens of documents, audio and video.
    others: u64,
    /// Media inside the body that are not yet read: the kind, and the offset of the text.
    inline: Vec<(MediaKind, u64)>,
}

impl RequestMedia {
    /// Records a medium whose text begins at offset `at` of the body.
    pub(super) fn note_medium(&mut self, medium: MediaKind, at: u64) {
        if self.inline.len() < MAX_MEDIA_READ {
            self.inline.push((medium, at));
        } else {
            // Media past the limit are charged without being read, so a body cannot force unlimited
            // reading.
            self.add_tokens(medium, None);
        }
    }

    /// Counts a medium that cannot be read.
    pub(super) fn add_unread(&mut self, medium: MediaKind) {
        self.add_tokens(medium, None);
    }

    /// Counts `count` fetched images, each as a large image.
    pub(super) fn count_fetched(&mut self, count: u64) {
        self.images = self.images.saturating_add(count.saturating_mul(image::MAX_IMAGE_TOKENS));
    }

    /// Reads the recorded media from the complete body.
    pub(super) fn read_media(&mut self, body: &ByteRope) {
        // One allowance for the whole request: each medium takes from it. A medium without an
        // allowance is unreadable and counts as the maximum.
        let mut left = MAX_MEDIA_BYTES_READ;
        for (medium, at) in std::mem::take(&mut self.inline) {
            let most = left.min(match medium {
                MediaKind::Image => image::MAX_HEAD_BYTES,
                MediaKind::Document | MediaKind::Audio => document::MAX_DOCUMENT_BYTES_READ,
                // No video format bounds its own duration in its first bytes.
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

    /// Returns the tokens of all media for a model.
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
    /// Returns the medium whose text begins with these bytes: a `data:` address, or base64.
    pub(super) fn from_prefix(start: &[u8]) -> Option<Self> {
        let Some(inline) =
            start.first_chunk::<5>().filter(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
        else {
            return Self::from_base64_prefix(start);
        };
        let start = &start[inline.len()..];
        // Text in a `data:` address is counted with the body's length.
        if is_kind(start, b"text/") {
            return None;
        }
        let is_data = || memmem::find(start, b";base64,").is_some();
        Self::of_type(start)
            // The provider decides what to do with other types or a missing type. A document is the
            // expensive guess.
            .or_else(|| (is_kind(start, b"application/") || is_data()).then_some(Self::Document))
    }

    /// Returns the medium of a declared media type.
    pub(super) fn of_type(name: &[u8]) -> Option<Self> {
        let kinds: [(&[u8], Self); 4] = [
            (b"image/", Self::Image),
            (b"application/pdf", Self::Document),
            (b"audio/", Self::Audio),
            (b"video/", Self::Video),
        ];
        kinds.into_iter().find(|(kind, _)| is_kind(name, kind)).map(|(_, medium)| medium)
    }

    /// Returns the medium in the name of a key or of a part's type, such as `video_url` or
    /// `input_audio`.
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
            // The type of a RIFF file stands behind the length: `AVI`, `WAV`, otherwise WebP.
            return match start.get(12..16) {
                Some(b"QVZF") => Some(Self::Audio),
                Some(b"Vkkg") => Some(Self::Video),
                _ => Some(Self::Image),
            };
        }
        if SOUNDS.iter().any(|signature| start.starts_with(signature)) {
            return Some(Self::Audio);
        }
        // MP4: a short box length, then `ftyp`.
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

/// Base64 of the first bytes of FLAC, Ogg, and MP3 with a title.
const SOUNDS: [&[u8]; 3] = [b"ZkxhQ", b"T2dnUw", b"SUQz"];

/// Base64 of the first bytes of Matroska and of MPEG streams.
const FILMS: [&[u8]; 3] = [b"GkXfo", b"AAABu", b"AAABs"];

/// The tokens of a video: the largest context. Gemini bills 258 tokens for each second, so this is
/// about an hour.
const VIDEO_TOKENS: u64 = 1_000_000;

/// The maximum number of media that are read in one request. Our choice: providers accept a
/// hundred.
const MAX_MEDIA_READ: usize = 256;

/// The maximum number of bytes of text that are read in one request to measure its media, beside
/// the scan of the whole body. Our choice.
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
