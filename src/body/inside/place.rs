//! What a value in a body is, by the keys that it stands under, and which texts are addresses.

use crate::base::json::Kind;

/// What a value is, by where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The client's own data, or of no interest.
    Opaque,
    /// Parts of messages; a text that begins like an address is one.
    Content,
    /// The same, but a text is a text.
    Text,
    /// What is embedded: a text, or what stands in its place.
    Embedded,
    /// The list that Responses takes as its input, and an item of it.
    Items,
    Item,
    ItemType,
    Tools,
    Tool,
    ToolType,
    ToolName,
    /// What a tool of type `function` or `custom` wraps.
    Function,
    /// A tool, if it is an object.
    Definition,
    /// Where a tool runs.
    Environment,
    EnvironmentType,
    /// A machine at the provider, or its id.
    Container,
    /// What a machine at the provider may reach.
    Network,
    NetworkType,
    /// The ids of what a provider keeps: a skill, and anything within an object like [`Place::Source`].
    SkillId,
    StoredId,
    /// An address, or an object whose `url` is one.
    Address,
    /// An object whose `url` is an address; as text, bytes or an address.
    Source,
    /// The source of a document or an image: its type says whether its data is text. As text it is an address, which is
    /// not fetched in a result of a search.
    Origin,
    OriginType,
    OriginData,
    /// Bytes in base64; some readers take an address as well.
    Data,
    /// The same, or a text.
    Payload,
    /// Bytes in base64, an address, or an object like [`Place::Source`].
    Media,
    FileId,
    /// The type of a part and its own address: that of a result of a search is not fetched.
    PartType,
    Url,
    MediaType,
    /// A picture that a provider has drawn; without its bytes the item names one that is kept.
    Drawn,
    /// How long something is cached.
    Cache,
    CacheTime,
    /// What is to be done to a conversation that has become long.
    Edits,
}

impl Place {
    /// What an element is in an array at this place.
    pub(super) fn element(self) -> Self {
        match self {
            Self::Items => Self::Item,
            Self::Tools | Self::Tool => Self::Tool,
            Self::Item => Self::Content,
            same => same,
        }
    }

    /// Whether a text here is judged by how it begins.
    pub(super) fn is_read(self) -> bool {
        matches!(
            self,
            Self::ToolType
                | Self::ItemType
                | Self::Environment
                | Self::EnvironmentType
                | Self::Network
                | Self::NetworkType
                | Self::ToolName
                | Self::Address
                | Self::Source
                | Self::Origin
                | Self::FileId
                | Self::Drawn
                | Self::Data
                | Self::Payload
                | Self::Media
                | Self::Content
                | Self::Embedded
                | Self::PartType
                | Self::Url
                | Self::OriginType
                | Self::OriginData
                | Self::MediaType
                | Self::CacheTime
                | Self::Edits
        )
    }

    /// What an array or object is that stands here.
    pub(super) fn within(self, kind: Kind) -> Self {
        match (self, kind) {
            (Self::Tools | Self::Definition, Kind::Object) => Self::Tool,
            (Self::Items, Kind::Object) => Self::Item,
            (Self::Media, Kind::Object) => Self::Source,
            (Self::Text | Self::Embedded, Kind::Object)
            | (
                Self::ToolType
                | Self::ToolName
                | Self::ItemType
                | Self::EnvironmentType
                | Self::NetworkType
                | Self::Container
                | Self::Drawn
                | Self::Data
                | Self::Payload
                | Self::PartType
                | Self::Url
                | Self::OriginType
                | Self::OriginData
                | Self::MediaType
                | Self::CacheTime,
                _,
            ) => Self::Content,
            (Self::Function, Kind::Array) => Self::Opaque,
            (Self::Definition, _) => Self::Tools,
            (same, _) => same,
        }
    }
}

/// What the value of a key is, among parts of messages.
pub(super) fn in_content(key: &[u8]) -> Place {
    let of_length = CONTENT.get(key.len()).copied().unwrap_or_default();
    if let Some((_, place)) = of_length.iter().find(|(name, _)| *name == key) {
        return *place;
    }
    match key.last_chunk() {
        Some(b"_url" | b"_uri") => Place::Address,
        _ => Place::Content,
    }
}

/// Whether an address is the data itself. Schemes are the same in any case (RFC 3986 §3.1).
pub(super) fn is_inline(text: &[u8]) -> bool {
    text.first_chunk().is_some_and(|scheme: &[u8; 5]| scheme.eq_ignore_ascii_case(b"data:"))
}

/// Whether a text begins like an address that somebody could fetch. `data:` is none.
pub(super) fn is_address(text: &[u8]) -> bool {
    // Readers of addresses leave these out wherever they stand.
    if text.iter().any(|byte| matches!(byte, b'\t' | b'\r' | b'\n')) {
        let clean: Vec<_> =
            text.iter().copied().filter(|byte| !matches!(byte, b'\t' | b'\r' | b'\n')).collect();
        return is_address(&clean);
    }
    let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
    if let Some((start, [host, ..])) = text.split_at_checked(2)
        && start.iter().all(is_slash)
    {
        // No host begins with a blank: that is a comment.
        return *host != b' ';
    }
    let is_scheme = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    let length = text.iter().take_while(|byte| is_scheme(byte)).count();
    let (scheme, rest) = text.split_at(length);
    if is_inline(text)
        || !rest.starts_with(b":")
        || !scheme.first().is_some_and(u8::is_ascii_alphabetic)
    {
        return false;
    }
    let is_known = FETCHED.iter().any(|known| scheme.eq_ignore_ascii_case(known));
    // No address has a blank there: `file: main.rs` is a heading.
    let has_more = rest.get(1).is_some_and(|next| *next != b' ');
    (is_known && has_more) || rest[1..].starts_with(b"//")
}

/// The same for what may be base64 as well. That of sound begins with slashes; a host that can be reached has a dot or a port.
pub(super) fn is_address_in_data(text: &[u8]) -> bool {
    let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    is_address(text) && !text.iter().all(is_base64)
}

/// What a text is that is to be embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Embedded {
    Text,
    /// A text that begins like an address: LiteLLM hands it on as text, and some providers fetch it.
    Address,
    /// What LiteLLM itself takes for an address, in a bucket.
    Bucket,
    /// What LiteLLM takes for a file of the provider's account.
    File,
}

impl Embedded {
    /// Reads the beginning of a text, or all of it where it is short.
    pub(super) fn of(text: &[u8]) -> Self {
        let is = |start: &[u8]| {
            text.get(..start.len()).is_some_and(|text| text.eq_ignore_ascii_case(start))
        };
        if is(GEMINI_FILES) || text.strip_prefix(b"files/").is_some_and(is_file_name) {
            return Self::File;
        }
        if !is_address(text) {
            return Self::Text;
        }
        if BUCKETS.iter().any(|scheme| is(scheme)) { Self::Bucket } else { Self::Address }
    }
}

/// Whether a text can be the name of a file of Google's. A path has more to it.
fn is_file_name(name: &[u8]) -> bool {
    (1..=40).contains(&name.len())
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Whether an id is one of a file that a provider has. LiteLLM takes addresses for such ids, and Google's ids are addresses.
pub(super) fn is_file_id(text: &[u8]) -> bool {
    let start = text.get(..GEMINI_FILES.len());
    !is_address(text) || start.is_some_and(|start| start.eq_ignore_ascii_case(GEMINI_FILES))
}

const GEMINI_FILES: &[u8] = b"https://generativelanguage.googleapis.com/v1beta/files/";

const BUCKETS: [&[u8]; 2] = [b"gs:", b"s3:"];

/// Schemes that are fetched even without slashes behind them.
const FETCHED: [&[u8]; 9] =
    [b"http", b"https", b"ftp", b"ftps", b"file", b"gs", b"s3", b"blob", b"gcs"];

/// The keys that mean something among parts of messages, by their length: a look-up for each key is
/// what this costs. Addresses are told by their ending besides.
const CONTENT: [&[(&[u8], Place)]; 18] = [
    &[],
    &[],
    &[(b"id", Place::Text)],
    &[(b"url", Place::Url)],
    &[
        (b"text", Place::Text),
        (b"data", Place::Payload),
        (b"type", Place::PartType),
        (b"role", Place::Text),
        (b"name", Place::Text),
        (b"file", Place::Source),
        (b"code", Place::Text),
        (b"logs", Place::Text),
    ],
    &[
        (b"input", Place::Opaque),
        (b"tools", Place::Tools),
        (b"image", Place::Media),
        (b"video", Place::Media),
        (b"audio", Place::Media),
        (b"media", Place::Media),
        (b"title", Place::Text),
        (b"phase", Place::Text),
        (b"query", Place::Text),
        (b"error", Place::Text),
    ],
    &[
        (b"source", Place::Origin),
        (b"action", Place::Opaque),
        (b"schema", Place::Opaque),
        (b"output", Place::Text),
        (b"status", Place::Text),
        (b"stdout", Place::Text),
        (b"stderr", Place::Text),
        (b"result", Place::Text),
        (b"format", Place::MediaType),
    ],
    &[
        (b"content", Place::Text),
        (b"call_id", Place::Text),
        (b"summary", Place::Text),
        (b"refusal", Place::Text),
        (b"context", Place::Text),
        (b"message", Place::Text),
        (b"actions", Place::Opaque),
        (b"file_id", Place::FileId),
        (b"queries", Place::Opaque),
        (b"results", Place::Opaque),
    ],
    &[
        (b"thinking", Place::Text),
        (b"skill_id", Place::SkillId),
        (b"document", Place::Source),
        (b"file_ids", Place::FileId),
        (b"filename", Place::Text),
        (b"mimeType", Place::MediaType),
    ],
    &[
        (b"arguments", Place::Opaque),
        (b"citations", Place::Opaque),
        (b"file_data", Place::Data),
        (b"operation", Place::Opaque),
        (b"reasoning", Place::Text),
        (b"signature", Place::Text),
        (b"mime_type", Place::MediaType),
    ],
    &[
        (b"definition", Place::Definition),
        (b"parameters", Place::Opaque),
        (b"tool_calls", Place::Opaque),
        (b"media_type", Place::MediaType),
        (b"cited_text", Place::Text),
        (b"transcript", Place::Text),
    ],
    &[
        (b"input_audio", Place::Media),
        (b"input_video", Place::Media),
        (b"annotations", Place::Opaque),
        (b"tool_use_id", Place::Text),
        (b"description", Place::Text),
    ],
    &[
        (b"input_schema", Place::Opaque),
        (b"container_id", Place::Container),
        (b"tool_call_id", Place::Text),
        (b"instructions", Place::Text),
    ],
    &[(b"cache_control", Place::Cache), (b"function_call", Place::Opaque)],
    &[(b"network_policy", Place::Network)],
    &[],
    &[],
    &[
        (b"reasoning_content", Place::Text),
        (b"encrypted_content", Place::Text),
        (b"thought_signature", Place::Text),
    ],
];
