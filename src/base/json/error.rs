//! The errors of the scanner, with the offset of the invalid byte.

/// The first error in a document. Offsets count bytes from 0. Each message continues a sentence that begins with "the
/// body is not acceptable JSON:".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    #[error("it is empty; send an object")]
    Empty,
    #[error("it is not an object (byte {at})")]
    NotAnObject { at: u64 },
    #[error("unexpected byte at {at}")]
    Syntax { at: u64 },
    #[error("it ends at byte {at}, before its object does")]
    Unfinished { at: u64 },
    #[error("raw control character in a string at byte {at}; escape it")]
    ControlCharacter { at: u64 },
    #[error("text that is not UTF-8 at byte {at}")]
    NotUtf8 { at: u64 },
    #[error("half of a surrogate pair at byte {at}; escape both halves or send UTF-8")]
    LoneSurrogate { at: u64 },
    /// The message shows `…` in place of a key longer than [`JsonKey::MAX_BYTES`](super::JsonKey::MAX_BYTES).
    #[error("duplicate key `{}` at byte {at}", key.escape_debug())]
    DuplicateKey { at: u64, key: Box<str> },
    #[error("arrays and objects nested deeper than {limit} at byte {at}")]
    TooDeep { at: u64, limit: u8 },
    #[error("more than {limit} top-level members at byte {at}")]
    TooManyMembers { at: u64, limit: u16 },
    #[error("more than {limit} keys in objects that are open at byte {at}")]
    TooManyKeys { at: u64, limit: usize },
    #[error("more than {limit} values")]
    TooManyValues { limit: u32 },
}

impl JsonError {
    /// Returns the stable code of the error, which clients, metrics and the audit log show.
    pub fn code(&self) -> &'static str {
        match self {
            Self::DuplicateKey { .. } => "duplicate_key",
            Self::TooDeep { .. }
            | Self::TooManyMembers { .. }
            | Self::TooManyKeys { .. }
            | Self::TooManyValues { .. } => "json_too_complex",
            _ => "invalid_json",
        }
    }
}
