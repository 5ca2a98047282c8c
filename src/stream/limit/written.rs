//! How many tokens a stream has written: what it must be at least, and what it is taken for.
//!
//! Nobody counts tokens for us while a stream runs, and a tokenizer of our own would be wrong for
//! most models. So there are two figures, each wrong on its safe side: [`Written::at_least`] decides
//! that a stream is cut, [`Written::estimate`] what a stream is charged that nobody reported.

use serde_json::value::RawValue;

use crate::budget::Tokens;

/// The text of a stream, of its tools' arguments and of its reasoning, as far as it is shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    /// Texts that came in one piece.
    pieces: u64,
    /// Their length in JSON, escapes included.
    bytes: u64,
    /// Part of what was written is not shown.
    is_partial: bool,
}

impl Written {
    /// Counts a JSON string and says whether it holds anything.
    pub(super) fn add(&mut self, text: Option<&RawValue>) -> bool {
        let text = text.and_then(|text| text.get().strip_prefix('"')?.strip_suffix('"'));
        let Some(text) = text.filter(|text| !text.is_empty()) else { return false };
        self.pieces += 1;
        self.bytes = self.bytes.saturating_add(text.len() as u64);
        true
    }

    /// Reasoning is billed in full and shown as a summary, in part, or not at all.
    pub(super) fn hide(&mut self) {
        self.is_partial = true;
    }

    /// A lower bound: an honest stream is never cut by it.
    ///
    /// A stream of one token an event, as OpenAI, vLLM and llama.cpp send, is caught at twice what
    /// was granted; one of many tokens an event, as Anthropic and Gemini send, at 16 bytes to each
    /// granted token, which measures three to four and a half times that in English and Chinese.
    /// Only a text that is mostly longer tokens than that (rulers, blanks) could be cut too early.
    pub(super) fn at_least(&self) -> Tokens {
        Tokens((self.pieces / PIECES_PER_TOKEN).max(self.bytes / LONG_TOKEN))
    }

    /// An estimate on the high side; all there is (the reservation bounds it) where part is hidden.
    pub(super) fn estimate(&self) -> Tokens {
        if self.is_partial {
            return Tokens(u64::MAX);
        }
        Tokens(self.pieces.max(self.bytes.div_ceil(SHORT_TOKEN)))
    }
}

/// LiteLLM plays a stream for models that have none, in pieces of 5 characters (`o1-pro`) or 3 (its
/// mocks): a token of English is up to one and a half of them.
const PIECES_PER_TOKEN: u64 = 2;

/// No language measured averages more: in o200k Hindi comes to 7 bytes a token, which is 15 where
/// every letter is escaped, as Python does. 16 blanks of indentation are one token.
const LONG_TOKEN: u64 = 16;

/// As for the input: English has 4 bytes to a token, code and most other languages near 3.
const SHORT_TOKEN: u64 = 3;
