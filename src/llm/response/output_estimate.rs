//! Estimates the tokens that a response has written: a lower bound, and an estimate on the high
//! side.
//!
//! No provider reports token counts while a stream runs, and a built-in tokenizer would be wrong
//! for most models. So there are two figures, each wrong on its safe side.
//! [`OutputEstimate::lower_bound`] decides that a stream is truncated and that a usage report is
//! too low. [`OutputEstimate::upper_estimate`] is the charge for a stream without a report. Both
//! figures count text, and the second also counts images and audio. Events without text, comments
//! and framing count nothing.

use memchr::memchr;
use serde_json::value::RawValue;

use crate::llm::budget::Tokens;

/// The text of a response, of its tool arguments and of its reasoning, as far as the provider sends
/// it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OutputEstimate {
    /// The number of texts, each of which arrived in one piece.
    pieces: u64,
    /// The length of the texts in JSON, including escapes, in bytes.
    bytes: u64,
    /// The length of the texts without escapes, in bytes. An escaped character counts as three
    /// bytes.
    decoded: u64,
    /// True if part of the billed text is not sent.
    is_partial: bool,
    /// The tokens of images and audio, on the high side.
    media: u32,
}

impl OutputEstimate {
    /// Counts a JSON string. Returns true if the string is not empty.
    pub(super) fn add_string(&mut self, text: Option<&RawValue>) -> bool {
        let text = text.and_then(|text| text.get().strip_prefix('"')?.strip_suffix('"'));
        text.is_some_and(|text| self.add_text(text.as_bytes()))
    }

    /// Counts the inside of a JSON string. Returns true if the string is not empty.
    pub(super) fn add_text(&mut self, text: &[u8]) -> bool {
        if text.is_empty() {
            return false;
        }
        self.pieces += 1;
        self.bytes = self.bytes.saturating_add(text.len() as u64);
        self.decoded = self.decoded.saturating_add(decoded_length(text) as u64);
        true
    }

    /// Counts a text of which only the length in JSON is known.
    pub(super) fn add_length(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.decoded = self.decoded.saturating_add(bytes);
    }

    /// Counts images and audio. Providers charge them differently, so they count only in the upper
    /// estimate.
    pub(super) fn add_media(&mut self, tokens: u64) {
        self.media = self.media.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    /// Records that part of the text is hidden. Providers charge reasoning in full and send it as a
    /// summary, in part, or not at all.
    pub(super) fn mark_partial(&mut self) {
        self.is_partial = true;
    }

    /// Returns the length of the text so far in JSON, in bytes.
    pub(super) fn text_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of texts so far. The number grows with each event that contains text.
    pub(super) fn text_count(&self) -> u64 {
        self.pieces
    }

    /// Returns a lower bound of the tokens. The bound never truncates an honest stream.
    ///
    /// A stream with one token per event, as OpenAI, vLLM and llama.cpp send, is truncated at twice
    /// the granted output. A stream with many tokens per event, as Anthropic and Gemini send, is
    /// truncated at 16 bytes per granted token. In English and Chinese that measures three to four
    /// and a half times the granted output. Only a text that consists mostly of longer tokens
    /// (rulers, blanks) could be truncated too early.
    pub(super) fn lower_bound(&self) -> Tokens {
        Tokens((self.pieces / MAX_PIECES_PER_TOKEN).max(self.bytes / MAX_BYTES_PER_TOKEN))
    }

    /// Returns an estimate on the high side. If part of the text is hidden, returns the maximum,
    /// which the reservation then bounds.
    pub(super) fn upper_estimate(&self) -> Tokens {
        if self.is_partial {
            return Tokens(u64::MAX);
        }
        // Each piece has at least one token, so many short pieces count by their number.
        let text = self.pieces.max(self.decoded.div_ceil(MIN_BYTES_PER_TOKEN));
        Tokens(text.saturating_add(self.media.into()))
    }
}

/// Returns the length of a JSON string's inside after decoding its escapes, on the high side.
fn decoded_length(text: &[u8]) -> usize {
    // Most texts are short, and `memchr` costs more to start than a short scan takes.
    if text.len() < MAX_BYTEWISE_SCAN && !text.contains(&b'\\') {
        return text.len();
    }
    let (mut length, mut rest) = (text.len(), text);
    while let Some(at) = memchr(b'\\', rest) {
        // A hexadecimal escape takes 6 bytes and decodes to at most 3 in UTF-8; every other escape takes 2 and
        // decodes to 1.
        let (escape, character) = if rest.get(at + 1) == Some(&b'u') { (6, 3) } else { (2, 1) };
        length -= escape - character;
        rest = rest.get(at + escape..).unwrap_or_default();
    }
    length
}

/// The maximum number of pieces per token. LiteLLM simulates a stream for models without streaming,
/// in pieces of 5 characters (`o1-pro`) or 3 (its mocks). A token of English is up to one and a
/// half such pieces.
const MAX_PIECES_PER_TOKEN: u64 = 2;

/// The maximum average length of a token in bytes. No measured language averages more: in o200k,
/// Hindi has 7 bytes per token, and 15 if every letter is escaped, as Python does. 16 blanks of
/// indentation are one token.
const MAX_BYTES_PER_TOKEN: u64 = 16;

/// The minimum average length of a token in bytes, as in the input estimate: English has 4 bytes
/// per token, code and most other languages near 3.
const MIN_BYTES_PER_TOKEN: u64 = 3;

/// The length up to which a text is scanned byte by byte, in bytes.
const MAX_BYTEWISE_SCAN: usize = 16;
