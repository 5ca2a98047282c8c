//! A strict JSON reader for request bodies that stores no part of the body.
//!
//! A [`JsonScanner`] receives the frames of a document as they arrive from the socket, cut at any byte, and reads each
//! byte once. It builds no tree. It stores only the offsets of the top-level members, so that a 32 MiB prompt costs a
//! few hundred bytes. A caller that holds the frames can then read or replace single values ([`rope`](super::rope)).
//!
//! The scanner is stricter than most parsers. The upstream parses each accepted body again, and every difference
//! between two parsers is a way past the policy:
//!
//! - RFC 8259 to the letter: no comments, no trailing commas, no BOM, no `NaN`, no raw control characters, and no text
//!   after the top-level value, which must be an object.
//! - An object has each key once, at every depth. Keys are compared after unescaping: given `"user"` and `"us\u0065r"`,
//!   LiteLLM takes the last value and other parsers take the first.
//! - All text is UTF-8, and `\u` escapes of lone surrogates are refused: Python keeps them, Go replaces them, others
//!   fail.
//! - Numbers are checked for their form only, whatever their size. No number is converted.
//!
//! **Invariant:** the result, offsets included, does not depend on how the body is split into frames.

mod cursor;
mod error;
mod keys;
mod number;
mod string;
mod vector;
mod visitor;
mod whole_document;

use std::mem;
use std::ops::Range;

pub use self::cursor::{JsonCursor, split_string};
pub use self::error::JsonError;
use self::keys::JsonKeyStack;
pub use self::keys::{JsonKey, MAX_LIVE_KEYS};
use self::number::JsonNumberState;
use self::string::JsonStringState;
pub use self::string::{is_plain_text, string_length};
use self::visitor::JsonStringPrefix;
pub use self::visitor::JsonVisitor;
use self::visitor::ValueCounter;
pub use self::whole_document::read_whole;

/// Reads one JSON document, frame by frame.
///
/// ```
/// # use cogni_gateway::base::json::{JsonLimits, JsonScanner};
/// let mut scanner = JsonScanner::new(JsonLimits::default());
/// scanner.feed_frame(br#"{"model": "gpt"#)?;
/// scanner.feed_frame(br#"-5"}"#)?;
/// let document = scanner.finish_document()?;
/// assert_eq!(document.find_member("model").unwrap().value, 10..17);
/// # Ok::<(), cogni_gateway::base::json::JsonError>(())
/// ```
pub struct JsonScanner<W = ()> {
    limits: JsonLimits,
    state: JsonScannerState,
    /// The offset of the next byte in the document.
    at: u64,
    text: JsonStringState,
    /// The bytes of `true`, `false` or `null` that are still expected.
    literal: &'static [u8],
    /// The arrays and objects that are open, with the keys seen in them.
    keys: JsonKeyStack,
    /// The top-level member that is being read.
    member: JsonMember,
    members: Vec<JsonMember>,
    /// The visitor, which receives the events and decides which texts it wants.
    watch: W,
    start: JsonStringPrefix,
    /// The first error. After it, no byte is read.
    failed: Option<JsonError>,
}

/// The largest depth and width of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonLimits {
    /// The largest number of arrays and objects inside one another, with the top-level object. Our choice: tool schemas
    /// reach 20; `serde_json` gives up at 128 and Python near 1,000, so 64 leaves room and stays below both.
    pub depth: u8,
    /// The largest number of members of the top-level object. Our choice: the largest protocol has about 40.
    pub members: u16,
}

/// The result of reading a whole document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JsonDocument {
    /// The members of the top-level object, in the order of the document.
    pub members: Vec<JsonMember>,
}

/// One member of the top-level object, by its offsets in the document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JsonMember {
    pub key: JsonKey,
    /// The offset of the key's opening quote.
    pub start: u64,
    /// True if the key has no escape.
    pub is_plain: bool,
    /// The position of the value, with quotes or brackets and without surrounding white space.
    pub value: Range<u64>,
    pub kind: JsonType,
    /// The number of strings, arrays and objects directly inside the value.
    pub entries: u32,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JsonType {
    #[default]
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

/// The state between two bytes.
// The states of an object and of an array, in their order. `value` is the states of a value, and of all values inside it.
//
//     FirstKey ─"─▶ Key ─"─▶ Colon ─:─▶ value ─▶ AfterMember ─,─▶ NextKey ─"─▶ Key …    `}` ends FirstKey and AfterMember
//     FirstValue ─▶ value ─▶ AfterElement ─,─▶ Value ─▶ value …                       `]` ends FirstValue and AfterElement
//
// The first key and the first element have states of their own, because only there the container may end: with one state
// for both, `{"a":1,}` would be valid.
#[derive(Clone, Copy, Debug)]
enum JsonScannerState {
    /// The beginning of the document, before or inside white space.
    Start,
    /// The position before a value: after `:`, and after `,` in an array.
    Value,
    /// The position before a value or `]`: after `[`.
    FirstValue,
    /// The position before a key or `}`: after `{`.
    FirstKey,
    /// The position before a key: after `,` in an object.
    NextKey,
    /// Inside a key.
    Key,
    /// The position before `:`: after a key.
    Colon,
    /// Inside a string value.
    Text,
    Number(JsonNumberState),
    /// Inside `true`, `false` or `null`.
    Literal,
    /// Before `,` or `}`: after a member of an object.
    AfterMember,
    /// Before `,` or `]`: after an element of an array.
    AfterElement,
    /// After the document; only white space may follow.
    End,
}

/// Checks a document that is complete in memory, as strictly as a request body. If a key stands twice, for example,
/// parsers disagree on its value, so the document is refused.
///
/// # Errors
/// Returns the first error in the document.
pub fn check_document(data: &[u8]) -> Result<(), JsonError> {
    let mut scanner = JsonScanner::new(JsonLimits::default());
    scanner.feed_frame(data)?;
    scanner.finish_document().map(drop)
}

/// Checks a document like [`check_document`], and that it has at most `most` values. A caller that parses the document
/// then knows how much memory the parsed values take: it depends on their number more than on the bytes of the text.
/// Returns the number of values.
///
/// # Errors
/// Returns the first error in the document, or [`JsonError::TooManyValues`].
pub fn check_small_document(data: &[u8], most: u32) -> Result<u32, JsonError> {
    let mut scanner = JsonScanner::with_visitor(JsonLimits::default(), ValueCounter::default());
    scanner.feed_frame(data)?;
    let (_, ValueCounter(values)) = scanner.finish_with_visitor()?;
    if values > most { Err(JsonError::TooManyValues { limit: most }) } else { Ok(values) }
}

impl JsonScanner {
    pub fn new(limits: JsonLimits) -> Self {
        Self::with_visitor(limits, ())
    }
}

impl<W: JsonVisitor> JsonScanner<W> {
    /// Creates a scanner that sends the events of the document to `watch`.
    pub fn with_visitor(limits: JsonLimits, watch: W) -> Self {
        Self {
            limits,
            state: JsonScannerState::Start,
            at: 0,
            text: JsonStringState::default(),
            literal: &[],
            keys: JsonKeyStack::default(),
            member: JsonMember::default(),
            members: Vec::new(),
            watch,
            start: JsonStringPrefix::default(),
            failed: None,
        }
    }

    /// Reads one more frame. After an error, every call returns that error.
    pub fn feed_frame(&mut self, data: &[u8]) -> Result<(), JsonError> {
        if let Some(invalid) = &self.failed {
            return Err(invalid.clone());
        }
        let outcome = self.scan_frame(data);
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    /// Ends the document after the last frame, and returns the offsets of its members.
    pub fn finish_document(self) -> Result<JsonDocument, JsonError> {
        self.finish_with_visitor().map(|(document, _)| document)
    }

    /// Ends the document like [`finish_document`](Self::finish_document), and returns the visitor with it.
    pub fn finish_with_visitor(self) -> Result<(JsonDocument, W), JsonError> {
        match (self.failed, self.state) {
            (Some(invalid), _) => Err(invalid),
            (None, JsonScannerState::End) => {
                Ok((JsonDocument { members: self.members }, self.watch))
            }
            (None, JsonScannerState::Start) => Err(JsonError::Empty),
            (None, _) => Err(JsonError::Unfinished { at: self.at }),
        }
    }

    /// Reads a frame. The state decides which function reads the next bytes; it returns the next state and the number
    /// of bytes that it has read.
    fn scan_frame(&mut self, data: &[u8]) -> Result<(), JsonError> {
        let mut read = 0;
        while read < data.len() {
            let (rest, at) = (&data[read..], self.at + read as u64);
            let (state, passed) = match self.state {
                JsonScannerState::Key => self.scan_key(rest, at)?,
                JsonScannerState::Text => self.scan_string(rest, at)?,
                JsonScannerState::Number(number) => self.scan_number(number, rest, at)?,
                JsonScannerState::Literal => self.scan_literal(rest, at)?,
                state => self.scan_structure(state, rest, at)?,
            };
            self.state = state;
            read += passed;
        }
        self.at += data.len() as u64;
        Ok(())
    }

    /// Reads white space and the byte behind it, which decides the next state.
    fn scan_structure(
        &mut self,
        state: JsonScannerState,
        data: &[u8],
        at: u64,
    ) -> Result<(JsonScannerState, usize), JsonError> {
        let space = data.iter().take_while(|byte| is_space(**byte)).count();
        let Some(&byte) = data.get(space) else { return Ok((state, space)) };
        let at = at + space as u64;
        // These arms are the whole grammar around values: a pair of state and byte that has no arm is an error.
        let next = match (state, byte) {
            (JsonScannerState::FirstKey | JsonScannerState::NextKey, b'"') => {
                self.keys.begin_key(at);
                JsonScannerState::Key
            }
            (JsonScannerState::Colon, b':') | (JsonScannerState::AfterElement, b',') => {
                JsonScannerState::Value
            }
            (JsonScannerState::AfterMember, b',') => JsonScannerState::NextKey,
            // The brackets need no comparison with those that opened: the state after a value tells the container.
            (JsonScannerState::FirstKey | JsonScannerState::AfterMember, b'}')
            | (JsonScannerState::FirstValue | JsonScannerState::AfterElement, b']') => {
                self.keys.close_container();
                self.watch.on_close();
                self.end_value(at + 1)
            }
            (JsonScannerState::Start, b'{')
            | (JsonScannerState::Value | JsonScannerState::FirstValue, _) => {
                self.begin_value(byte, at)?
            }
            (JsonScannerState::Start, _) => return Err(JsonError::NotAnObject { at }),
            _ => return Err(JsonError::Syntax { at }),
        };
        Ok((next, space + 1))
    }

    /// Begins the value whose first byte is `byte`: sends the event, counts the value, and opens an array or object.
    fn begin_value(&mut self, byte: u8, at: u64) -> Result<JsonScannerState, JsonError> {
        let (kind, state) = match byte {
            b'"' => (JsonType::String, JsonScannerState::Text),
            b'[' => (JsonType::Array, JsonScannerState::FirstValue),
            b'{' => (JsonType::Object, JsonScannerState::FirstKey),
            b't' => (JsonType::Bool, self.start_literal(b"rue")),
            b'f' => (JsonType::Bool, self.start_literal(b"alse")),
            b'n' => (JsonType::Null, self.start_literal(b"ull")),
            _ => match JsonNumberState::start_number(byte) {
                Some(number) => (JsonType::Number, JsonScannerState::Number(number)),
                None => return Err(JsonError::Syntax { at }),
            },
        };
        // The depth counts the open containers around the value: 0 is the document, 1 the value of a top-level member.
        let depth = self.keys.depth();
        if depth > 0 && self.watch.on_value(depth, kind, at) {
            self.start.begin_string(&mut self.keys.name);
        }
        match depth {
            1 => self.member.start_member(at, kind),
            2 if kind.counts_as_entry() => {
                self.member.entries = self.member.entries.saturating_add(1);
            }
            _ => (),
        }
        if matches!(kind, JsonType::Array | JsonType::Object) {
            let limit = self.limits.depth;
            // The check comes before the container is opened, so that no input makes the stack grow past the limit.
            if depth >= usize::from(limit) {
                return Err(JsonError::TooDeep { at, limit });
            }
            self.keys.open_container(kind);
        }
        Ok(state)
    }

    /// Ends a value at the offset `end`, and returns the state after it. A value of the top-level object ends its
    /// member.
    fn end_value(&mut self, end: u64) -> JsonScannerState {
        if self.keys.depth() == 1 {
            self.member.value.end = end;
            self.members.push(mem::take(&mut self.member));
        }
        match self.keys.innermost_type() {
            Some(JsonType::Object) => JsonScannerState::AfterMember,
            Some(_) => JsonScannerState::AfterElement,
            None => JsonScannerState::End,
        }
    }

    /// Reads a part of a key. At the key's end it checks for a duplicate, and begins a member if the object is the
    /// top-level object.
    fn scan_key(&mut self, data: &[u8], at: u64) -> Result<(JsonScannerState, usize), JsonError> {
        let (read, ended) = self.text.read_string(data, at, Some(&mut self.keys.name))?;
        if !ended {
            return Ok((JsonScannerState::Key, read));
        }
        // A duplicate is an error before its value is read, so no visitor sees two values of one key.
        self.keys.end_key()?;
        let depth = self.keys.depth();
        self.watch.on_key(depth, self.keys.name.as_bytes().unwrap_or_default());
        if depth == 1 {
            let limit = self.limits.members;
            if self.members.len() >= usize::from(limit) {
                return Err(JsonError::TooManyMembers { at: self.keys.at, limit });
            }
            self.member.key = self.keys.name.to_key();
            self.member.start = self.keys.at;
            // An escape makes the written key longer than the unescaped key.
            let written = at + read as u64 - self.keys.at;
            self.member.is_plain = written == self.keys.name.len() + KEY_QUOTE_BYTES;
        }
        Ok((JsonScannerState::Colon, read))
    }

    /// Reads a part of a string value. While the visitor wants the beginning of the text, no more bytes are read than
    /// the buffer can hold.
    fn scan_string(
        &mut self,
        data: &[u8],
        at: u64,
    ) -> Result<(JsonScannerState, usize), JsonError> {
        let name = &mut self.keys.name;
        let (data, start) = match self.start.wanted_bytes(name) {
            0 => (data, None),
            wanted => (&data[..data.len().min(wanted)], Some(name)),
        };
        let (read, ended) = self.text.read_string(data, at, start)?;
        self.start.trim_blanks(&mut self.keys.name);
        if self.start.is_prefix_complete(&self.keys.name, ended) {
            let had_blanks = self.start.has_blanks();
            self.watch.on_string(self.start.take_prefix(&self.keys.name), had_blanks);
        }
        Ok((if ended { self.end_value(at + read as u64) } else { JsonScannerState::Text }, read))
    }

    /// Reads a part of a number. The byte that ends a number does not belong to it, so that byte stays unread.
    fn scan_number(
        &mut self,
        mut number: JsonNumberState,
        data: &[u8],
        at: u64,
    ) -> Result<(JsonScannerState, usize), JsonError> {
        for (read, &byte) in data.iter().enumerate() {
            let at = at + read as u64;
            // `None` is a byte that cannot continue the number. It may end a complete one, such as the comma in `1,`.
            number = match number.next_state(byte) {
                Some(number) => number,
                None if number.is_complete() => return Ok((self.end_value(at), read)),
                None => return Err(JsonError::Syntax { at }),
            };
        }
        Ok((JsonScannerState::Number(number), data.len()))
    }

    fn start_literal(&mut self, rest: &'static [u8]) -> JsonScannerState {
        self.literal = rest;
        JsonScannerState::Literal
    }

    /// Reads a part of `true`, `false` or `null`. A frame may end inside the word.
    fn scan_literal(
        &mut self,
        data: &[u8],
        at: u64,
    ) -> Result<(JsonScannerState, usize), JsonError> {
        let same = self.literal.iter().zip(data).take_while(|(expected, byte)| expected == byte);
        let same = same.count();
        if same == self.literal.len() {
            Ok((self.end_value(at + same as u64), same))
        } else if same == data.len() {
            // The frame ends inside the word; the next frame must go on with the rest.
            self.literal = &self.literal[same..];
            Ok((JsonScannerState::Literal, same))
        } else {
            Err(JsonError::Syntax { at: at + same as u64 })
        }
    }
}

/// The number of bytes of the quotes around a key.
const KEY_QUOTE_BYTES: u64 = 2;

/// Returns true for white space between the values of a document.
pub fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

impl JsonDocument {
    /// Returns the member with this key, if there is one.
    pub fn find_member(&self, key: &str) -> Option<&JsonMember> {
        self.members.iter().find(|member| member.key == *key)
    }
}

impl JsonMember {
    fn start_member(&mut self, at: u64, kind: JsonType) {
        self.value.start = at;
        self.kind = kind;
    }
}

impl JsonType {
    fn counts_as_entry(self) -> bool {
        matches!(self, Self::String | Self::Array | Self::Object)
    }
}

impl Default for JsonLimits {
    fn default() -> Self {
        Self { depth: 64, members: 256 }
    }
}
