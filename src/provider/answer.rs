//! What will be said, whatever the protocol: pieces of text or of a tool's arguments, and usage.

use std::time::SystemTime;

use uuid::Uuid;

use super::ask::Ask;
use super::event::{FILLER, STAMP};
use super::script::{Report, Script};

/// The content of one answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) script: Script,
    /// Unique, without a protocol's prefix: `LiteLLM` keeps one spend row per id.
    pub(super) id: String,
    pub(super) model: String,
    /// Unix time in seconds.
    pub(super) created: u64,
    /// The name of the tool that is asked for.
    pub(super) tool: Option<String>,
    pieces: Vec<Piece>,
    /// Content chunks in the stream; the pieces go round until there are so many.
    pub(super) chunks: u32,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) finish: Finish,
    /// Whether a chat stream reports usage.
    pub(super) reports: bool,
}

/// Why the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Stop,
    Length,
    Tool,
}

/// The content of one chunk.
#[derive(Clone, Debug)]
struct Piece {
    stamped: bool,
    text: String,
    filler: u64,
}

impl Answer {
    pub(super) fn new(ask: &Ask<'_>, mut script: Script) -> Self {
        let tool = script.tool.clone().filter(|_| script.repeat || !ask.has_tool_result());
        if let Some(last) = ask.last_words().filter(|_| script.echo) {
            script.text = last;
        }
        let pieces =
            if tool.is_some() { pieces_of_arguments(&script) } else { pieces_of_text(&script) };
        let words = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let chunks = if tool.is_some() { words } else { script.chunks.unwrap_or(words) };
        let output = script.output.unwrap_or(u64::from(chunks).saturating_add(script.reasoning));
        let limit = ask.limit().filter(|limit| script.obey && *limit < output);
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
                (Some(_), _) => Finish::Length,
                (None, Some(_)) => Finish::Tool,
                (None, None) => Finish::Stop,
            },
            reports: ask.wants_usage() && script.usage != Report::None,
            tool,
            script,
        }
    }

    /// The content of the chunks, as far as they differ, marked for [`Event::new`]; each with the
    /// length of its filler.
    ///
    /// [`Event::new`]: super::event::Event::new
    pub(super) fn content(&self) -> impl Iterator<Item = (String, u64)> {
        let chunks = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        self.pieces.iter().take(chunks).map(|piece| (piece.marked(), piece.filler))
    }

    /// All content in one, cut at [`WHOLE`] bytes.
    pub(super) fn whole(&self) -> String {
        let mut whole = String::new();
        let chunks = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        for piece in self.pieces.iter().cycle().take(chunks) {
            if whole.len() + piece.text.len() > WHOLE {
                break;
            }
            if piece.stamped {
                whole.push_str("t=0000000000000000000 ");
            }
            whole.push_str(&piece.text);
            let room = WHOLE.saturating_sub(whole.len());
            let filler = usize::try_from(piece.filler).map_or(room, |filler| filler.min(room));
            whole.extend(std::iter::repeat_n('x', filler));
        }
        whole
    }

    /// What Anthropic calls input: not what came from the cache, nor what went into it.
    pub(super) fn uncached(&self) -> u64 {
        self.input - self.script.cached - self.script.cache_write
    }

    /// Dollars at one micro-dollar for a token read and two for a token written.
    pub(super) fn cost(&self) -> f64 {
        let micros = self.input.saturating_add(self.output.saturating_mul(2));
        format!("{micros}e-6").parse().expect("digits and an exponent are a number")
    }
}

impl Piece {
    fn marked(&self) -> String {
        let stamp = if self.stamped { format!("t={STAMP} ") } else { String::new() };
        let filler = if self.filler > 0 { FILLER } else { "" };
        format!("{stamp}{}{filler}", self.text)
    }
}

/// The words, each with the space after it; or so many letters.
fn pieces_of_text(script: &Script) -> Vec<Piece> {
    let stamped = script.stamps;
    match script.size {
        Some(size) => {
            let stamp = if stamped { STAMP_LENGTH } else { 0 };
            vec![Piece { stamped, text: String::new(), filler: size.saturating_sub(stamp) }]
        }
        None => script
            .text
            .split_inclusive(' ')
            .map(|word| Piece { stamped, text: word.to_owned(), filler: 0 })
            .collect(),
    }
}

/// The arguments in `chunks` pieces of about one length, never within a character.
fn pieces_of_arguments(script: &Script) -> Vec<Piece> {
    let chars: Vec<char> = script.arguments.chars().collect();
    let pieces = script.chunks.map_or(ARGUMENT_PIECES, |chunks| chunks.max(1) as usize);
    chars
        .chunks(chars.len().div_ceil(pieces).max(1))
        .map(|piece| Piece { stamped: false, text: piece.iter().collect(), filler: 0 })
        .collect()
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// `t=`, 19 digits and a space.
const STAMP_LENGTH: u64 = 22;
/// The longest text that is repeated in one piece, by a unary answer or at the end of a stream.
const WHOLE: usize = 16 << 20;
/// Pieces of a tool's arguments where the script does not say.
const ARGUMENT_PIECES: usize = 4;
