//! Measures the content of an event that is not counted as text elsewhere: members that no protocol
//! defines, text under unusual keys, data that is no JSON object.
//!
//! All strings of an event count as text, except those under keys that are known to hold none. The
//! caller subtracts the text that the ordinary count has already covered. So a provider's new
//! member costs something from its first day.
//!
//! **Invariant:** one walk from string to string suffices, without a stack. Data that is no array
//! or object counts entirely as text.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use crate::base::json::split_string;
use crate::llm::protocol::LlmProtocol;

/// The measured content of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnknownTextMeasure {
    /// The length of the text, in bytes.
    pub(super) bytes: u64,
    /// The offset of the text behind its quote, if the event has exactly one text.
    pub(super) only: Option<usize>,
    /// True if part of the reasoning is encrypted, or may be.
    pub(super) is_partial: bool,
    /// The tokens of images and audio, on the high side.
    pub(super) media: u64,
}

/// Measures the text in an event. `name` is the event's name, or empty in chat. Returns `None` if
/// the event brings no new text.
pub(super) fn measure_event(
    protocol: LlmProtocol,
    name: &[u8],
    data: &[u8],
) -> Option<UnknownTextMeasure> {
    if !brings_new_text(protocol, name, data) {
        return None;
    }
    if !matches!(data.trim_ascii_start().first(), Some(b'{' | b'[')) {
        return Some(UnknownTextMeasure {
            bytes: data.len() as u64,
            ..UnknownTextMeasure::default()
        });
    }
    let classify = if data.len() > MAX_TEXTLESS_BYTES {
        EventKeyKind::classify_long_event_key
    } else {
        EventKeyKind::classify_event_key
    };
    let mut walk = EventTextWalker::new(classify, protocol == LlmProtocol::Chat);
    let is_json = walk.walk_strings(data);
    let carried = walk.to_measure();
    Some(UnknownTextMeasure { only: carried.only.filter(|_| is_json), ..carried })
}

/// Returns the bytes of text in the `output` of a response, which repeats the whole generated text.
pub(super) fn output_text_bytes(output: &[u8]) -> u64 {
    let mut walk = EventTextWalker::new(EventKeyKind::classify_output_key, false);
    if walk.walk_strings(output) { walk.to_measure().bytes } else { 0 }
}

/// Returns true if the event brings text for the first time. Other events repeat text or describe
/// the request.
fn brings_new_text(protocol: LlmProtocol, name: &[u8], data: &[u8]) -> bool {
    match (protocol, name) {
        (LlmProtocol::Chat, _) => data != b"[DONE]",
        // The whole event is short in every protocol. A long one brings text, whatever its name says.
        (_, b"error" | b"ping" | b"keepalive") => data.len() > MAX_TEXTLESS_BYTES,
        // The model read the result of a tool; it did not write the result.
        (LlmProtocol::Messages, b"content_block_start") => TOOL_RESULT_TYPE.find(data).is_none(),
        (LlmProtocol::Messages, name) => {
            !matches!(
                name,
                b"message_start" | b"message_delta" | b"message_stop" | b"content_block_stop"
            ) || data.len() > MAX_TEXTLESS_BYTES
        }
        // A reasoning summary is not the billed reasoning.
        (_, b"response.reasoning_summary_text.delta") => false,
        (LlmProtocol::Responses, name) => {
            name.ends_with(b".delta") || !name.starts_with(b"response.")
        }
    }
}

/// Returns the kind of a Responses event that contains text which deltas have brought before, as a number below
/// [`REPEATING_KINDS`]. A summary is not the billed reasoning.
pub(super) fn repeating_kind(name: &[u8]) -> Option<usize> {
    match name.strip_prefix(b"response.")? {
        b"output_item.added" => Some(0),
        b"content_part.added" => Some(1),
        b"output_item.done" => Some(2),
        b"content_part.done" => Some(3),
        name if name.starts_with(b"reasoning_summary") => None,
        name => name.ends_with(b".done").then_some(4),
    }
}

/// The number of kinds that [`repeating_kind`] tells apart.
pub(super) const REPEATING_KINDS: usize = 5;

/// The length up to which an event of a kind without text is believed to have none, in bytes. Our choice: it holds any
/// honest error message.
const MAX_TEXTLESS_BYTES: usize = 4096;

/// A walk through an event from string to string.
struct EventTextWalker {
    kind: fn(&[u8]) -> EventKeyKind,
    is_chat: bool,
    depth: usize,
    /// The depth of the value that is being skipped; 0 if none is.
    skipped: usize,
    key: EventKeyKind,
    is_after_key: bool,
    /// The value that holds reasoning: its depth, and its index in `reasonings`.
    reasoning: Option<(usize, usize)>,
    texts: u64,
    /// The bytes of reasoning by the key's name. The same reasoning under several names counts
    /// once.
    reasonings: [u64; 4],
    /// The depth of the value that repeats reasoning beside other text.
    beside: Option<usize>,
    /// The value that holds images or audio, by its depth.
    media: Option<(usize, BilledMedium)>,
    media_tokens: u64,
    /// The number of strings with text.
    pieces: usize,
    start: usize,
    is_partial: bool,
}

/// The kind of value under a key.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum EventKeyKind {
    #[default]
    Text,
    /// A string that is not text.
    Name,
    /// A value without text at any depth.
    NoText,
    /// Reasoning, with its index in `reasonings`.
    Reasoning(usize),
    /// A value with its own text that also repeats reasoning.
    RepeatsReasoning,
    /// A value that contains images or audio.
    Media(BilledMedium),
    /// Bytes, or an address.
    Data,
}

/// A medium that is not text and that the provider charges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BilledMedium {
    Image,
    Audio,
}

impl EventTextWalker {
    fn new(kind: fn(&[u8]) -> EventKeyKind, is_chat: bool) -> Self {
        Self {
            kind,
            is_chat,
            depth: 0,
            skipped: 0,
            key: EventKeyKind::Text,
            is_after_key: false,
            reasoning: None,
            texts: 0,
            reasonings: [0; 4],
            beside: None,
            media: None,
            media_tokens: 0,
            pieces: 0,
            start: 0,
            is_partial: false,
        }
    }

    /// Walks through the data. Returns true if the data is one array or object and nothing else.
    /// Bytes behind it count as text.
    fn walk_strings(&mut self, data: &[u8]) -> bool {
        let mut rest = data;
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'"' => {
                    let start = data.len() - rest.len();
                    let (text, after) = split_string(rest);
                    rest = after;
                    // Data that was cut inside a string has no closing quote. A value cut this way
                    // still counts, a possible key does not.
                    let is_ended = start + text.len() < data.len();
                    if rest.trim_ascii_start().starts_with(b":") {
                        self.key = (self.kind)(text);
                        self.is_after_key = true;
                    } else if is_ended || self.is_after_key {
                        self.count_text(text, start);
                    }
                }
                b'{' | b'[' => self.open_container(),
                b'}' | b']' if self.depth > 1 => self.close_container(),
                // The outermost container closes: the walk ends here.
                b'}' | b']' => {
                    self.texts += rest.trim_ascii().len() as u64;
                    return rest.trim_ascii().is_empty();
                }
                _ => (),
            }
        }
        false
    }

    /// Enters an array or object and remembers by depth what its content means.
    fn open_container(&mut self) {
        self.depth += 1;
        // Containers in an array have no key: the meaning of the array's key continues to apply.
        let is_member = std::mem::take(&mut self.is_after_key) && self.skipped == 0;
        match self.key {
            EventKeyKind::NoText if is_member => self.skipped = self.depth,
            EventKeyKind::Reasoning(place) if is_member && self.reasoning.is_none() => {
                self.reasoning = Some((self.depth, place));
            }
            EventKeyKind::RepeatsReasoning if is_member => {
                self.beside = self.beside.or(Some(self.depth));
            }
            EventKeyKind::Media(medium) if is_member && self.media.is_none() => {
                self.media = Some((self.depth, medium));
            }
            _ => (),
        }
    }

    fn close_container(&mut self) {
        if self.skipped == self.depth {
            self.skipped = 0;
        }
        self.reasoning = self.reasoning.filter(|(depth, _)| *depth != self.depth);
        self.beside = self.beside.filter(|depth| *depth != self.depth);
        self.media = self.media.filter(|(depth, _)| *depth != self.depth);
        self.depth -= 1;
    }

    fn count_text(&mut self, text: &[u8], start: usize) {
        self.is_after_key = false;
        if text.is_empty() || self.skipped > 0 {
            return;
        }
        self.is_partial |=
            self.reasoning.is_some_and(|(_, place)| place == REASONING_DETAILS_INDEX);
        // A provider's id beside the choices of a chunk is not text.
        let is_id = self.is_chat && self.depth == 1 && text.len() <= MAX_ID_BYTES;
        if is_id || matches!(self.key, EventKeyKind::Name | EventKeyKind::NoText) {
            return;
        }
        if matches!(self.key, EventKeyKind::Data | EventKeyKind::Media(_)) {
            self.data(text);
            return;
        }
        let length = text.len() as u64;
        match (self.reasoning, self.key) {
            // Reasoning that LiteLLM repeats beside the choices has its own slot, so it is not
            // added to the original.
            (Some((_, place)), _) | (None, EventKeyKind::Reasoning(place)) => {
                let place = if self.beside.is_some() { BESIDE } else { place };
                self.reasonings[place] += length;
            }
            _ => self.texts += length,
        }
        self.pieces += 1;
        self.start = start;
    }

    /// Counts data that is not text: an image by a fixed amount, all other data by its length.
    fn data(&mut self, text: &[u8]) {
        let is_address = text.starts_with(b"http");
        let within = match self.key {
            EventKeyKind::Media(medium) => Some(medium),
            _ => self.media.map(|(_, medium)| medium),
        };
        self.media_tokens += match within {
            Some(BilledMedium::Image) => IMAGE_TOKENS,
            _ if IMAGES.iter().any(|start| text.starts_with(start)) => IMAGE_TOKENS,
            // The address of a source costs nothing.
            None if is_address => 0,
            _ => (text.len() as u64).div_ceil(SOUND_BYTES),
        };
    }

    fn to_measure(&self) -> UnknownTextMeasure {
        // Several names carry the same reasoning, so only the longest counts.
        let reasoning = self.reasonings.iter().copied().max().unwrap_or(0);
        UnknownTextMeasure {
            bytes: self.texts + reasoning,
            only: (self.pieces == 1 && self.media_tokens == 0).then_some(self.start),
            is_partial: self.is_partial,
            media: self.media_tokens,
        }
    }
}

impl EventKeyKind {
    /// Classifies a key of an event that brings text.
    fn classify_event_key(name: &[u8]) -> Self {
        match name {
            b"reasoning_content" | b"thinking" => Self::Reasoning(0),
            b"reasoning" => Self::Reasoning(1),
            b"reasoning_details" => Self::Reasoning(REASONING_DETAILS_INDEX),
            b"id"
            | b"object"
            | b"model"
            | b"type"
            | b"role"
            | b"index"
            | b"format"
            | b"provider"
            | b"system_fingerprint"
            | b"service_tier"
            | b"finish_reason"
            | b"stop_reason"
            | b"native_finish_reason"
            | b"matched_stop"
            | b"call_id"
            | b"tool_call_id"
            | b"tool_use_id"
            | b"item_id"
            | b"obfuscation"
            // Encrypted values are not text.
            | b"signature" | b"thought_signature" | b"thought_signatures" | b"encrypted_content" => Self::Name,
            b"data" | b"url" | b"b64_json" => Self::Data,
            b"provider_specific_fields" => Self::RepeatsReasoning,
            b"images" | b"image" | b"image_url" => Self::Media(BilledMedium::Image),
            b"audio" => Self::Media(BilledMedium::Audio),
            // Facts about the text, and content that the model read.
            b"usage"
            | b"x_groq"
            | b"error"
            | b"logprobs"
            | b"prompt_logprobs"
            | b"token_ids"
            | b"prompt_token_ids"
            | b"content_filter_results"
            | b"prompt_filter_results"
            | b"content_filter_offsets"
            | b"annotations"
            | b"citations"
            | b"citation"
            | b"search_results"
            | b"web_search_results"
            | b"tool_results"
            // A repetition of the reasoning that stands beside it.
            | b"thinking_blocks" => Self::NoText,
            _ => Self::Text,
        }
    }

    /// Classifies a key of a long event, whose error counts as text.
    fn classify_long_event_key(name: &[u8]) -> Self {
        if name == b"error" { Self::Text } else { Self::classify_event_key(name) }
    }

    /// Classifies a key of a response's output. The model read its tools' results, and summaries
    /// are not billed.
    fn classify_output_key(name: &[u8]) -> Self {
        match name {
            b"text" | b"refusal" | b"arguments" | b"input" | b"code" => Self::Text,
            b"summary" | b"results" | b"result" | b"outputs" | b"output" | b"logprobs"
            | b"annotations" | b"tools" | b"action" => Self::NoText,
            _ => Self::Name,
        }
    }
}

/// The tokens of an image of the usual size, as Gemini charges it.
const IMAGE_TOKENS: u64 = 1290;

/// The bytes of base64 per token of audio. Speech at 16 kbit/s has 2,700 bytes of base64 a second,
/// for which Gemini charges 25 tokens.
const SOUND_BYTES: u64 = 100;

/// Prefixes of images: a `data:` address, and the base64 of PNG, JPEG, GIF and WebP.
const IMAGES: [&[u8]; 5] = [b"data:image/", b"iVBORw0KGgo", b"/9j/", b"R0lGOD", b"UklGR"];

/// The index of `reasoning_details` in `reasonings`.
const REASONING_DETAILS_INDEX: usize = 2;

/// The index in `reasonings` of reasoning in the fields that LiteLLM adds to the protocol's fields.
const BESIDE: usize = 3;

/// The maximum length of a value that may be an id, in bytes. Our choice.
const MAX_ID_BYTES: usize = 64;

/// Finds the types of blocks that hold the result of a provider's tool.
static TOOL_RESULT_TYPE: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("_tool_result\""));
