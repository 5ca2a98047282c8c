//! How many tokens a response has written: what it must be at least, and what it is taken for.
//!
//! Nobody counts tokens for us while a stream runs, and a tokenizer of our own would be wrong for
//! most models. So there are two figures, each wrong on its safe side: [`OutputEstimate::lower_bound`] decides
//! that a stream is cut and that a report is too low, [`OutputEstimate::upper_estimate`] what a stream is charged
//! that nobody reported. Both count text, and the second images and sound: events without any, comments and framing are
//! nothing.

use memchr::memchr;
use serde_json::value::RawValue;

use crate::llm::budget::Tokens;

/// The text of a response, of its tools' arguments and of its reasoning, as far as it is shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OutputEstimate {
    /// Texts that came in one piece.
    pieces: u64,
    /// Their length in JSON, escapes included.
    bytes: u64,
    /// Their length without escapes; an escaped character counts as three bytes.
    decoded: u64,
    /// Part of what was written is not shown.
    is_partial: bool,
    /// Tokens of images and sound, on the high side.
    media: u32,
}

impl OutputEstimate {
    /// Counts a JSON string and says whether it holds anything.
    pub(super) fn add_string(&mut self, text: Option<&RawValue>) -> bool {
        let text = text.and_then(|text| text.get().strip_prefix('"')?.strip_suffix('"'));
        text.is_some_and(|text| self.add_text(text.as_bytes()))
    }

    /// Counts the inside of a JSON string and says whether it holds anything.
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

    /// Counts images and sound. No two providers bill them alike: they are in the estimate alone.
    pub(super) fn add_media(&mut self, tokens: u64) {
        self.media = self.media.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    /// Reasoning is billed in full and shown as a summary, in part, or not at all.
    pub(super) fn mark_partial(&mut self) {
        self.is_partial = true;
    }

    /// Length of the text so far, in JSON.
    pub(super) fn text_bytes(&self) -> u64 {
        self.bytes
    }

    /// Texts so far: it grows with each event that brings one.
    pub(super) fn text_count(&self) -> u64 {
        self.pieces
    }

    /// A lower bound: an honest stream is never cut by it.
    ///
    /// A stream of one token an event, as OpenAI, vLLM and llama.cpp send, is caught at twice what
    /// was granted; one of many tokens an event, as Anthropic and Gemini send, at 16 bytes to each
    /// granted token, which measures three to four and a half times that in English and Chinese.
    /// Only a text that is mostly longer tokens than that (rulers, blanks) could be cut too early.
    pub(super) fn lower_bound(&self) -> Tokens {
        Tokens((self.pieces / MAX_PIECES_PER_TOKEN).max(self.bytes / MAX_BYTES_PER_TOKEN))
    }

    /// An estimate on the high side; all there is (the reservation bounds it) where part is hidden.
    pub(super) fn upper_estimate(&self) -> Tokens {
        if self.is_partial {
            return Tokens(u64::MAX);
        }
        let text = self.pieces.max(self.decoded.div_ceil(MIN_BYTES_PER_TOKEN));
        Tokens(text.saturating_add(self.media.into()))
    }
}

/// The length of a JSON string's inside once its escapes are decoded, on the high side.
fn decoded_length(text: &[u8]) -> usize {
    // Short ones are most: a search that is fast for long ones costs more to begin.
    if text.len() < MAX_BYTEWISE_SCAN && !text.contains(&b'\\') {
        return text.len();
    }
    let (mut length, mut rest) = (text.len(), text);
    while let Some(at) = memchr(b'\\', rest) {
        let (escape, character) = if rest.get(at + 1) == Some(&b'u') { (6, 3) } else { (2, 1) };
        length -= escape - character;
        rest = rest.get(at + escape..).unwrap_or_default();
    }
    length
}

/// LiteLLM plays a stream for models that have none, in pieces of 5 characters (`o1-pro`) or 3 (its
/// mocks): a token of English is up to one and a half of them.
const MAX_PIECES_PER_TOKEN: u64 = 2;

/// No language measured averages more: in o200k Hindi comes to 7 bytes a token, which is 15 where
/// every letter is escaped, as Python does. 16 blanks of indentation are one token.
const MAX_BYTES_PER_TOKEN: u64 = 16;

/// As for the input: English has 4 bytes to a token, code and most other languages near 3.
const MIN_BYTES_PER_TOKEN: u64 = 3;

/// Bytes of a text that are looked at one by one.
const MAX_BYTEWISE_SCAN: usize = 16;
