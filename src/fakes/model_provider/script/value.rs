//! The values of options: parsing and formatting.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::IgnoredAny;

/// A position in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerPosition {
    /// Before the response head.
    Head,
    /// The position after this many content chunks.
    Chunk(u32),
    /// The position after the last event, before the end of the HTTP body.
    End,
}

/// A failure and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScriptedFault {
    pub kind: FaultKind,
    pub at: AnswerPosition,
}

/// The kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An error event. Before the head, and in a unary answer, the failure is status 500.
    Error,
    /// The events stop, and the HTTP body ends in order.
    Truncate,
    /// The connection closes in the middle of the HTTP body.
    Close,
    /// The connection is reset: RST instead of FIN.
    Reset,
    /// The connection sends bytes that are not HTTP, and closes.
    Garbage,
    /// The answer stops, and the connection stays open.
    Stall,
}

/// The events on which a stream reports its tokens. A unary answer reports its tokens unless the value is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageReporting {
    /// Usage is reported where the protocol reports it.
    Yes,
    /// Usage is not reported.
    None,
    /// Chat: usage is on the chunk with the finish reason, as some upstreams send it.
    Finish,
    /// Usage is on every event that can have it, with a wrong running count. The last count is true.
    Every,
}

impl AnswerPosition {
    pub(super) fn parse(text: &str) -> Result<Self, InvalidValueError> {
        match text {
            "head" => Ok(Self::Head),
            "end" => Ok(Self::End),
            sent => parse_number(sent).map(Self::Chunk),
        }
    }
}

impl ScriptedFault {
    pub(super) fn parse(text: &str) -> Result<Self, InvalidValueError> {
        let (trouble, at) = text.split_once('@').ok_or(InvalidValueError)?;
        Ok(Self { kind: FaultKind::parse(trouble)?, at: AnswerPosition::parse(at)? })
    }
}

impl FaultKind {
    const ALL: [Self; 6] =
        [Self::Error, Self::Truncate, Self::Close, Self::Reset, Self::Garbage, Self::Stall];

    fn parse(text: &str) -> Result<Self, InvalidValueError> {
        Self::ALL.into_iter().find(|trouble| trouble.as_str() == text).ok_or(InvalidValueError)
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Truncate => "truncate",
            Self::Close => "close",
            Self::Reset => "reset",
            Self::Garbage => "garbage",
            Self::Stall => "stall",
        }
    }
}

impl UsageReporting {
    const ALL: [Self; 4] = [Self::Yes, Self::None, Self::Finish, Self::Every];

    pub(super) fn parse(text: &str) -> Result<Self, InvalidValueError> {
        Self::ALL.into_iter().find(|report| report.as_str() == text).ok_or(InvalidValueError)
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::None => "none",
            Self::Finish => "finish",
            Self::Every => "every",
        }
    }
}

impl fmt::Display for AnswerPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Head => f.write_str("head"),
            Self::Chunk(sent) => sent.fmt(f),
            Self::End => f.write_str("end"),
        }
    }
}

impl fmt::Display for ScriptedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.kind.as_str(), self.at)
    }
}

/// The error for a value that the option does not accept.
#[derive(Clone, Copy, Debug)]
pub(super) struct InvalidValueError;

/// Parses an optional value: `word` means `None`, and every other text must parse.
pub(super) fn none_or_value<T>(
    word: &str,
    text: &str,
    read: impl Fn(&str) -> Result<T, InvalidValueError>,
) -> Result<Option<T>, InvalidValueError> {
    if text == word { Ok(None) } else { read(text).map(Some) }
}

pub(super) fn format_or_word(word: &str, value: Option<impl ToString>) -> String {
    value.map_or_else(|| word.to_owned(), |value| value.to_string())
}

pub(super) fn parse_number<T: FromStr>(text: &str) -> Result<T, InvalidValueError> {
    text.parse().map_err(|_| InvalidValueError)
}

pub(super) fn require_positive<T: Default + PartialEq>(number: T) -> Result<T, InvalidValueError> {
    if number == T::default() { Err(InvalidValueError) } else { Ok(number) }
}

/// Parses `64`, `64KiB` or `64MiB`. The maximum is 1 GiB, so that a typing error does not fill the memory.
pub(super) fn parse_bytes(text: &str) -> Result<u64, InvalidValueError> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    // A number without a unit is in bytes.
    let (digits, unit) = units
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
        .unwrap_or((text, 1));
    let bytes = parse_number::<u64>(digits)?.checked_mul(unit).ok_or(InvalidValueError)?;
    if bytes <= 1 << 30 { Ok(bytes) } else { Err(InvalidValueError) }
}

/// Parses `20ms` or `1m 30s`. The maximum is a day, so that a deadline computed from it can be represented.
pub(super) fn parse_duration(text: &str) -> Result<Duration, InvalidValueError> {
    let time = humantime::parse_duration(text).map_err(|_| InvalidValueError)?;
    if time <= Duration::from_hours(24) { Ok(time) } else { Err(InvalidValueError) }
}

pub(super) fn parse_yes_no(text: &str) -> Result<bool, InvalidValueError> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(InvalidValueError),
    }
}

pub(super) fn parse_status(text: &str) -> Result<u16, InvalidValueError> {
    match parse_number(text)? {
        status @ (200 | 400..=599) => Ok(status),
        _ => Err(InvalidValueError),
    }
}

/// Parses a text that is not empty, and decodes its percent-escapes.
pub(super) fn parse_text(text: &str) -> Result<String, InvalidValueError> {
    unescape(text).filter(|text| !text.is_empty()).ok_or(InvalidValueError)
}

/// Parses a JSON document, and decodes its percent-escapes.
pub(super) fn parse_json(text: &str) -> Result<String, InvalidValueError> {
    let json = unescape(text).ok_or(InvalidValueError)?;
    serde_json::from_str::<IgnoredAny>(&json).map(|_| json).map_err(|_| InvalidValueError)
}

fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        if *first == b'%' {
            // An incomplete escape makes the value invalid.
            let code = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(code, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// Escapes characters that would end the value, and characters that would not survive a header or a terminal.
pub(super) fn escape(text: &str) -> String {
    // Spaces at the end would be trimmed, so that they are escaped too.
    let kept = text.trim_end().len();
    let mut escaped = String::with_capacity(text.len());
    for (i, c) in text.char_indices() {
        if i < kept && !matches!(c, ',' | ';' | '%') && !c.is_ascii_control() {
            escaped.push(c);
        } else {
            let mut utf8 = [0; 4];
            for byte in c.encode_utf8(&mut utf8).bytes() {
                escaped.extend(['%', hex_digit(byte >> 4), hex_digit(byte & 15)]);
            }
        }
    }
    escaped
}

fn hex_digit(digit: u8) -> char {
    char::from_digit(digit.into(), 16).expect("half a byte is a digit")
}
