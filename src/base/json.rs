//! A strict JSON reader for request bodies that keeps nothing of them.
//!
//! A [`Scanner`] is fed frames as they arrive from the socket, split anywhere, and reads each byte
//! once. It builds no tree: what it keeps is where the members of the top-level object begin and
//! end, so that a 32 MiB prompt costs a few hundred bytes. Whoever holds the frames can then read or
//! replace single values ([`rope`](super::rope)).
//!
//! It is stricter than most parsers, because what we let through is read again by the upstream, and
//! every point on which two parsers disagree is a way past the policy:
//!
//! - RFC 8259 to the letter: no comments, no trailing commas, no BOM, no `NaN`, no raw control
//!   characters, nothing after the top-level value, which must be an object.
//! - A key may stand once in an object, at every depth, compared after unescaping: given `"user"`
//!   and `"us\u0065r"`, LiteLLM takes the last and other parsers take the first.
//! - UTF-8 throughout, and `\u` escapes of lone surrogates are refused: Python keeps them, Go
//!   replaces them, others fail.
//! - Numbers are checked for their form only, whatever their size: nothing is converted.
//!
//! **Invariant:** the outcome, offsets included, is the same however the body is split into frames.

mod cursor;
mod invalid;
mod keys;
mod number;
mod text;
mod vector;
mod watch;
mod whole;

use std::mem;
use std::ops::Range;

pub use self::cursor::{Cursor, split_string};
pub use self::invalid::Invalid;
use self::keys::Keys;
pub use self::keys::{Key, LIVE_KEYS};
use self::number::Number;
use self::text::Text;
pub use self::text::string_length;
use self::watch::Start;
pub use self::watch::Watch;
pub use self::whole::read_whole;

/// Reads one JSON document, frame by frame.
///
/// ```
/// # use cogni_gateway::base::json::{Limits, Scanner};
/// let mut scanner = Scanner::new(Limits::default());
/// scanner.feed(br#"{"model": "gpt"#)?;
/// scanner.feed(br#"-5"}"#)?;
/// let document = scanner.finish()?;
/// assert_eq!(document.get("model").unwrap().value, 10..17);
/// # Ok::<(), cogni_gateway::base::json::Invalid>(())
/// ```
pub struct Scanner<W = ()> {
    limits: Limits,
    state: State,
    /// Offset of the next byte, from the start of the document.
    at: u64,
    text: Text,
    /// What is still to come of `true`, `false` or `null`.
    literal: &'static [u8],
    /// The arrays and objects that are open, with the keys seen in them.
    keys: Keys,
    /// The top-level member that is being read.
    member: Member,
    members: Vec<Member>,
    /// Who is told what stands inside, and whether it wants to see the text that is being read.
    watch: W,
    start: Start,
    /// Set by the first error; nothing is read after it.
    failed: Option<Invalid>,
}

/// How deep and how wide a document may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Arrays and objects inside one another, the top-level object counted. Tool schemas reach 20;
    /// `serde_json` gives up at 128 and Python near 1,000, so 64 leaves room and stays below both.
    pub depth: u8,
    /// Members of the top-level object. The largest protocol has about 40.
    pub members: u16,
}

/// What is known of a document that was read to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The top-level object's members, in the order they were written.
    pub members: Vec<Member>,
}

/// One member of the top-level object, by its offsets in the document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    pub key: Key,
    /// Offset of the key's opening quote.
    pub start: u64,
    /// Whether the key is written without an escape.
    pub is_plain: bool,
    /// Where the value stands, quotes and brackets included, the white space around it not.
    pub value: Range<u64>,
    pub kind: Kind,
    /// How many strings, arrays and objects stand directly inside the value.
    pub entries: u32,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum State {
    /// Nothing but white space so far.
    Start,
    /// A value has to follow: after `:`, and after `,` in an array.
    Value,
    /// A value or `]`: after `[`.
    FirstValue,
    /// A key or `}`: after `{`.
    FirstKey,
    /// A key has to follow: after `,` in an object.
    NextKey,
    /// In a key.
    Key,
    /// `:`, after a key.
    Colon,
    /// In a string that is a value.
    Text,
    Number(Number),
    /// In `true`, `false` or `null`.
    Literal,
    /// `,` or `}`: after a member of an object.
    AfterMember,
    /// `,` or `]`: after an element of an array.
    AfterElement,
    /// Nothing but white space: the document is complete.
    End,
}

/// Reads a document that is in memory as strictly as a body that is sent on. Where a parser keeps one value of a key that
/// stands twice, and another parser the other, this says no.
///
/// # Errors
/// The first thing wrong with the document.
pub fn check_document(data: &[u8]) -> Result<(), Invalid> {
    let mut scanner = Scanner::new(Limits::default());
    scanner.feed(data)?;
    scanner.finish().map(drop)
}

impl Scanner {
    pub fn new(limits: Limits) -> Self {
        Self::watched(limits, ())
    }
}

impl<W: Watch> Scanner<W> {
    /// A scanner that tells `watch` what it reads.
    pub fn watched(limits: Limits, watch: W) -> Self {
        Self {
            limits,
            state: State::Start,
            at: 0,
            text: Text::default(),
            literal: &[],
            keys: Keys::default(),
            member: Member::default(),
            members: Vec::new(),
            watch,
            start: Start::default(),
            failed: None,
        }
    }

    /// Reads one more frame. After an error every call answers with that error.
    pub fn feed(&mut self, data: &[u8]) -> Result<(), Invalid> {
        if let Some(invalid) = &self.failed {
            return Err(invalid.clone());
        }
        let outcome = self.read(data);
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    /// Says what was read, once the last frame has been fed.
    pub fn finish(self) -> Result<Document, Invalid> {
        self.finish_watched().map(|(document, _)| document)
    }

    /// The same, and who was told.
    pub fn finish_watched(self) -> Result<(Document, W), Invalid> {
        match (self.failed, self.state) {
            (Some(invalid), _) => Err(invalid),
            (None, State::End) => Ok((Document { members: self.members }, self.watch)),
            (None, State::Start) => Err(Invalid::Empty),
            (None, _) => Err(Invalid::Unfinished { at: self.at }),
        }
    }

    fn read(&mut self, data: &[u8]) -> Result<(), Invalid> {
        let mut read = 0;
        while read < data.len() {
            let (rest, at) = (&data[read..], self.at + read as u64);
            let (state, passed) = match self.state {
                State::Key => self.key(rest, at)?,
                State::Text => self.text(rest, at)?,
                State::Number(number) => self.number(number, rest, at)?,
                State::Literal => self.literal(rest, at)?,
                state => self.structure(state, rest, at)?,
            };
            self.state = state;
            read += passed;
        }
        self.at += data.len() as u64;
        Ok(())
    }

    /// White space, and the one byte after it that decides what comes next.
    fn structure(&mut self, state: State, data: &[u8], at: u64) -> Result<(State, usize), Invalid> {
        let space = data.iter().take_while(|byte| is_space(**byte)).count();
        let Some(&byte) = data.get(space) else { return Ok((state, space)) };
        let at = at + space as u64;
        let next = match (state, byte) {
            (State::FirstKey | State::NextKey, b'"') => {
                self.keys.begin(at);
                State::Key
            }
            (State::Colon, b':') | (State::AfterElement, b',') => State::Value,
            (State::AfterMember, b',') => State::NextKey,
            (State::FirstKey | State::AfterMember, b'}')
            | (State::FirstValue | State::AfterElement, b']') => {
                self.keys.close();
                self.watch.close();
                self.end_value(at + 1)
            }
            (State::Start, b'{') | (State::Value | State::FirstValue, _) => {
                self.begin_value(byte, at)?
            }
            (State::Start, _) => return Err(Invalid::NotAnObject { at }),
            _ => return Err(Invalid::Syntax { at }),
        };
        Ok((next, space + 1))
    }

    fn begin_value(&mut self, byte: u8, at: u64) -> Result<State, Invalid> {
        let (kind, state) = match byte {
            b'"' => (Kind::String, State::Text),
            b'[' => (Kind::Array, State::FirstValue),
            b'{' => (Kind::Object, State::FirstKey),
            b't' => (Kind::Bool, self.begin_literal(b"rue")),
            b'f' => (Kind::Bool, self.begin_literal(b"alse")),
            b'n' => (Kind::Null, self.begin_literal(b"ull")),
            _ => match Number::begin(byte) {
                Some(number) => (Kind::Number, State::Number(number)),
                None => return Err(Invalid::Syntax { at }),
            },
        };
        let depth = self.keys.depth();
        if depth > 0 && self.watch.value(depth, kind, at) {
            self.start.begin(&mut self.keys.name);
        }
        match depth {
            1 => self.member.begin(at, kind),
            2 if kind.is_entry() => self.member.entries = self.member.entries.saturating_add(1),
            _ => (),
        }
        if matches!(kind, Kind::Array | Kind::Object) {
            let limit = self.limits.depth;
            if depth >= usize::from(limit) {
                return Err(Invalid::TooDeep { at, limit });
            }
            self.keys.open(kind);
        }
        Ok(state)
    }

    fn end_value(&mut self, end: u64) -> State {
        if self.keys.depth() == 1 {
            self.member.value.end = end;
            self.members.push(mem::take(&mut self.member));
        }
        match self.keys.innermost() {
            Some(Kind::Object) => State::AfterMember,
            Some(_) => State::AfterElement,
            None => State::End,
        }
    }

    fn key(&mut self, data: &[u8], at: u64) -> Result<(State, usize), Invalid> {
        let (read, ended) = self.text.read(data, at, Some(&mut self.keys.name))?;
        if !ended {
            return Ok((State::Key, read));
        }
        self.keys.end()?;
        let depth = self.keys.depth();
        self.watch.key(depth, self.keys.name.as_bytes().unwrap_or_default());
        if depth == 1 {
            let limit = self.limits.members;
            if self.members.len() >= usize::from(limit) {
                return Err(Invalid::TooManyMembers { at: self.keys.at, limit });
            }
            self.member.key = self.keys.name.key();
            self.member.start = self.keys.at;
            let written = at + read as u64 - self.keys.at;
            self.member.is_plain = written == self.keys.name.len() + QUOTES;
        }
        Ok((State::Colon, read))
    }

    fn text(&mut self, data: &[u8], at: u64) -> Result<(State, usize), Invalid> {
        let name = &mut self.keys.name;
        let (data, start) = match self.start.wanted(name) {
            0 => (data, None),
            wanted => (&data[..data.len().min(wanted)], Some(name)),
        };
        let (read, ended) = self.text.read(data, at, start)?;
        self.start.trim(&mut self.keys.name);
        if self.start.is_complete(&self.keys.name, ended) {
            let had_blanks = self.start.has_blanks();
            self.watch.text(self.start.take(&self.keys.name), had_blanks);
        }
        Ok((if ended { self.end_value(at + read as u64) } else { State::Text }, read))
    }

    /// A number ends where the next byte cannot belong to it, so that byte is left unread.
    fn number(
        &mut self,
        mut number: Number,
        data: &[u8],
        at: u64,
    ) -> Result<(State, usize), Invalid> {
        for (read, &byte) in data.iter().enumerate() {
            let at = at + read as u64;
            number = match number.next(byte) {
                Some(number) => number,
                None if number.is_complete() => return Ok((self.end_value(at), read)),
                None => return Err(Invalid::Syntax { at }),
            };
        }
        Ok((State::Number(number), data.len()))
    }

    fn begin_literal(&mut self, rest: &'static [u8]) -> State {
        self.literal = rest;
        State::Literal
    }

    fn literal(&mut self, data: &[u8], at: u64) -> Result<(State, usize), Invalid> {
        let same = self.literal.iter().zip(data).take_while(|(expected, byte)| expected == byte);
        let same = same.count();
        if same == self.literal.len() {
            Ok((self.end_value(at + same as u64), same))
        } else if same == data.len() {
            self.literal = &self.literal[same..];
            Ok((State::Literal, same))
        } else {
            Err(Invalid::Syntax { at: at + same as u64 })
        }
    }
}

/// Bytes of the quotes around a key.
const QUOTES: u64 = 2;

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

impl Document {
    /// The member with this key, where there is one.
    pub fn get(&self, key: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.key == *key)
    }
}

impl Member {
    fn begin(&mut self, at: u64, kind: Kind) {
        self.value.start = at;
        self.kind = kind;
    }
}

impl Kind {
    fn is_entry(self) -> bool {
        matches!(self, Self::String | Self::Array | Self::Object)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { depth: 64, members: 256 }
    }
}
