//! The facts about an array or object while the scanner is inside it.

use super::json_context::JsonContext;
use crate::llm::request::media::MediaKind;

/// An array or object that the scanner has entered and not yet left.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenContainer {
    /// The context of the container.
    pub(super) context: JsonContext,
    pub(super) is_array: bool,
    /// The offset of the array or object in the body.
    pub(super) at: u64,
    /// True if a tool's type is a web search.
    pub(super) is_web_search: bool,
    /// True if a tool states whether it may reach outside.
    pub(super) states_reach: bool,
    /// True if a tool has a name, or an item has a type or a role.
    pub(super) is_known: bool,
    /// True if a tool's type needs no name.
    pub(super) is_typed: bool,
    /// True if a tool has a type.
    pub(super) has_type: bool,
    /// True if a tool has its own schema.
    pub(super) has_schema: bool,
    /// The condition under which LiteLLM takes the tool's name for its own search.
    pub(super) search: WebSearchTool,
    /// The medium in the names of the keys around the container.
    pub(super) surrounding: Option<MediaKind>,
    /// The medium that the container claims to be.
    pub(super) claimed: Option<MediaKind>,
    /// The most expensive medium seen in the container.
    pub(super) costliest: Option<MediaKind>,
    /// True if a source or a part is text.
    pub(super) is_text: bool,
    /// True if a source or a part has an address.
    pub(super) has_address: bool,
    /// True if a part is a search result of the client.
    pub(super) is_found: bool,
    /// True if a part's source is an address.
    pub(super) has_source: bool,
    /// True if a tool or an item names a container at the provider.
    pub(super) has_container: bool,
    /// True if a tool or an item runs code at the provider.
    pub(super) runs_code: bool,
    /// True if an item is a picture that the provider generated.
    pub(super) is_drawing: bool,
    /// True if an item contains the picture.
    pub(super) has_drawing: bool,
}

/// The names by which LiteLLM's interception identifies a tool that LiteLLM runs itself, with a
/// condition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WebSearchTool {
    #[default]
    None,
    /// The tool is LiteLLM's if it has a type.
    Typed,
    /// The tool is LiteLLM's if it has no schema. Claude Code has a tool of this name that runs at
    /// the client.
    Bare,
}

impl OpenContainer {
    pub(super) fn new(
        context: JsonContext,
        is_array: bool,
        surrounding: Option<MediaKind>,
        at: u64,
    ) -> Self {
        Self {
            context,
            is_array,
            at,
            is_web_search: false,
            states_reach: false,
            is_known: false,
            is_typed: false,
            has_type: false,
            has_schema: false,
            search: WebSearchTool::None,
            surrounding,
            claimed: None,
            costliest: None,
            is_text: false,
            has_address: false,
            is_found: false,
            has_source: false,
            has_container: false,
            runs_code: false,
            is_drawing: false,
            has_drawing: false,
        }
    }
}
