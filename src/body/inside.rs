//! Looks for hosted capabilities inside a body's fields, while the body is scanned.
//!
//! What counts is where a key stands: `url` in a tool's arguments is the client's own data, `url` in an
//! `image_url` is fetched by the provider. So each open array and object has a [`Place`], which says what
//! its keys mean. Schemas, arguments and results are [`Place::Opaque`]: nothing in them is looked at, as
//! nobody acts on it. Everything else in messages is, at whatever depth, so that a part in a tool's result
//! in a message counts like one at the top.
//!
//! A text among content that begins like an address is taken for one, unless it stands under a key whose
//! value is text: what a provider fetches tomorrow is under a key that nobody knows today.
//!
//! Nothing of the body is kept but the first need of each capability, and what its media come to.

mod open;
mod place;

use self::open::{Open, Search};
use self::place::{
    Embedded, Place, in_content, is_address, is_address_in_data, is_file_id, is_inline,
};
use super::capability::Capability;
use super::media::{Media, Medium};
use crate::base::json::{Kind, Watch};
use crate::observe::printable::Printable;
use crate::protocol::Route;

/// A capability that a body needs, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) capability: Capability,
    /// The top-level field.
    pub(super) field: &'static str,
    /// The tool's type or the key that needs it, safe to print.
    pub(super) detail: Box<str>,
}

/// What was seen in a body.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// The capabilities that its parts and tools need, each once.
    pub(super) needs: Vec<Need>,
    pub(super) media: Media,
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
pub(super) struct Inside {
    route: Route,
    /// The top-level field that is being read.
    field: &'static str,
    /// What the next value is.
    next: Place,
    /// The medium that the key before it is named for.
    next_medium: Option<Medium>,
    /// The value whose text is wanted, and where that begins in the body.
    text: Place,
    text_at: u64,
    /// The medium that it has to be, by the keys that it stands under.
    text_medium: Option<Medium>,
    open: Vec<Open>,
    /// Arrays and objects open within one that is opaque, it included.
    opaque: u32,
    /// The type of the tool that searches the web, until it ends.
    search_type: Box<str>,
    found: Found,
}

impl Found {
    /// Has the texts that begin like addresses fetched.
    pub(super) fn fetch_embedded(&mut self) {
        self.media.fetch(self.embedded_addresses);
        if self.needs.iter().all(|need| need.capability != Capability::RemoteMedia) {
            let (capability, field) = (Capability::RemoteMedia, "input");
            self.needs.push(Need { capability, field, detail: "url".into() });
        }
    }
}

impl Inside {
    pub(super) fn new(route: Route) -> Self {
        Self {
            route,
            field: "",
            next: Place::Opaque,
            next_medium: None,
            text: Place::Opaque,
            text_at: 0,
            text_medium: None,
            open: Vec::new(),
            opaque: 0,
            search_type: Box::default(),
            found: Found::default(),
        }
    }

    pub(super) fn into_found(self) -> Found {
        self.found
    }

    /// The fields that are looked into.
    fn field(&mut self, key: &[u8]) -> Place {
        let (field, place) = match key {
            b"messages" => ("messages", Place::Content),
            b"system" => ("system", Place::Text),
            b"instructions" => ("instructions", Place::Text),
            b"prompt" => ("prompt", Place::Text),
            b"prediction" => ("prediction", Place::Text),
            b"image" => ("image", Place::Media),
            b"documents" => ("documents", Place::Content),
            b"input" if self.route == Route::Responses => ("input", Place::Items),
            b"input" => ("input", Place::Embedded),
            b"cache_control" => ("cache_control", Place::Cache),
            b"context_management" => ("context_management", Place::Edits),
            b"compaction" => ("compaction", Place::Edits),
            b"tools" => ("tools", Place::Tools),
            // LiteLLM reads them as tools where the model is Gemini.
            b"functions" => ("functions", Place::Tools),
            _ => ("", Place::Opaque),
        };
        self.field = field;
        place
    }

    fn needs(&mut self, capability: Capability, detail: &[u8]) {
        if self.found.needs.iter().any(|need| need.capability == capability) {
            return;
        }
        let detail = Printable(&String::from_utf8_lossy(detail)).text().into();
        self.found.needs.push(Need { capability, field: self.field, detail });
    }

    /// A text that is an address, or the data itself.
    fn address(&mut self, text: &[u8], is_remote: bool) {
        if is_remote {
            self.needs(Capability::RemoteMedia, b"url");
        }
        let within = self.text_medium.filter(|_| !text.is_empty());
        match Medium::of(text).or(within) {
            Some(medium) => {
                self.found.media.note(medium, self.text_at);
                self.note_medium(Some(medium));
            }
            None if is_remote => self.found.media.fetch(1),
            None => (),
        }
    }

    /// Remembers the dearest medium of the innermost.
    fn note_medium(&mut self, medium: Option<Medium>) {
        if let Some(open) = self.open.last_mut() {
            open.noted = open.noted.max(medium);
        }
    }

    /// The innermost is said to be a medium, wherever its bytes are.
    fn claim(&mut self, medium: Option<Medium>) {
        if let Some(open) = self.open.last_mut() {
            open.claimed = open.claimed.max(medium);
        }
    }

    /// What the value of a key is, in a tool.
    fn in_tool(&mut self, key: &[u8]) -> Place {
        match key {
            b"type" => {
                if let Some(open) = self.open.last_mut() {
                    open.has_type = true;
                }
                return Place::ToolType;
            }
            b"name" => {
                self.know();
                return Place::ToolName;
            }
            b"function" | b"custom" => {
                self.know();
                return Place::Function;
            }
            b"input_schema" | b"parameters" => {
                if let Some(open) = self.open.last_mut() {
                    open.has_schema = true;
                }
            }
            b"cache_control" => return Place::Cache,
            b"tools" => return Place::Tools,
            b"environment" => return Place::Environment,
            b"container" => return Place::Container,
            b"input_image_mask" | b"skills" => return Place::Content,
            b"file_ids" | b"file_id" => return Place::FileId,
            b"external_web_access" => self.note(|open| open.says_reach = true),
            _ => {
                let hosted = str::from_utf8(key).ok().and_then(Capability::of_tool_key);
                if let Some(capability) = hosted {
                    self.know();
                    self.needs(capability, key);
                }
            }
        }
        Place::Opaque
    }

    fn in_item(&mut self, key: &[u8]) -> Place {
        match key {
            b"type" => Place::ItemType,
            b"role" => {
                self.know();
                Place::Text
            }
            b"environment" => Place::Environment,
            b"result" => Place::Drawn,
            _ => in_content(key),
        }
    }

    /// The innermost says what it is.
    fn know(&mut self) {
        self.note(|open| open.is_known = true);
    }

    /// Notes something of the innermost.
    fn note(&mut self, note: impl FnOnce(&mut Open)) {
        if let Some(open) = self.open.last_mut() {
            note(open);
        }
    }

    fn judge(&mut self, place: Place, text: &[u8]) {
        match place {
            Place::ToolType => self.tool_type(text),
            Place::ItemType => self.item_type(text),
            Place::EnvironmentType if text != b"local" => self.needs(Capability::Containers, text),
            Place::Environment if text.starts_with(b"container") => {
                self.needs(Capability::Containers, text);
            }
            Place::Network | Place::NetworkType if text != b"disabled" => {
                self.needs(Capability::WebFetch, b"network_policy");
            }
            Place::ToolName => self.tool_name(text),
            Place::Address => self.address(text, !is_inline(text)),
            Place::Data | Place::Media => {
                let is_remote =
                    !is_inline(text) && (text.contains(&b':') || is_address_in_data(text));
                self.address(text, is_remote);
            }
            Place::Payload | Place::Source => self.address(text, is_address_in_data(text)),
            Place::Drawn => {
                self.note(|open| open.has_drawing = !text.is_empty());
                self.address(text, is_address_in_data(text));
            }
            Place::FileId => {
                self.needs(Capability::FileIds, b"file_id");
                self.found.media.add_unread(Medium::Document);
                if !is_file_id(text) {
                    self.needs(Capability::RemoteMedia, b"file_id");
                }
            }
            Place::Origin => {
                self.note(|open| open.has_source = is_address_in_data(text));
                self.address(text, false);
            }
            // A detail of a medium is none itself.
            Place::Content => {
                self.text_medium = None;
                self.address(text, is_address(text));
            }
            Place::OriginType => self.note(|open| open.is_text = text == b"text"),
            Place::PartType => {
                self.claim(Medium::of_name(text));
                self.note(|open| {
                    open.is_text |= text.starts_with(b"web_search_result");
                    open.is_found |= text == b"search_result";
                });
            }
            Place::Url => {
                self.note(|open| open.has_address = !is_inline(text));
                self.address(text, false);
            }
            Place::OriginData => {
                self.note(|open| open.has_address = is_address_in_data(text));
                self.address(text, false);
            }
            Place::Embedded => match Embedded::of(text) {
                Embedded::Text => self.address(text, false),
                Embedded::Address => self.found.embedded_addresses += 1,
                Embedded::Bucket => self.address(text, true),
                Embedded::File => self.needs(Capability::FileIds, b"files"),
            },
            // What is said to be an image is one where its bytes are.
            Place::MediaType => {
                self.claim(Medium::of_type(text).filter(|medium| *medium > Medium::Image));
            }
            Place::CacheTime => self.found.has_long_cache |= !matches!(text, b"5m" | b"1h"),
            Place::Edits => self.found.is_compacted |= text.starts_with(b"compact"),
            _ => (),
        }
    }

    /// LiteLLM runs tools of these names itself, where it has been told to search for models that cannot.
    fn tool_name(&mut self, name: &[u8]) {
        if name.starts_with(b"litellm_") {
            self.needs(Capability::WebSearch, name);
        }
        let Some(open) = self.open.last_mut() else { return };
        open.search = match name {
            b"web_search" if open.place == Place::Tool => Search::Typed,
            b"WebSearch" if open.place == Place::Tool => Search::Bare,
            _ => open.search,
        };
    }

    fn item_type(&mut self, text: &[u8]) {
        self.know();
        match text {
            b"item_reference" => self.needs(Capability::StoredState, text),
            b"code_interpreter_call" => self.note(|open| open.runs_code = true),
            b"image_generation_call" => self.note(|open| open.is_drawing = true),
            _ => (),
        }
    }

    fn tool_type(&mut self, text: &[u8]) {
        // Cut text has no unknown beginning, and none of these has a character of two bytes.
        match str::from_utf8(text).map(Capability::of_tool) {
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
                    open.runs_code = capability == Capability::CodeInterpreter;
                    open.is_web_search = text.starts_with(b"web_search");
                });
                if text.starts_with(b"web_search") {
                    // Judged when the tool ends, by all that it says.
                    self.search_type = Printable(&String::from_utf8_lossy(text)).text().into();
                } else {
                    self.needs(capability, text);
                }
            }
            Err(_) => self.needs(Capability::UnknownTools, text),
        }
    }

    /// A tool has ended that searches the web. The first of the list of tools that says what it may reach is looked at
    /// when all has been read.
    fn web_search(&mut self, tool: Open) {
        let is_listed = self.field == "tools" && self.open.len() == 1;
        if tool.says_reach && is_listed && self.found.modest_search.is_none() {
            self.found.modest_search = Some(tool.at);
            return;
        }
        let kind = std::mem::take(&mut self.search_type);
        self.needs(Capability::WebSearch, kind.as_bytes());
    }

    /// What the next element of the innermost array is, or what the key before it said.
    fn take_place(&mut self) -> Place {
        match self.open.last() {
            Some(open) if open.is_array => open.place.element(),
            _ => std::mem::replace(&mut self.next, Place::Opaque),
        }
    }

    /// A value of a kind that its place does not have.
    fn mistyped(&mut self, place: Place, kind: Kind) {
        let is_null = kind == Kind::Null;
        match place {
            Place::Tool => self.needs(Capability::UnknownTools, b"tools"),
            Place::ToolType if !is_null => self.needs(Capability::UnknownTools, b"type"),
            Place::FileId if !is_null => {
                self.needs(Capability::FileIds, b"file_id");
                self.found.media.add_unread(Medium::Document);
            }
            Place::SkillId if !is_null => self.needs(Capability::Containers, b"skill_id"),
            Place::StoredId if !is_null => self.needs(Capability::StoredState, b"id"),
            Place::CacheTime if !is_null => self.found.has_long_cache = true,
            _ => (),
        }
    }
}

impl Watch for Inside {
    fn key(&mut self, depth: usize, key: &[u8]) {
        if depth == 1 {
            self.next = self.field(key);
            return;
        }
        if self.opaque > 0 {
            return;
        }
        let Some(open) = self.open.last() else { return };
        self.next_medium = Medium::of_name(key);
        self.next = match open.place {
            Place::Tool => self.in_tool(key),
            Place::Item => self.in_item(key),
            Place::Environment => in_environment(key),
            Place::Network if key == b"type" => Place::NetworkType,
            Place::Function if key == b"name" => Place::ToolName,
            Place::Cache if key == b"ttl" => Place::CacheTime,
            Place::Network | Place::Function | Place::Cache => Place::Opaque,
            Place::Edits => Place::Edits,
            Place::Address | Place::Source | Place::Origin if key == b"url" => Place::Address,
            Place::Source if key == b"id" => Place::StoredId,
            Place::Origin if key == b"type" => Place::OriginType,
            Place::Origin if key == b"data" => Place::OriginData,
            _ => in_content(key),
        };
    }

    fn value(&mut self, depth: usize, kind: Kind, at: u64) -> bool {
        let is_open = matches!(kind, Kind::Array | Kind::Object);
        if self.opaque > 0 {
            self.opaque += u32::from(is_open);
            return false;
        }
        let place = if depth == 1 { self.next } else { self.take_place() };
        if place == Place::Container && kind != Kind::Null {
            self.note(|open| open.has_container = true);
        }
        let named = self.next_medium.take();
        let within = named.or_else(|| self.open.last().and_then(|open| open.within));
        if is_open {
            let place = place.within(kind);
            if place == Place::Opaque {
                self.opaque = 1;
            } else {
                self.open.push(Open::new(place, kind == Kind::Array, within, at));
            }
            let is_id = matches!(place, Place::FileId | Place::SkillId | Place::StoredId);
            if is_id && kind == Kind::Object {
                self.mistyped(place, kind);
            }
            return false;
        }
        if kind == Kind::Number && self.open.last().is_some_and(|open| open.is_array) {
            self.found.numbers += 1;
        }
        let is_read = kind == Kind::String && place.is_read();
        if is_read {
            self.text = place;
            self.text_at = at + QUOTE;
            self.text_medium = within;
        } else {
            self.mistyped(place, kind);
        }
        is_read
    }

    fn text(&mut self, start: &[u8], had_blanks: bool) {
        // Only who fetches an address passes over blanks: a word with blanks is another word.
        let is_word = matches!(
            self.text,
            Place::ToolType
                | Place::ItemType
                | Place::EnvironmentType
                | Place::NetworkType
                | Place::OriginType
                | Place::PartType
                | Place::CacheTime
        );
        let start = if had_blanks && is_word { b"blank" } else { start };
        self.judge(self.text, start);
    }

    fn close(&mut self) {
        if self.opaque > 0 {
            self.opaque -= 1;
            return;
        }
        let Some(open) = self.open.pop() else { return };
        if (open.has_address && !open.is_text) || (open.has_source && !open.is_found) {
            self.needs(Capability::RemoteMedia, b"url");
            if open.noted.is_none() {
                self.found.media.fetch(1);
            }
        }
        match (open.has_container, open.runs_code) {
            (true, true) => self.needs(Capability::CodeInterpreter, b"container"),
            (true, false) => self.needs(Capability::Containers, b"container"),
            (false, _) => (),
        }
        if open.is_drawing && !open.has_drawing {
            self.needs(Capability::StoredState, b"image_generation_call");
        }
        if let Some(claimed) = open.claimed.filter(|claimed| open.noted < Some(*claimed)) {
            self.found.media.add_unread(claimed);
        }
        self.note_medium(open.noted.max(open.claimed));
        if open.is_web_search {
            self.web_search(open);
        }
        let is_search = match open.search {
            Search::None => false,
            Search::Typed => open.has_type,
            Search::Bare => !open.has_schema,
        };
        if is_search {
            self.needs(Capability::WebSearch, b"web_search");
        }
        match open.place {
            Place::Tool if !open.is_array && !open.is_known && !open.is_typed => {
                self.needs(Capability::UnknownTools, b"tools");
            }
            // OpenAI takes an item that is nothing else for a reference to one that it has stored.
            Place::Item if !open.is_array && !open.is_known => {
                self.needs(Capability::StoredState, b"item_reference");
            }
            _ => (),
        }
    }
}

/// What the value of a key is, in the place where a tool runs.
fn in_environment(key: &[u8]) -> Place {
    match key {
        b"type" => Place::EnvironmentType,
        b"container_id" => Place::Container,
        b"network_policy" => Place::Network,
        b"file_ids" | b"file_id" => Place::FileId,
        b"skills" => Place::Content,
        _ => Place::Opaque,
    }
}

/// Before a text.
const QUOTE: u64 = 1;
