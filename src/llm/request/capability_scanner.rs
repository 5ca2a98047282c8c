//! Finds the hosted capabilities that a body's fields need, while the body is scanned.
//!
//! The meaning of a key depends on its position: `url` in a tool's arguments is the client's own data, `url` in an
//! `image_url` is fetched by the provider. So each open array and object has a [`JsonContext`], which defines what
//! its keys mean. Schemas, arguments and results are [`JsonContext::Opaque`]: the scanner skips their content,
//! because no provider acts on it. The scanner reads everything else in messages, at every depth. A part in a tool's
//! result in a message counts like a part at the top.
//!
//! A text among content that begins like an address counts as an address, unless its key holds plain text. A
//! provider's future fields may stand under keys that are unknown today.
//!
//! The scanner keeps only the first need of each capability and the sum of the media.

mod findings;
mod json_context;
mod open;

use self::json_context::{
    EmbeddedTextKind, JsonContext, context_in_content, context_in_schema, context_of_field,
    is_address_in_data, is_data_url, is_fetchable_address, is_file_id,
};
use self::open::{OpenContainer, WebSearchTool};
use super::capability::ProviderCapability;
use super::media::MediaKind;
use crate::base::json::{JsonType, JsonVisitor};
use crate::base::sanitize::SanitizedText;
use crate::llm::protocol::GatewayRoute;

pub(super) use self::findings::{BodyFindings, RequiredCapability};

/// A visitor that follows the JSON scanner through the body.
#[derive(Debug)]
pub(super) struct CapabilityScanner {
    route: GatewayRoute,
    /// The top-level field that the scanner is reading.
    field: &'static str,
    /// The context of the next value.
    next: JsonContext,
    /// The medium in the name of the key before the next value.
    next_medium: Option<MediaKind>,
    /// The context of the text that the scanner reports next.
    text: JsonContext,
    /// The offset of that text in the body.
    text_at: u64,
    /// The medium that the text must be, according to the keys around it.
    text_medium: Option<MediaKind>,
    open: Vec<OpenContainer>,
    /// The number of open arrays and objects from the outermost opaque one inwards.
    opaque: u32,
    /// The context of the outermost opaque one, and of the next text in it.
    skipped: (JsonContext, JsonContext),
    /// The type of the current web search tool, until the tool ends.
    search_type: Box<str>,
    found: BodyFindings,
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
            skipped: (JsonContext::Opaque, JsonContext::Opaque),
            search_type: Box::default(),
            found: BodyFindings::default(),
        }
    }

    pub(super) fn into_findings(self) -> BodyFindings {
        self.found
    }

    /// Notes a top-level field, and returns the context of its value.
    fn field_context(&mut self, key: &[u8]) -> JsonContext {
        let (field, place) = context_of_field(self.route, key);
        self.field = field;
        if matches!(place, JsonContext::Schema | JsonContext::SchemaText) {
            self.found.added.note_preamble();
        }
        place
    }

    fn require_capability(&mut self, capability: ProviderCapability, detail: &[u8]) {
        if self.found.needs.iter().any(|need| need.capability == capability) {
            return;
        }
        let detail = SanitizedText(&String::from_utf8_lossy(detail)).to_text().into();
        self.found.needs.push(RequiredCapability { capability, field: self.field, detail });
    }

    /// Checks a text that is an address, or the data of a medium.
    fn check_address(&mut self, text: &[u8], is_remote: bool) {
        if is_remote {
            self.require_capability(ProviderCapability::RemoteMedia, b"url");
        }
        // An empty text carries no medium, whatever the keys around it say.
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

    /// Records the most expensive medium seen in the innermost container.
    fn note_medium(&mut self, medium: Option<MediaKind>) {
        if let Some(open) = self.open.last_mut() {
            open.costliest = open.costliest.max(medium);
        }
    }

    /// Records that the innermost container claims to be a medium, wherever its bytes are.
    fn claim(&mut self, medium: Option<MediaKind>) {
        if let Some(open) = self.open.last_mut() {
            open.claimed = open.claimed.max(medium);
        }
    }

    /// Returns the context of a key's value in a tool.
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
            b"external_web_access" => self.note(|open| open.states_reach = true),
            // Gemini's tools have no type; the key itself names the tool.
            _ => {
                let hosted = str::from_utf8(key).ok().and_then(ProviderCapability::for_tool_key);
                if let Some(capability) = hosted {
                    self.classify_open_container();
                    self.require_capability(capability, key);
                }
            }
        }
        context_in_schema(key)
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

    /// Marks the innermost container as identified: a tool has a name, an item has a type or a role.
    fn classify_open_container(&mut self) {
        self.note(|open| open.is_known = true);
    }

    /// Changes the record of the innermost open container, if there is one.
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
                // Base64 contains no colon, so in these positions every text with a colon counts as remote.
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
            // A plain text beside a medium is not itself the medium, so the keys around it do not apply.
            JsonContext::Content => {
                self.text_medium = None;
                self.check_address(text, is_fetchable_address(text));
            }
            JsonContext::Reference
            | JsonContext::Settings
            | JsonContext::SchemaId
            | JsonContext::SchemaText => self.check_reference(place, text),
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
            // An image counts where its bytes are. Only the more expensive media count by their claimed type.
            JsonContext::MediaType => {
                self.claim(MediaKind::of_type(text).filter(|medium| *medium > MediaKind::Image));
            }
            JsonContext::CacheTime => self.found.has_long_cache |= !matches!(text, b"5m" | b"1h"),
            JsonContext::Edits => self.found.is_compacted |= text.starts_with(b"compact"),
            _ => (),
        }
    }

    /// Checks a text of a schema or of settings.
    fn check_reference(&mut self, place: JsonContext, text: &[u8]) {
        if let Some(detail) = self.found.schema_addresses.note_text(place, text) {
            self.require_capability(ProviderCapability::RemoteMedia, detail);
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

    /// Checks a tool's name. LiteLLM itself runs tools of these names if its operator enabled search for models
    /// without one.
    fn check_tool_name(&mut self, name: &[u8]) {
        if name.starts_with(b"litellm_") {
            self.require_capability(ProviderCapability::WebSearch, name);
        }
        let Some(open) = self.open.last_mut() else { return };
        // Whether the name counts depends on keys that may follow, so `on_close` decides.
        open.search = match name {
            b"web_search" if open.context == JsonContext::Tool => WebSearchTool::Typed,
            b"WebSearch" if open.context == JsonContext::Tool => WebSearchTool::Bare,
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
        // A web search counts at its end: a search without outside access is dropped.
        if !text.starts_with(b"web_search") {
            self.found.added.note_tool_type(text);
        }
        // A type that was cut at the prefix limit cannot be a known type. Known types are ASCII, so a cut in a
        // character is unknown.
        match str::from_utf8(text).map(ProviderCapability::for_tool_type) {
            Ok(None) => {
                // Only the name distinguishes these from Gemini's tools, so a tool without a name stays unidentified.
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
                    // The decision waits for the tool's end: `external_web_access` may follow the type.
                    self.search_type =
                        SanitizedText(&String::from_utf8_lossy(text)).to_text().into();
                } else {
                    self.require_capability(capability, text);
                }
            }
            Err(_) => self.require_capability(ProviderCapability::UnknownTools, text),
        }
    }

    /// Handles the end of a web search tool. The first tool in the `tools` list that states its reach is recorded,
    /// and `admit_body` decides about it after the scan. Every other search tool needs the capability at once.
    fn web_search(&mut self, tool: OpenContainer) {
        let is_listed = self.field == "tools" && self.open.len() == 1;
        if tool.states_reach && is_listed && self.found.modest_search.is_none() {
            self.found.modest_search = Some(tool.at);
            return;
        }
        let kind = std::mem::take(&mut self.search_type);
        self.found.added.note_tool_type(kind.as_bytes());
        self.require_capability(ProviderCapability::WebSearch, kind.as_bytes());
    }

    /// Returns the context of the next value: by the array that contains it, or by the key before it.
    fn take_context(&mut self) -> JsonContext {
        match self.open.last() {
            Some(open) if open.is_array => open.context.element_context(),
            _ => std::mem::replace(&mut self.next, JsonContext::Opaque),
        }
    }

    /// Prepares the check of a text in a skipped array or object. Returns false if the text is not judged.
    fn begin_skipped_text(&mut self, at: u64) -> bool {
        let (_, place) = self.skipped;
        if !place.needs_text_check() {
            return false;
        }
        (self.text, self.text_at, self.text_medium) = (place, at + QUOTE_BYTES, None);
        true
    }

    /// Handles a value whose JSON type does not fit its context.
    fn check_type(&mut self, place: JsonContext, kind: JsonType) {
        let is_null = kind == JsonType::Null;
        match place {
            JsonContext::Tool => {
                self.require_capability(ProviderCapability::UnknownTools, b"tools");
            }
            JsonContext::ToolType if !is_null => {
                self.require_capability(ProviderCapability::UnknownTools, b"type");
            }
            JsonContext::EnvironmentType if !is_null => {
                self.require_capability(ProviderCapability::Containers, b"type");
            }
            JsonContext::NetworkType if !is_null => {
                self.require_capability(ProviderCapability::WebFetch, b"network_policy");
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
        // A key at depth 1 is a top-level field and selects a new context.
        if depth == 1 {
            self.next = self.field_context(key);
            return;
        }
        if self.opaque > 0 {
            self.skipped.1 = self.skipped.0.skipped_text_context(key);
            return;
        }
        let Some(open) = self.open.last() else { return };
        self.next_medium = MediaKind::of_name(key);
        self.next = match open.context {
            JsonContext::Tool => self.context_in_tool(key),
            JsonContext::Item => self.context_in_item(key),
            JsonContext::Environment => in_environment(key),
            JsonContext::Network if key == b"type" => JsonContext::NetworkType,
            JsonContext::Function if key == b"name" => JsonContext::ToolName,
            JsonContext::Cache if key == b"ttl" => JsonContext::CacheTime,
            JsonContext::Function => context_in_schema(key),
            JsonContext::Network | JsonContext::Cache => JsonContext::Opaque,
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
        // State: `opaque` counts the nesting inside skipped content; the container's close decrements it.
        if self.opaque > 0 {
            self.opaque += u32::from(is_open);
            return kind == JsonType::String && self.begin_skipped_text(at);
        }
        let place = if depth == 1 { self.next } else { self.take_context() };
        if place == JsonContext::Container && kind != JsonType::Null {
            self.note(|open| open.has_container = true);
        }
        let named = self.next_medium.take();
        // A medium named by the key wins over the medium inherited from the container.
        let within = named.or_else(|| self.open.last().and_then(|open| open.surrounding));
        if is_open {
            // A keyword is a text. What an upstream makes of another value is unknown.
            if place.is_keyword() {
                self.check_type(place, kind);
            }
            let place = place.container_context(kind);
            if place.is_skipped() {
                self.opaque = 1;
                self.skipped = (place, place);
            } else {
                self.open.push(OpenContainer::new(place, kind == JsonType::Array, within, at));
            }
            // An id given as an object is not checked as a text later, so its need is recorded now.
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
        // Readers of addresses skip blanks, but readers of keywords do not. A keyword with blanks is therefore
        // replaced by a word that matches no known keyword.
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
        if open.context == JsonContext::Tool && !open.is_array {
            self.found.added.note_preamble();
        }
        // A container has closed, so all of its keys are known. The checks below combine facts that may come in any
        // order.
        if (open.has_address && !open.is_text) || (open.has_source && !open.is_found) {
            self.require_capability(ProviderCapability::RemoteMedia, b"url");
            if open.costliest.is_none() {
                // An address without a known medium is charged as one fetched medium.
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
        // A drawing without its bytes refers to a picture that the provider stored.
        if open.is_drawing && !open.has_drawing {
            self.require_capability(ProviderCapability::StoredState, b"image_generation_call");
        }
        // The container claims a more expensive medium than its bytes show, so the claim is charged.
        if let Some(claimed) = open.claimed.filter(|claimed| open.costliest < Some(*claimed)) {
            self.found.media.add_unread(claimed);
        }
        // The parent container inherits the most expensive medium.
        self.note_medium(open.costliest.max(open.claimed));
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
        match open.context {
            JsonContext::Tool if !open.is_array && !open.is_known && !open.is_typed => {
                self.require_capability(ProviderCapability::UnknownTools, b"tools");
            }
            // OpenAI takes an item without type and role for a reference to a stored item.
            JsonContext::Item if !open.is_array && !open.is_known => {
                self.require_capability(ProviderCapability::StoredState, b"item_reference");
            }
            _ => (),
        }
    }
}

/// Returns the context of a key's value in a tool's environment.
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

/// The length of the quote before a text, in bytes.
const QUOTE_BYTES: u64 = 1;
