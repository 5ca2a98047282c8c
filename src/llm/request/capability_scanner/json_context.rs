//! What a value in a body is, by the keys that it stands under, and which texts are addresses.

use crate::base::json::JsonType;

/// What a value is, by where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonContext {
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
    /// The ids of what a provider keeps: a skill, and anything within an object like [`JsonContext::Source`].
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
    /// Bytes in base64, an address, or an object like [`JsonContext::Source`].
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

impl JsonContext {
    /// What an element is in an array at this place.
    pub(super) fn element_context(self) -> Self {
        match self {
            Self::Items => Self::Item,
            Self::Tools | Self::Tool => Self::Tool,
            Self::Item => Self::Content,
            same => same,
        }
    }

    /// Whether a text here is judged by how it begins.
    pub(super) fn needs_text_check(self) -> bool {
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
    pub(super) fn container_context(self, kind: JsonType) -> Self {
        match (self, kind) {
            (Self::Tools | Self::Definition, JsonType::Object) => Self::Tool,
            (Self::Items, JsonType::Object) => Self::Item,
            (Self::Media, JsonType::Object) => Self::Source,
            (Self::Text | Self::Embedded, JsonType::Object)
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
            (Self::Function, JsonType::Array) => Self::Opaque,
            (Self::Definition, _) => Self::Tools,
            (same, _) => same,
        }
    }
}

/// What the value of a key is, among parts of messages.
pub(super) fn context_in_content(key: &[u8]) -> JsonContext {
    let of_length = CONTENT_KEYS_BY_LENGTH.get(key.len()).copied().unwrap_or_default();
    if let Some((_, place)) = of_length.iter().find(|(name, _)| *name == key) {
        return *place;
    }
    match key.last_chunk() {
        Some(b"_url" | b"_uri") => JsonContext::Address,
        _ => JsonContext::Content,
    }
}

/// Whether an address is the data itself. Schemes are the same in any case (RFC 3986 §3.1).
pub(super) fn is_data_url(text: &[u8]) -> bool {
    text.first_chunk().is_some_and(|scheme: &[u8; 5]| scheme.eq_ignore_ascii_case(b"data:"))
}

/// Whether a text begins like an address that somebody could fetch. `data:` is none.
pub(super) fn is_fetchable_address(text: &[u8]) -> bool {
    // Readers of addresses leave these out wherever they stand.
    if text.iter().any(|byte| matches!(byte, b'\t' | b'\r' | b'\n')) {
        let clean: Vec<_> =
            text.iter().copied().filter(|byte| !matches!(byte, b'\t' | b'\r' | b'\n')).collect();
        return is_fetchable_address(&clean);
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
    if is_data_url(text)
        || !rest.starts_with(b":")
        || !scheme.first().is_some_and(u8::is_ascii_alphabetic)
    {
        return false;
    }
    let is_known = FETCHED_SCHEMES.iter().any(|known| scheme.eq_ignore_ascii_case(known));
    // No address has a blank there: `file: main.rs` is a heading.
    let has_more = rest.get(1).is_some_and(|next| *next != b' ');
    (is_known && has_more) || rest[1..].starts_with(b"//")
}

/// The same for what may be base64 as well. That of sound begins with slashes; a host that can be reached has a dot or a port.
pub(super) fn is_address_in_data(text: &[u8]) -> bool {
    let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    is_fetchable_address(text) && !text.iter().all(is_base64)
}

/// What a text is that is to be embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmbeddedTextKind {
    Text,
    /// A text that begins like an address: LiteLLM hands it on as text, and some providers fetch it.
    Address,
    /// What LiteLLM itself takes for an address, in a bucket.
    Bucket,
    /// What LiteLLM takes for a file of the provider's account.
    File,
}

impl EmbeddedTextKind {
    /// Reads the beginning of a text, or all of it where it is short.
    pub(super) fn classify_text(text: &[u8]) -> Self {
        let is = |start: &[u8]| {
            text.get(..start.len()).is_some_and(|text| text.eq_ignore_ascii_case(start))
        };
        if is(GEMINI_FILES_URL) || text.strip_prefix(b"files/").is_some_and(is_file_name) {
            return Self::File;
        }
        if !is_fetchable_address(text) {
            return Self::Text;
        }
        if BUCKET_SCHEMES.iter().any(|scheme| is(scheme)) { Self::Bucket } else { Self::Address }
    }
}

/// Whether a text can be the name of a file of Google's. A path has more to it.
fn is_file_name(name: &[u8]) -> bool {
    (1..=40).contains(&name.len())
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Whether an id is one of a file that a provider has. LiteLLM takes addresses for such ids, and Google's ids are addresses.
pub(super) fn is_file_id(text: &[u8]) -> bool {
    let start = text.get(..GEMINI_FILES_URL.len());
    !is_fetchable_address(text)
        || start.is_some_and(|start| start.eq_ignore_ascii_case(GEMINI_FILES_URL))
}

const GEMINI_FILES_URL: &[u8] = b"https://generativelanguage.googleapis.com/v1beta/files/";

const BUCKET_SCHEMES: [&[u8]; 2] = [b"gs:", b"s3:"];

/// Schemes that are fetched even without slashes behind them.
const FETCHED_SCHEMES: [&[u8]; 9] =
    [b"http", b"https", b"ftp", b"ftps", b"file", b"gs", b"s3", b"blob", b"gcs"];

/// The keys that mean something among parts of messages, by their length: a look-up for each key is
/// what this costs. Addresses are told by their ending besides.
const CONTENT_KEYS_BY_LENGTH: [&[(&[u8], JsonContext)]; 18] = [
    &[],
    &[],
    &[(b"id", JsonContext::Text)],
    &[(b"url", JsonContext::Url)],
    &[
        (b"text", JsonContext::Text),
        (b"data", JsonContext::Payload),
        (b"type", JsonContext::PartType),
        (b"role", JsonContext::Text),
        (b"name", JsonContext::Text),
        (b"file", JsonContext::Source),
        (b"code", JsonContext::Text),
        (b"logs", JsonContext::Text),
    ],
    &[
        (b"input", JsonContext::Opaque),
        (b"tools", JsonContext::Tools),
        (b"image", JsonContext::Media),
        (b"video", JsonContext::Media),
        (b"audio", JsonContext::Media),
        (b"media", JsonContext::Media),
        (b"title", JsonContext::Text),
        (b"phase", JsonContext::Text),
        (b"query", JsonContext::Text),
        (b"error", JsonContext::Text),
    ],
    &[
        (b"source", JsonContext::Origin),
        (b"action", JsonContext::Opaque),
        (b"schema", JsonContext::Opaque),
        (b"output", JsonContext::Text),
        (b"status", JsonContext::Text),
        (b"stdout", JsonContext::Text),
        (b"stderr", JsonContext::Text),
        (b"result", JsonContext::Text),
        (b"format", JsonContext::MediaType),
    ],
    &[
        (b"content", JsonContext::Text),
        (b"call_id", JsonContext::Text),
        (b"summary", JsonContext::Text),
        (b"refusal", JsonContext::Text),
        (b"context", JsonContext::Text),
        (b"message", JsonContext::Text),
        (b"actions", JsonContext::Opaque),
        (b"file_id", JsonContext::FileId),
        (b"queries", JsonContext::Opaque),
        (b"results", JsonContext::Opaque),
    ],
    &[
        (b"thinking", JsonContext::Text),
        (b"skill_id", JsonContext::SkillId),
        (b"document", JsonContext::Source),
        (b"file_ids", JsonContext::FileId),
        (b"filename", JsonContext::Text),
        (b"mimeType", JsonContext::MediaType),
    ],
    &[
        (b"arguments", JsonContext::Opaque),
        (b"citations", JsonContext::Opaque),
        (b"file_data", JsonContext::Data),
        (b"operation", JsonContext::Opaque),
        (b"reasoning", JsonContext::Text),
        (b"signature", JsonContext::Text),
        (b"mime_type", JsonContext::MediaType),
    ],
    &[
        (b"definition", JsonContext::Definition),
        (b"parameters", JsonContext::Opaque),
        (b"tool_calls", JsonContext::Opaque),
        (b"media_type", JsonContext::MediaType),
        (b"cited_text", JsonContext::Text),
        (b"transcript", JsonContext::Text),
    ],
    &[
        (b"input_audio", JsonContext::Media),
        (b"input_video", JsonContext::Media),
        (b"annotations", JsonContext::Opaque),
        (b"tool_use_id", JsonContext::Text),
        (b"description", JsonContext::Text),
    ],
    &[
        (b"input_schema", JsonContext::Opaque),
        (b"container_id", JsonContext::Container),
        (b"tool_call_id", JsonContext::Text),
        (b"instructions", JsonContext::Text),
    ],
    &[(b"cache_control", JsonContext::Cache), (b"function_call", JsonContext::Opaque)],
    &[(b"network_policy", JsonContext::Network)],
    &[],
    &[],
    &[
        (b"reasoning_content", JsonContext::Text),
        (b"encrypted_content", JsonContext::Text),
        (b"thought_signature", JsonContext::Text),
    ],
];
