//! Looks for hosted capabilities inside a body's fields, while the body is scanned.
//!
//! What counts is where a key stands: `url` in a tool's arguments is the client's own data, `url` in an
//! `image_url` is fetched by the provider. So each open array and object has a [`Place`], which says what
//! its keys mean. Schemas, arguments and results are [`Place::Opaque`]: nothing in them is looked at, as
//! nobody acts on it. Everything else in messages is, at whatever depth, so that a part in a tool's result
//! in a message counts like one at the top.
//!
//! Nothing of the body is kept but the first need of each capability.

use super::capability::Capability;
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

/// Watches a scanner.
#[derive(Debug)]
pub(super) struct Inside {
    route: Route,
    /// The top-level field that is being read.
    field: &'static str,
    /// What the next value is.
    next: Place,
    /// The value whose text is wanted.
    text: Place,
    open: Vec<Open>,
    /// Arrays and objects open within one that is opaque, it included.
    opaque: u32,
    needs: Vec<Need>,
}

/// An array or object that is open.
#[derive(Clone, Copy, Debug)]
struct Open {
    place: Place,
    is_array: bool,
    /// Of a tool: whether it has a name. Of an item: whether it has a type or a role.
    is_known: bool,
    /// Of a tool: whether it is of a type that needs no name.
    is_typed: bool,
}

/// What a value is, by where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The client's own data, or of no interest.
    Opaque,
    /// Parts of messages.
    Content,
    /// The list that Responses takes as its input, and an item of it.
    Items,
    Item,
    ItemType,
    Tools,
    Tool,
    ToolType,
    /// A tool, if it is an object.
    Definition,
    /// Where a tool runs.
    Environment,
    EnvironmentType,
    /// An address, or an object whose `url` is one.
    Address,
    /// An object whose `url` is an address; as text it is something else.
    Source,
    /// Bytes in base64; some readers take an address as well.
    Data,
    /// The same, or an object like [`Place::Source`].
    Media,
    FileId,
}

impl Inside {
    pub(super) fn new(route: Route) -> Self {
        Self {
            route,
            field: "",
            next: Place::Opaque,
            text: Place::Opaque,
            open: Vec::new(),
            opaque: 0,
            needs: Vec::new(),
        }
    }

    pub(super) fn into_needs(self) -> Vec<Need> {
        self.needs
    }

    /// The fields that are looked into.
    fn field(&mut self, key: &[u8]) -> Place {
        let (field, place) = match key {
            b"messages" => ("messages", Place::Content),
            b"system" => ("system", Place::Content),
            b"instructions" => ("instructions", Place::Content),
            b"prompt" => ("prompt", Place::Content),
            b"prediction" => ("prediction", Place::Content),
            b"input" if self.route == Route::Responses => ("input", Place::Items),
            b"input" => ("input", Place::Content),
            b"tools" => ("tools", Place::Tools),
            // LiteLLM reads them as tools where the model is Gemini.
            b"functions" => ("functions", Place::Tools),
            _ => ("", Place::Opaque),
        };
        self.field = field;
        place
    }

    fn needs(&mut self, capability: Capability, detail: &[u8]) {
        if self.needs.iter().any(|need| need.capability == capability) {
            return;
        }
        let detail = Printable(&String::from_utf8_lossy(detail)).text().into();
        self.needs.push(Need { capability, field: self.field, detail });
    }

    /// What the value of a key is, in a tool.
    fn in_tool(&mut self, key: &[u8]) -> Place {
        match key {
            b"type" => return Place::ToolType,
            b"name" | b"function" | b"custom" => self.know(),
            b"tools" => return Place::Tools,
            b"environment" => return Place::Environment,
            b"container" | b"input_image_mask" | b"skills" => return Place::Content,
            b"file_ids" | b"file_id" => return Place::FileId,
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
                Place::Content
            }
            _ => in_content(key),
        }
    }

    /// The innermost says what it is.
    fn know(&mut self) {
        if let Some(open) = self.open.last_mut() {
            open.is_known = true;
        }
    }

    fn judge(&mut self, place: Place, text: &[u8]) {
        match place {
            Place::ToolType => self.tool_type(text),
            Place::ItemType => {
                self.know();
                if text == b"item_reference" {
                    self.needs(Capability::StoredState, text);
                }
            }
            Place::EnvironmentType if text != b"local" => self.needs(Capability::Containers, text),
            Place::Address if !is_inline(text) => self.needs(Capability::RemoteMedia, b"url"),
            Place::Data | Place::Media if !is_inline(text) && text.contains(&b':') => {
                self.needs(Capability::RemoteMedia, b"url");
            }
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
                if let Some(open) = self.open.last_mut() {
                    open.is_typed = true;
                }
                self.needs(capability, text);
            }
            Err(_) => self.needs(Capability::UnknownTools, text),
        }
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
            Place::FileId if !is_null => self.needs(Capability::FileIds, b"file_id"),
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
        self.next = match open.place {
            Place::Tool => self.in_tool(key),
            Place::Item => self.in_item(key),
            Place::Environment if key == b"type" => Place::EnvironmentType,
            Place::Environment => Place::Opaque,
            Place::Address | Place::Source if key == b"url" => Place::Address,
            _ => in_content(key),
        };
    }

    fn value(&mut self, depth: usize, kind: Kind) -> bool {
        let is_open = matches!(kind, Kind::Array | Kind::Object);
        if self.opaque > 0 {
            self.opaque += u32::from(is_open);
            return false;
        }
        let place = if depth == 1 { self.next } else { self.take_place() };
        if is_open {
            let place = place.within(kind);
            if place == Place::Opaque {
                self.opaque = 1;
            } else {
                let is_array = kind == Kind::Array;
                self.open.push(Open { place, is_array, is_known: false, is_typed: false });
            }
            if place == Place::FileId && kind == Kind::Object {
                self.mistyped(place, kind);
            }
            return false;
        }
        let is_read = kind == Kind::String && place.is_read();
        if is_read {
            self.text = place;
        } else {
            self.mistyped(place, kind);
        }
        is_read
    }

    fn text(&mut self, start: &[u8]) {
        self.judge(self.text, start);
    }

    fn close(&mut self) {
        if self.opaque > 0 {
            self.opaque -= 1;
            return;
        }
        let Some(open) = self.open.pop() else { return };
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

impl Place {
    /// What an element is in an array at this place.
    fn element(self) -> Self {
        match self {
            Self::Items => Self::Item,
            Self::Tools | Self::Tool => Self::Tool,
            Self::Item => Self::Content,
            same => same,
        }
    }

    /// Whether a text here is judged by how it begins.
    fn is_read(self) -> bool {
        matches!(
            self,
            Self::ToolType
                | Self::ItemType
                | Self::EnvironmentType
                | Self::Address
                | Self::Data
                | Self::Media
        )
    }

    /// What an array or object is that stands here.
    fn within(self, kind: Kind) -> Self {
        match (self, kind) {
            (Self::Tools | Self::Definition, Kind::Object) => Self::Tool,
            (Self::Items, Kind::Object) => Self::Item,
            (Self::Media, Kind::Object) => Self::Source,
            (Self::ToolType | Self::ItemType | Self::EnvironmentType | Self::Data, _) => {
                Self::Content
            }
            (Self::Definition, _) => Self::Tools,
            (same, _) => same,
        }
    }
}

/// What the value of a key is, among parts of messages.
fn in_content(key: &[u8]) -> Place {
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
fn is_inline(text: &[u8]) -> bool {
    text.first_chunk().is_some_and(|scheme: &[u8; 5]| scheme.eq_ignore_ascii_case(b"data:"))
}

/// The keys that mean something among parts of messages, by their length: a look-up for each key is
/// what this costs. Addresses are told by their ending besides.
const CONTENT: [&[(&[u8], Place)]; 13] = [
    &[],
    &[],
    &[],
    &[],
    &[(b"file", Place::Source)],
    &[
        (b"input", Place::Opaque),
        (b"tools", Place::Tools),
        (b"image", Place::Media),
        (b"video", Place::Media),
        (b"audio", Place::Media),
        (b"media", Place::Media),
    ],
    &[(b"source", Place::Source), (b"action", Place::Opaque), (b"schema", Place::Opaque)],
    &[
        (b"actions", Place::Opaque),
        (b"file_id", Place::FileId),
        (b"queries", Place::Opaque),
        (b"results", Place::Opaque),
    ],
    &[(b"document", Place::Source), (b"file_ids", Place::FileId)],
    &[
        (b"arguments", Place::Opaque),
        (b"citations", Place::Opaque),
        (b"file_data", Place::Data),
        (b"operation", Place::Opaque),
    ],
    &[
        (b"definition", Place::Definition),
        (b"parameters", Place::Opaque),
        (b"tool_calls", Place::Opaque),
    ],
    &[(b"annotations", Place::Opaque)],
    &[(b"input_schema", Place::Opaque)],
];
