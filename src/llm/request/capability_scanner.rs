//! Looks for hosted capabilities inside a body's fields, while the body is scanned.
//!
//! What counts is where a key stands: `url` in a tool's arguments is the client's own data, `url` in an
//! `image_url` is fetched by the provider. So each open array and object has a [`JsonContext`], which says what
//! its keys mean. Schemas, arguments and results are [`JsonContext::Opaque`]: nothing in them is looked at, as
//! nobody acts on it. Everything else in messages is, at whatever depth, so that a part in a tool's result
//! in a message counts like one at the top.
//!
//! A text among content that begins like an address is taken for one, unless it stands under a key whose
//! value is text: what a provider fetches tomorrow is under a key that nobody knows today.
//!
//! Nothing of the body is kept but the first need of each capability, and what its media come to.

mod json_context;
mod open;

use self::json_context::{
    EmbeddedTextKind, JsonContext, context_in_content, is_address_in_data, is_data_url,
    is_fetchable_address, is_file_id,
};
use self::open::{OpenContainer, WebSearchTool};
use super::capability::ProviderCapability;
use super::media::{MediaKind, RequestMedia};
use crate::base::json::{JsonType, JsonVisitor};
use crate::base::sanitize::SanitizedText;
use crate::llm::protocol::GatewayRoute;

/// A capability that a body needs, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequiredCapability {
    pub(super) capability: ProviderCapability,
    /// The top-level field.
    pub(super) field: &'static str,
    /// The tool's type or the key that needs it, safe to print.
    pub(super) detail: Box<str>,
}

/// What was seen in a body.
#[derive(Clone, Debug, Default)]
pub(super) struct BodyFindings {
    /// The capabilities that its parts and tools need, each once.
    pub(super) needs: Vec<RequiredCapability>,
    pub(super) media: RequestMedia,
    /// Numbers in arrays: a prompt may be the numbers of its tokens.
    pub(super) numbers: u64,
    /// The provider is asked to read the conversation once more, to shorten it.
    pub(super) is_compacted: bool,
    /// Something is to stay in a cache for a time that no provider charges with the call.
    pub(super) has_long_cache: bool,
    /// Texts to be embedded that begin like addresses. Whether they are fetched is the model's.
    pub(super) embedded_addresses: u64,
    /// Where a tool begins that searches the web, and says whether it may reach outside: Codex's says that it may not.
    pub(super) modest_search: Option<u64>,
}

/// Watches a scanner.
#[derive(Debug)]
pub(super) struct CapabilityScanner {
    route: GatewayRoute,
    /// The top-level field that is being read.
    field: &'static str,
    /// What the next value is.
    next: JsonContext,
    /// The medium that the key before it is named for.
    next_medium: Option<MediaKind>,
    /// The value whose text is wanted, and where that begins in the body.
    text: JsonContext,
    text_at: u64,
    /// The medium that it has to be, by the keys that it stands under.
    text_medium: Option<MediaKind>,
    open: Vec<OpenContainer>,
    /// Arrays and objects open within one that is opaque, it included.
    opaque: u32,
    /// The type of the tool that searches the web, until it ends.
    search_type: Box<str>,
    found: BodyFindings,
}

impl BodyFindings {
    /// Has the texts that begin like addresses fetched.
    pub(super) fn count_embedded_as_fetched(&mut self) {
        self.media.count_fetched(self.embedded_addresses);
        if self.needs.iter().all(|need| need.capability != ProviderCapability::RemoteMedia) {
            let (capability, field) = (ProviderCapability::RemoteMedia, "input");
            self.needs.push(RequiredCapability { capability, field, detail: "url".into() });
        }
    }
}

impl CapabilityScanner {
    pub(super) fn new(route: GatewayRoute) -> Self {
        Self {
            route,
            field: "",
            next: JsonContext::Opaque,
            next_medium: None,
            text: JsonContext::Opaque,
            text_at: 0,
            text_medium: None,
            open: Vec::new(),
            opaque: 0,
            search_type: Box::default(),
            found: BodyFindings::default(),
        }
    }

    pub(super) fn into_findings(self) -> BodyFindings {
        self.found
    }

    /// The fields that are looked into.
    fn field_context(&mut self, key: &[u8]) -> JsonContext {
        let (field, place) = match key {
            b"messages" => ("messages", JsonContext::Content),
            b"system" => ("system", JsonContext::Text),
            b"instructions" => ("instructions", JsonContext::Text),
            b"prompt" => ("prompt", JsonContext::Text),
            b"prediction" => ("prediction", JsonContext::Text),
            b"image" => ("image", JsonContext::Media),
            b"documents" => ("documents", JsonContext::Content),
            b"input" if self.route == GatewayRoute::Responses => ("input", JsonContext::Items),
            b"input" => ("input", JsonContext::Embedded),
            b"cache_control" => ("cache_control", JsonContext::Cache),
            b"context_management" => ("context_management", JsonContext::Edits),
            b"compaction" => ("compaction", JsonContext::Edits),
            b"tools" => ("tools", JsonContext::Tools),
            // LiteLLM reads them as tools where the model is Gemini.
            b"functions" => ("functions", JsonContext::Tools),
            _ => ("", JsonContext::Opaque),
        };
        self.field = field;
        place
    }

    fn require_capability(&mut self, capability: ProviderCapability, detail: &[u8]) {
        if self.found.needs.iter().any(|need| need.capability == capability) {
            return;
        }
        let detail = SanitizedText(&String::from_utf8_lossy(detail)).to_text().into();
        self.found.needs.push(RequiredCapability { capability, field: self.field, detail });
    }

    /// A text that is an address, or the data itself.
    fn check_address(&mut self, text: &[u8], is_remote: bool) {
        if is_remote {
            self.require_capability(ProviderCapability::RemoteMedia, b"url");
        }
        let within = self.text_medium.filter(|_| !text.is_empty());
        match MediaKind::from_prefix(text).or(within) {
            Some(medium) => {
                self.found.media.note_medium(medium, self.text_at);
                self.note_medium(Some(medium));
            }
            None if is_remote => self.found.media.count_fetched(1),
            None => (),
        }
    }

    /// Remembers the dearest medium of the innermost.
    fn note_medium(&mut self, medium: Option<MediaKind>) {
        if let Some(open) = self.open.last_mut() {
            open.noted = open.noted.max(medium);
        }
    }

    /// The innermost is said to be a medium, wherever its bytes are.
    fn claim(&mut self, medium: Option<MediaKind>) {
        if let Some(open) = self.open.last_mut() {
            open.claimed = open.claimed.max(medium);
        }
    }

    /// What the value of a key is, in a tool.
    fn context_in_tool(&mut self, key: &[u8]) -> JsonContext {
        match key {
            b"type" => {
                if let Some(open) = self.open.last_mut() {
                    open.has_type = true;
                }
                return JsonContext::ToolType;
            }
            b"name" => {
                self.classify_open_container();
                return JsonContext::ToolName;
            }
            b"function" | b"custom" => {
                self.classify_open_container();
                return JsonContext::Function;
            }
            b"input_schema" | b"parameters" => {
                if let Some(open) = self.open.last_mut() {
                    open.has_schema = true;
                }
            }
            b"cache_control" => return JsonContext::Cache,
            b"tools" => return JsonContext::Tools,
            b"environment" => return JsonContext::Environment,
            b"container" => return JsonContext::Container,
            b"input_image_mask" | b"skills" => return JsonContext::Content,
            b"file_ids" | b"file_id" => return JsonContext::FileId,
            b"external_web_access" => self.note(|open| open.says_reach = true),
            _ => {
                let hosted = str::from_utf8(key).ok().and_then(ProviderCapability::for_tool_key);
                if let Some(capability) = hosted {
                    self.classify_open_container();
                    self.require_capability(capability, key);
                }
            }
        }
        JsonContext::Opaque
    }

    fn context_in_item(&mut self, key: &[u8]) -> JsonContext {
        match key {
            b"type" => JsonContext::ItemType,
            b"role" => {
                self.classify_open_container();
                JsonContext::Text
            }
            b"environment" => JsonContext::Environment,
            b"result" => JsonContext::Drawn,
            _ => context_in_content(key),
        }
    }

    /// The innermost says what it is.
    fn classify_open_container(&mut self) {
        self.note(|open| open.is_known = true);
    }

    /// Notes something of the innermost.
    fn note(&mut self, note: impl FnOnce(&mut OpenContainer)) {
        if let Some(open) = self.open.last_mut() {
            note(open);
        }
    }

    fn check_value(&mut self, place: JsonContext, text: &[u8]) {
        match place {
            JsonContext::ToolType => self.check_tool_type(text),
            JsonContext::ItemType => self.item_type(text),
            JsonContext::EnvironmentType if text != b"local" => {
                self.require_capability(ProviderCapability::Containers, text);
            }
            JsonContext::Environment if text.starts_with(b"container") => {
                self.require_capability(ProviderCapability::Containers, text);
            }
            JsonContext::Network | JsonContext::NetworkType if text != b"disabled" => {
                self.require_capability(ProviderCapability::WebFetch, b"network_policy");
            }
            JsonContext::ToolName => self.check_tool_name(text),
            JsonContext::Address => self.check_address(text, !is_data_url(text)),
            JsonContext::Data | JsonContext::Media => {
                let is_remote =
                    !is_data_url(text) && (text.contains(&b':') || is_address_in_data(text));
                self.check_address(text, is_remote);
            }
            JsonContext::Payload | JsonContext::Source => {
                self.check_address(text, is_address_in_data(text));
            }
            JsonContext::Drawn => {
                self.note(|open| open.has_drawing = !text.is_empty());
                self.check_address(text, is_address_in_data(text));
            }
            JsonContext::FileId => {
                self.require_capability(ProviderCapability::FileIds, b"file_id");
                self.found.media.add_unread(MediaKind::Document);
                if !is_file_id(text) {
                    self.require_capability(ProviderCapability::RemoteMedia, b"file_id");
                }
            }
            JsonContext::Origin => {
                self.note(|open| open.has_source = is_address_in_data(text));
                self.check_address(text, false);
            }
            // A detail of a medium is none itself.
            JsonContext::Content => {
                self.text_medium = None;
                self.check_address(text, is_fetchable_address(text));
            }
            JsonContext::OriginType => self.note(|open| open.is_text = text == b"text"),
            JsonContext::PartType => {
                self.claim(MediaKind::of_name(text));
                self.note(|open| {
                    open.is_text |= text.starts_with(b"web_search_result");
                    open.is_found |= text == b"search_result";
                });
            }
            JsonContext::Url => {
                self.note(|open| open.has_address = !is_data_url(text));
                self.check_address(text, false);
            }
            JsonContext::OriginData => {
                self.note(|open| open.has_address = is_address_in_data(text));
                self.check_address(text, false);
            }
            JsonContext::Embedded => self.check_embedded_text(text),
            // What is said to be an image is one where its bytes are.
            JsonContext::MediaType => {
                self.claim(MediaKind::of_type(text).filter(|medium| *medium > MediaKind::Image));
            }
            JsonContext::CacheTime => self.found.has_long_cache |= !matches!(text, b"5m" | b"1h"),
            JsonContext::Edits => self.found.is_compacted |= text.starts_with(b"compact"),
            _ => (),
        }
    }

    fn check_embedded_text(&mut self, text: &[u8]) {
        match EmbeddedTextKind::classify_text(text) {
            EmbeddedTextKind::Text => self.check_address(text, false),
            EmbeddedTextKind::Address => self.found.embedded_addresses += 1,
            EmbeddedTextKind::Bucket => self.check_address(text, true),
            EmbeddedTextKind::File => {
                self.require_capability(ProviderCapability::FileIds, b"files");
            }
        }
    }

    /// LiteLLM runs tools of these names itself, where it has been told to search for models that cannot.
    fn check_tool_name(&mut self, name: &[u8]) {
        if name.starts_with(b"litellm_") {
            self.require_capability(ProviderCapability::WebSearch, name);
        }
        let Some(open) = self.open.last_mut() else { return };
        open.search = match name {
            b"web_search" if open.place == JsonContext::Tool => WebSearchTool::Typed,
            b"WebSearch" if open.place == JsonContext::Tool => WebSearchTool::Bare,
            _ => open.search,
        };
    }

    fn item_type(&mut self, text: &[u8]) {
        self.classify_open_container();
        match text {
            b"item_reference" => self.require_capability(ProviderCapability::StoredState, text),
            b"code_interpreter_call" => self.note(|open| open.runs_code = true),
            b"image_generation_call" => self.note(|open| open.is_drawing = true),
            _ => (),
        }
    }

    fn check_tool_type(&mut self, text: &[u8]) {
        // Cut text has no unknown beginning, and none of these has a character of two bytes.
        match str::from_utf8(text).map(ProviderCapability::for_tool_type) {
            Ok(None) => {
                // These are told from Gemini's tools by the name that they have.
                let needs_name = matches!(text, b"function" | b"custom");
                if let Some(open) = self.open.last_mut() {
                    open.is_typed = !needs_name;
                }
            }
            Ok(Some(capability)) => {
                self.note(|open| {
                    open.is_typed = true;
                    open.runs_code = capability == ProviderCapability::CodeInterpreter;
                    open.is_web_search = text.starts_with(b"web_search");
                });
                if text.starts_with(b"web_search") {
                    // Judged when the tool ends, by all that it says.
                    self.search_type =
                        SanitizedText(&String::from_utf8_lossy(text)).to_text().into();
                } else {
                    self.require_capability(capability, text);
                }
            }
            Err(_) => self.require_capability(ProviderCapability::UnknownTools, text),
        }
    }

    /// A tool has ended that searches the web. The first of the list of tools that says what it may reach is looked at
    /// when all has been read.
    fn web_search(&mut self, tool: OpenContainer) {
        let is_listed = self.field == "tools" && self.open.len() == 1;
        if tool.says_reach && is_listed && self.found.modest_search.is_none() {
            self.found.modest_search = Some(tool.at);
            return;
        }
        let kind = std::mem::take(&mut self.search_type);
        self.require_capability(ProviderCapability::WebSearch, kind.as_bytes());
    }

    /// What the next element of the innermost array is, or what the key before it said.
    fn take_context(&mut self) -> JsonContext {
        match self.open.last() {
            Some(open) if open.is_array => open.place.element_context(),
            _ => std::mem::replace(&mut self.next, JsonContext::Opaque),
        }
    }

    /// A value of a kind that its place does not have.
    fn check_type(&mut self, place: JsonContext, kind: JsonType) {
        let is_null = kind == JsonType::Null;
        match place {
            JsonContext::Tool => {
                self.require_capability(ProviderCapability::UnknownTools, b"tools");
            }
            JsonContext::ToolType if !is_null => {
                self.require_capability(ProviderCapability::UnknownTools, b"type");
            }
            JsonContext::FileId if !is_null => {
                self.require_capability(ProviderCapability::FileIds, b"file_id");
                self.found.media.add_unread(MediaKind::Document);
            }
            JsonContext::SkillId if !is_null => {
                self.require_capability(ProviderCapability::Containers, b"skill_id");
            }
            JsonContext::StoredId if !is_null => {
                self.require_capability(ProviderCapability::StoredState, b"id");
            }
            JsonContext::CacheTime if !is_null => self.found.has_long_cache = true,
            _ => (),
        }
    }
}

impl JsonVisitor for CapabilityScanner {
    fn on_key(&mut self, depth: usize, key: &[u8]) {
        if depth == 1 {
            self.next = self.field_context(key);
            return;
        }
        if self.opaque > 0 {
            return;
        }
        let Some(open) = self.open.last() else { return };
        self.next_medium = MediaKind::of_name(key);
        self.next = match open.place {
            JsonContext::Tool => self.context_in_tool(key),
            JsonContext::Item => self.context_in_item(key),
            JsonContext::Environment => in_environment(key),
            JsonContext::Network if key == b"type" => JsonContext::NetworkType,
            JsonContext::Function if key == b"name" => JsonContext::ToolName,
            JsonContext::Cache if key == b"ttl" => JsonContext::CacheTime,
            JsonContext::Network | JsonContext::Function | JsonContext::Cache => {
                JsonContext::Opaque
            }
            JsonContext::Edits => JsonContext::Edits,
            JsonContext::Address | JsonContext::Source | JsonContext::Origin if key == b"url" => {
                JsonContext::Address
            }
            JsonContext::Source if key == b"id" => JsonContext::StoredId,
            JsonContext::Origin if key == b"type" => JsonContext::OriginType,
            JsonContext::Origin if key == b"data" => JsonContext::OriginData,
            _ => context_in_content(key),
        };
    }

    fn on_value(&mut self, depth: usize, kind: JsonType, at: u64) -> bool {
        let is_open = matches!(kind, JsonType::Array | JsonType::Object);
        if self.opaque > 0 {
            self.opaque += u32::from(is_open);
            return false;
        }
        let place = if depth == 1 { self.next } else { self.take_context() };
        if place == JsonContext::Container && kind != JsonType::Null {
            self.note(|open| open.has_container = true);
        }
        let named = self.next_medium.take();
        let within = named.or_else(|| self.open.last().and_then(|open| open.within));
        if is_open {
            let place = place.container_context(kind);
            if place == JsonContext::Opaque {
                self.opaque = 1;
            } else {
                self.open.push(OpenContainer::new(place, kind == JsonType::Array, within, at));
            }
            let is_id =
                matches!(place, JsonContext::FileId | JsonContext::SkillId | JsonContext::StoredId);
            if is_id && kind == JsonType::Object {
                self.check_type(place, kind);
            }
            return false;
        }
        if kind == JsonType::Number && self.open.last().is_some_and(|open| open.is_array) {
            self.found.numbers += 1;
        }
        let is_read = kind == JsonType::String && place.needs_text_check();
        if is_read {
            self.text = place;
            self.text_at = at + QUOTE_BYTES;
            self.text_medium = within;
        } else {
            self.check_type(place, kind);
        }
        is_read
    }

    fn on_string(&mut self, start: &[u8], had_blanks: bool) {
        // Only who fetches an address passes over blanks: a word with blanks is another word.
        let is_word = matches!(
            self.text,
            JsonContext::ToolType
                | JsonContext::ItemType
                | JsonContext::EnvironmentType
                | JsonContext::NetworkType
                | JsonContext::OriginType
                | JsonContext::PartType
                | JsonContext::CacheTime
        );
        let start = if had_blanks && is_word { b"blank" } else { start };
        self.check_value(self.text, start);
    }

    fn on_close(&mut self) {
        if self.opaque > 0 {
            self.opaque -= 1;
            return;
        }
        let Some(open) = self.open.pop() else { return };
        if (open.has_address && !open.is_text) || (open.has_source && !open.is_found) {
            self.require_capability(ProviderCapability::RemoteMedia, b"url");
            if open.noted.is_none() {
                self.found.media.count_fetched(1);
            }
        }
        match (open.has_container, open.runs_code) {
            (true, true) => {
                self.require_capability(ProviderCapability::CodeInterpreter, b"container");
            }
            (true, false) => self.require_capability(ProviderCapability::Containers, b"container"),
            (false, _) => (),
        }
        if open.is_drawing && !open.has_drawing {
            self.require_capability(ProviderCapability::StoredState, b"image_generation_call");
        }
        if let Some(claimed) = open.claimed.filter(|claimed| open.noted < Some(*claimed)) {
            self.found.media.add_unread(claimed);
        }
        self.note_medium(open.noted.max(open.claimed));
        if open.is_web_search {
            self.web_search(open);
        }
        let is_search = match open.search {
            WebSearchTool::None => false,
            WebSearchTool::Typed => open.has_type,
            WebSearchTool::Bare => !open.has_schema,
        };
        if is_search {
            self.require_capability(ProviderCapability::WebSearch, b"web_search");
        }
        match open.place {
            JsonContext::Tool if !open.is_array && !open.is_known && !open.is_typed => {
                self.require_capability(ProviderCapability::UnknownTools, b"tools");
            }
            // OpenAI takes an item that is nothing else for a reference to one that it has stored.
            JsonContext::Item if !open.is_array && !open.is_known => {
                self.require_capability(ProviderCapability::StoredState, b"item_reference");
            }
            _ => (),
        }
    }
}

/// What the value of a key is, in the place where a tool runs.
fn in_environment(key: &[u8]) -> JsonContext {
    match key {
        b"type" => JsonContext::EnvironmentType,
        b"container_id" => JsonContext::Container,
        b"network_policy" => JsonContext::Network,
        b"file_ids" | b"file_id" => JsonContext::FileId,
        b"skills" => JsonContext::Content,
        _ => JsonContext::Opaque,
    }
}

/// Before a text.
const QUOTE_BYTES: u64 = 1;
