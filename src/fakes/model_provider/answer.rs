//! The content of an answer, independent of the protocol: pieces of text or of a tool's arguments, and usage.

use std::time::SystemTime;

use uuid::Uuid;

use super::event::{FILLER_MARK, STAMP_MARK};
use super::provider_request::ProviderRequest;
use super::script::{ProviderScript, UsageReporting};

/// The content of one answer.
#[derive(Debug)]
pub(super) struct ScriptedAnswer {
    pub(super) script: ProviderScript,
    /// The unique id, without a protocol's prefix: `LiteLLM` stores one spend row per id.
    pub(super) id: String,
    pub(super) model: String,
    /// The Unix time in seconds.
    pub(super) created: u64,
    /// The name of the tool that the answer calls.
    pub(super) tool: Option<String>,
    pieces: Vec<AnswerChunk>,
    /// The number of content chunks in the stream. The pieces repeat until the number is reached.
    pub(super) chunks: u32,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) finish: FinishReason,
    /// True if a chat stream reports usage.
    pub(super) reports: bool,
}

/// The reason why the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinishReason {
    Stop,
    Length,
    Tool,
}

/// The content of one chunk.
#[derive(Clone, Debug)]
struct AnswerChunk {
    stamped: bool,
    text: String,
    filler: u64,
}

impl ScriptedAnswer {
    pub(super) fn new(ask: &ProviderRequest<'_>, mut script: ProviderScript) -> Self {
        // A conversation with a tool's result receives a text, so that an agent's loop ends.
        let tool = script.tool.clone().filter(|_| script.repeat || !ask.has_tool_result());
        if let Some(last) = ask.last_text().filter(|_| script.echo) {
            script.text = last;
        }
        let pieces = if tool.is_some() { argument_chunks(&script) } else { text_chunks(&script) };
        // A tool's arguments are sent exactly once; a text may repeat to fill its chunks.
        let words = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let chunks = if tool.is_some() { words } else { script.chunks.unwrap_or(words) };
        // One token per chunk, unless the script sets the output.
        let output = script.output.unwrap_or(u64::from(chunks).saturating_add(script.reasoning));
        // The limit counts only for scripts that obey it.
        let limit = ask.output_limit().filter(|limit| script.obey && *limit < output);
        Self {
            id: Uuid::now_v7().simple().to_string(),
            model: ask.model.clone().unwrap_or_default(),
            created: unix_seconds(),
            pieces,
            chunks: limit
                .map_or(chunks, |limit| u32::try_from(limit).unwrap_or(chunks).min(chunks)),
            input: script.input,
            output: limit.unwrap_or(output),
            finish: match (limit, &tool) {
                (Some(_), _) => FinishReason::Length,
                (None, Some(_)) => FinishReason::Tool,
                (None, None) => FinishReason::Stop,
            },
            reports: ask.wants_usage() && script.usage != UsageReporting::None,
            tool,
            script,
        }
    }

    /// Returns the content of the distinct chunks, marked for [`Event::new`], each with the length of its filler.
    ///
    /// [`Event::new`]: super::event::RenderedEvent::new
    pub(super) fn chunk_contents(&self) -> impl Iterator<Item = (String, u64)> {
        let chunks = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        self.pieces.iter().take(chunks).map(|piece| (piece.with_marks(), piece.filler))
    }

    /// Returns the whole content as one text, cut at [`MAX_FULL_CONTENT_BYTES`] bytes.
    pub(super) fn full_content(&self) -> String {
        let mut whole = String::new();
        let chunks = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        for piece in self.pieces.iter().cycle().take(chunks) {
            // The number of chunks may be huge, so that the text is bounded and not the number.
            if whole.len() + piece.text.len() > MAX_FULL_CONTENT_BYTES {
                break;
            }
            // A unary answer has no send time; zeros keep the length.
            if piece.stamped {
                whole.push_str("t=0000000000000000000 ");
            }
            whole.push_str(&piece.text);
            let room = MAX_FULL_CONTENT_BYTES.saturating_sub(whole.len());
            let filler = usize::try_from(piece.filler).map_or(room, |filler| filler.min(room));
            whole.extend(std::iter::repeat_n('x', filler));
        }
        whole
    }

    /// Returns Anthropic's input count: the input tokens that were neither read from the cache nor written to it.
    pub(super) fn uncached_input(&self) -> u64 {
        self.input - self.script.cached - self.script.cache_write
    }

    /// Returns the cost in dollars: one micro-dollar for an input token, two for an output token.
    pub(super) fn cost_dollars(&self) -> f64 {
        let micros = self.input.saturating_add(self.output.saturating_mul(2));
        // Parsing the decimal text gives the nearest float.
        format!("{micros}e-6").parse().expect("digits and an exponent are a number")
    }
}

impl AnswerChunk {
    fn with_marks(&self) -> String {
        let stamp = if self.stamped { format!("t={STAMP_MARK} ") } else { String::new() };
        let filler = if self.filler > 0 { FILLER_MARK } else { "" };
        format!("{stamp}{}{filler}", self.text)
    }
}

/// Returns the script's words, each with the space after it, or one chunk of the script's size.
fn text_chunks(script: &ProviderScript) -> Vec<AnswerChunk> {
    let stamped = script.stamps;
    match script.size {
        Some(size) => {
            // The stamp counts for the size of the chunk.
            let stamp = if stamped { STAMP_LENGTH } else { 0 };
            vec![AnswerChunk { stamped, text: String::new(), filler: size.saturating_sub(stamp) }]
        }
        None => script
            .text
            .split_inclusive(' ')
            .map(|word| AnswerChunk { stamped, text: word.to_owned(), filler: 0 })
            .collect(),
    }
}

/// Splits the arguments into `chunks` pieces of about equal length, never within a character.
fn argument_chunks(script: &ProviderScript) -> Vec<AnswerChunk> {
    let chars: Vec<char> = script.arguments.chars().collect();
    let pieces = script.chunks.map_or(DEFAULT_ARGUMENT_CHUNKS, |chunks| chunks.max(1) as usize);
    chars
        .chunks(chars.len().div_ceil(pieces).max(1))
        .map(|piece| AnswerChunk { stamped: false, text: piece.iter().collect(), filler: 0 })
        .collect()
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The length of a stamp: `t=`, 19 digits and a space.
const STAMP_LENGTH: u64 = 22;
/// The maximum length of a text that is sent in one piece, by a unary answer or at the end of a stream. Our choice.
const MAX_FULL_CONTENT_BYTES: usize = 16 << 20;
/// The number of pieces of a tool's arguments if the script does not set it.
const DEFAULT_ARGUMENT_CHUNKS: usize = 4;
