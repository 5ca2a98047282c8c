//! The context of a value in a body, defined by the keys around it, and the tests for addresses in
//! texts.

use crate::base::json::JsonType;
use crate::llm::protocol::GatewayRoute;

/// The meaning of a value, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonContext {
    /// The client's own data, or data without influence on a capability.
    Opaque,
    /// A JSON schema, or an object that may contain schemas. Only its references are judged.
    Schema,
    /// A reference in a schema, which a validator may fetch.
    Reference,
    /// The name of a schema. Relative references begin at it if it is an address.
    SchemaId,
    /// A schema, or a text that contains one. The references in such a text are not read.
    SchemaText,
    /// Settings in which every text that begins like an address counts as an address.
    Settings,
    /// Parts of messages. A text that begins like an address counts as an address.
    Content,
    /// Parts of messages in which a text is only text.
    Text,
    /// The input of an embedding: a text, or another medium.
    Embedded,
    /// The list that Responses takes as its input.
    Items,
    /// An item of the input list of Responses.
    Item,
    ItemType,
    Tools,
    Tool,
    ToolType,
    ToolName,
    /// The inner object of a tool of type `function` or `custom`.
    Function,
    /// A tool, if the value is an object.
    Definition,
    /// The environment in which a tool runs.
    Environment,
    EnvironmentType,
    /// A container at the provider, or its id.
    Container,
    /// The network policy of a container at the provider.
    Network,
    NetworkType,
    /// The id of a skill that the provider stores.
    SkillId,
    /// The id of another object that the provider stores, within an object like
    /// [`JsonContext::Source`].
    StoredId,
    /// An address, or an object whose `url` is an address.
    Address,
    /// An object whose `url` is an address. A text here is bytes or an address.
    Source,
    /// The source of a document or an image. Its type states whether its data is text. A text here
    /// is an address, which the provider does not fetch in a search result.
    Origin,
    /// The type of an origin, which states whether the data is text.
    OriginType,
    /// The data of an origin.
    OriginData,
    /// Bytes in base64. Some readers accept an address here as well.
    Data,
    /// Bytes in base64, an address or a text.
    Payload,
    /// Bytes in base64, an address, or an object like [`JsonContext::Source`].
    Media,
    FileId,
    /// The type of a part.
    PartType,
    /// A part's own address. The provider does not fetch the address of a search result.
    Url,
    MediaType,
    /// A picture that a provider generated. Without bytes the item refers to a picture that the
    /// provider stored.
    Drawn,
    /// The cache settings of a part.
    Cache,
    /// The lifetime of a cache entry.
    CacheTime,
    /// The edits that a provider applies to a long conversation.
    Edits,
}

impl JsonContext {
    /// Returns the context of an element in an array with this context.
    pub(super) fn element_context(self) -> Self {
        match self {
            Self::Items => Self::Item,
            Self::Tools | Self::Tool => Self::Tool,
            Self::Item => Self::Content,
            same => same,
        }
    }

    /// Returns true if the scanner enters no array or object in this context.
    pub(super) fn is_skipped(self) -> bool {
        matches!(self, Self::Opaque | Self::Schema | Self::Settings)
    }

    /// Returns the context of a text under a key in a skipped array or object of this context.
    pub(super) fn skipped_text_context(self, key: &[u8]) -> Self {
        match self {
            Self::Schema => context_in_schema(key),
            same => same,
        }
    }

    /// Returns true if the context is a word of a fixed list that decides about a capability.
    pub(super) fn is_keyword(self) -> bool {
        matches!(self, Self::ToolType | Self::EnvironmentType | Self::NetworkType | Self::CacheTime)
    }

    /// Returns true if a text in this context is judged by its prefix.
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
                | Self::Reference
                | Self::SchemaId
                | Self::SchemaText
                | Self::Settings
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

    /// Returns the context of an array or object that stands at this position.
    pub(super) fn container_context(self, kind: JsonType) -> Self {
        match (self, kind) {
            (Self::Tools | Self::Definition, JsonType::Object) => Self::Tool,
            (Self::Items, JsonType::Object) => Self::Item,
            (Self::Media, JsonType::Object) => Self::Source,
            // A container in the position of a text or a keyword may hold parts, so its content is
            // read.
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
            (Self::Function, JsonType::Array)
            | (Self::Reference | Self::SchemaId | Self::SchemaText, _) => Self::Schema,
            (Self::Definition, _) => Self::Tools,
            (same, _) => same,
        }
    }
}

/// Returns the name of a top-level field and the context of its value. Fields outside the list are opaque.
pub(super) fn context_of_field(route: GatewayRoute, key: &[u8]) -> (&'static str, JsonContext) {
    match key {
        b"messages" => ("messages", JsonContext::Content),
        b"system" => ("system", JsonContext::Text),
        b"instructions" => ("instructions", JsonContext::Text),
        b"prompt" => ("prompt", JsonContext::Text),
        b"prediction" => ("prediction", JsonContext::Text),
        b"image" => ("image", JsonContext::Media),
        b"documents" => ("documents", JsonContext::Content),
        b"input" if route == GatewayRoute::Responses => ("input", JsonContext::Items),
        b"input" => ("input", JsonContext::Embedded),
        b"cache_control" => ("cache_control", JsonContext::Cache),
        b"context_management" => ("context_management", JsonContext::Edits),
        b"compaction" => ("compaction", JsonContext::Edits),
        b"tools" => ("tools", JsonContext::Tools),
        // LiteLLM treats `functions` as tools if the model is Gemini.
        b"functions" => ("functions", JsonContext::Tools),
        b"response_format" => ("response_format", JsonContext::Schema),
        b"text" => ("text", JsonContext::Schema),
        b"output_config" => ("output_config", JsonContext::Schema),
        b"output_format" => ("output_format", JsonContext::Schema),
        b"format" => ("format", JsonContext::Schema),
        b"json_schema" => ("json_schema", JsonContext::Schema),
        b"guided_json" => ("guided_json", JsonContext::SchemaText),
        b"structured_outputs" => ("structured_outputs", JsonContext::Schema),
        b"extra_body" => ("extra_body", JsonContext::Schema),
        b"audio" => ("audio", JsonContext::Settings),
        _ => ("", JsonContext::Opaque),
    }
}

/// Returns the context of a key's value in a schema. `$schema` is a name, even if it looks like an address. The key
/// `json` holds a schema in `structured_outputs`; `id` is the `$id` of an old dialect.
pub(super) fn context_in_schema(key: &[u8]) -> JsonContext {
    match key {
        b"$ref" | b"$dynamicRef" | b"$recursiveRef" => JsonContext::Reference,
        b"$id" | b"id" => JsonContext::SchemaId,
        b"guided_json" | b"json" => JsonContext::SchemaText,
        _ => JsonContext::Schema,
    }
}

/// Returns the context of a key's value among parts of messages.
pub(super) fn context_in_content(key: &[u8]) -> JsonContext {
    let of_length = CONTENT_KEYS_BY_LENGTH.get(key.len()).copied().unwrap_or_default();
    if let Some((_, place)) = of_length.iter().find(|(name, _)| *name == key) {
        return *place;
    }
    // The `_url` and `_uri` suffixes cover keys that providers add in the future.
    match key.last_chunk() {
        Some(b"_url" | b"_uri") => JsonContext::Address,
        _ => JsonContext::Content,
    }
}

/// Returns true if an address contains the data itself. Schemes are case-insensitive (RFC 3986
/// §3.1).
pub(super) fn is_data_url(text: &[u8]) -> bool {
    text.first_chunk().is_some_and(|scheme: &[u8; 5]| scheme.eq_ignore_ascii_case(b"data:"))
}

/// Returns true if a text begins like an address that a provider or proxy could fetch. A `data:`
/// address contains its data and does not count.
pub(super) fn is_fetchable_address(text: &[u8]) -> bool {
    // URL parsers remove tabs and line ends at any position, so the check runs on the text without
    // them.
    if text.iter().any(|byte| matches!(byte, b'\t' | b'\r' | b'\n')) {
        let clean: Vec<_> =
            text.iter().copied().filter(|byte| !matches!(byte, b'\t' | b'\r' | b'\n')).collect();
        return is_fetchable_address(&clean);
    }
    // A protocol-relative address: two slashes in either direction, then a host.
    let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
    if let Some((start, [host, ..])) = text.split_at_checked(2)
        && start.iter().all(is_slash)
    {
        // No host begins with a blank; such a text is a comment.
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
    // An address has no blank after the colon: `file: main.rs` is a heading.
    let has_more = rest.get(1).is_some_and(|next| *next != b' ');
    (is_known && has_more) || rest[1..].starts_with(b"//")
}

/// Returns true if a text that may also be base64 is an address. Base64 of audio begins with
/// slashes, but a reachable host has a dot or a port, and base64 has neither character.
pub(super) fn is_address_in_data(text: &[u8]) -> bool {
    let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    is_fetchable_address(text) && !text.iter().all(is_base64)
}

/// The relative references of a body's schemas, and the names of schemas at which such references begin.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::llm::request) struct SchemaAddresses {
    has_relative_reference: bool,
    has_address: bool,
}

impl SchemaAddresses {
    /// Records a text of a schema or of settings. Returns the detail for a refusal if the text is an address. References
    /// in a schema that is a text are not read, so such a text counts as an address.
    pub(super) fn note_text(&mut self, place: JsonContext, text: &[u8]) -> Option<&'static [u8]> {
        match place {
            JsonContext::SchemaText if matches!(text, [b'{' | b'[', ..]) => {
                return Some(b"schema_as_text");
            }
            JsonContext::SchemaText => (),
            JsonContext::SchemaId => self.has_address |= is_fetchable_address(text),
            _ if is_fetchable_address(text) => return Some(b"url"),
            // A reference within the schema begins with `#`.
            JsonContext::Reference => {
                self.has_relative_reference |= !matches!(text, [] | [b'#', ..]);
            }
            _ => (),
        }
        None
    }

    /// Returns true if a validator would resolve a relative reference against an address.
    pub(in crate::llm::request) fn has_resolved_reference(self) -> bool {
        self.has_relative_reference && self.has_address
    }
}

/// The kind of a text to embed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmbeddedTextKind {
    Text,
    /// A text that begins like an address. LiteLLM passes it on as text, and some providers fetch
    /// it.
    Address,
    /// An address in a storage bucket, which LiteLLM itself resolves.
    Bucket,
    /// A text that LiteLLM takes for a file of the provider's account.
    File,
}

impl EmbeddedTextKind {
    /// Classifies a text by its first bytes.
    pub(super) fn classify_text(text: &[u8]) -> Self {
        let is = |start: &[u8]| {
            text.get(..start.len()).is_some_and(|text| text.eq_ignore_ascii_case(start))
        };
        // File names come first: Google's ids of files are addresses themselves.
        if is(GEMINI_FILES_URL) || text.strip_prefix(b"files/").is_some_and(is_file_name) {
            return Self::File;
        }
        if !is_fetchable_address(text) {
            return Self::Text;
        }
        if BUCKET_SCHEMES.iter().any(|scheme| is(scheme)) { Self::Bucket } else { Self::Address }
    }
}

/// Returns true if a text can be the name of a file at Google. A longer path cannot.
fn is_file_name(name: &[u8]) -> bool {
    (1..=40).contains(&name.len())
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Returns true if an id names a file that the provider has. LiteLLM takes addresses for file ids,
/// and Google's ids are addresses.
pub(super) fn is_file_id(text: &[u8]) -> bool {
    let start = text.get(..GEMINI_FILES_URL.len());
    !is_fetchable_address(text)
        || start.is_some_and(|start| start.eq_ignore_ascii_case(GEMINI_FILES_URL))
}

const GEMINI_FILES_URL: &[u8] = b"https://generativelanguage.googleapis.com/v1beta/files/";

const BUCKET_SCHEMES: [&[u8]; 2] = [b"gs:", b"s3:"];

/// Schemes that are fetched even without slashes behind the colon.
const FETCHED_SCHEMES: [&[u8]; 9] =
    [b"http", b"https", b"ftp", b"ftps", b"file", b"gs", b"s3", b"blob", b"gcs"];

/// The keys with a meaning among parts of messages, indexed by length. The index keeps the cost at
/// one look-up per key. Keys of addresses are also recognized by their suffix.
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
        (b"schema", JsonContext::Schema),
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
        (b"parameters", JsonContext::Schema),
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
        (b"input_schema", JsonContext::Schema),
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
