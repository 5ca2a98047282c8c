//! What is known of an array or object while it is open.

use super::json_context::JsonContext;
use crate::llm::request::media::MediaKind;

/// An array or object that is open.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenContainer {
    pub(super) place: JsonContext,
    pub(super) is_array: bool,
    pub(super) at: u64,
    /// Of a tool: whether it is a search of the web by its type, and whether it says that it may reach outside.
    pub(super) is_web_search: bool,
    pub(super) says_reach: bool,
    /// Of a tool: whether it has a name. Of an item: whether it has a type or a role.
    pub(super) is_known: bool,
    /// Of a tool: whether it is of a type that needs no name.
    pub(super) is_typed: bool,
    /// Of a tool: whether it has a type, and whether it has a schema of its own.
    pub(super) has_type: bool,
    pub(super) has_schema: bool,
    /// Of a tool: whether it has a name that LiteLLM takes for its own search.
    pub(super) search: WebSearchTool,
    /// The medium that the keys around it are named for.
    pub(super) within: Option<MediaKind>,
    /// The medium that it is said to be, and the dearest that was seen in it.
    pub(super) claimed: Option<MediaKind>,
    pub(super) noted: Option<MediaKind>,
    /// Of a source or a part: whether it is text, and whether it has an address.
    pub(super) is_text: bool,
    pub(super) has_address: bool,
    /// Of a part: whether it is a result that the client has found, and whether its source is an address.
    pub(super) is_found: bool,
    pub(super) has_source: bool,
    /// Whether it names a machine at the provider, and whether it is what runs code there.
    pub(super) has_container: bool,
    pub(super) runs_code: bool,
    /// Of an item: whether it is a picture that the provider has drawn, and whether it has the picture.
    pub(super) is_drawing: bool,
    pub(super) has_drawing: bool,
}

/// Names by which LiteLLM's interception knows a tool that it runs itself, with a condition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WebSearchTool {
    #[default]
    None,
    /// If the tool has a type.
    Typed,
    /// If the tool has no schema: Claude Code has a tool of this name that runs at the client.
    Bare,
}

impl OpenContainer {
    pub(super) fn new(
        place: JsonContext,
        is_array: bool,
        within: Option<MediaKind>,
        at: u64,
    ) -> Self {
        Self {
            place,
            is_array,
            at,
            is_web_search: false,
            says_reach: false,
            is_known: false,
            is_typed: false,
            has_type: false,
            has_schema: false,
            search: WebSearchTool::None,
            within,
            claimed: None,
            noted: None,
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
