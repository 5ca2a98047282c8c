//! What a provider can do for an agent that the sandbox cannot, by the names that grant it.
//!
//! A sandbox without network has none because its provider fetches a page for it. So whatever a provider
//! runs, fetches or keeps has to be granted, tomorrow's tools too: a type of tool that is not known to run
//! at the client is taken to run at the provider.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// What a run has been granted.
pub type CapabilitySet = BTreeSet<ProviderCapability>;

/// Something that happens outside the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderCapability {
    /// The provider searches the web, or a map of the world.
    WebSearch,
    /// The provider fetches pages.
    WebFetch,
    /// The provider runs the model's code.
    CodeInterpreter,
    /// A computer that is not the client's. Those known today act at the client and need no grant.
    ComputerUse,
    /// The provider searches files that are kept there.
    FileSearch,
    /// The provider draws.
    ImageGeneration,
    /// The provider calls a tool server, wherever it is.
    RemoteMcp,
    /// The provider, or `LiteLLM`, fetches images and documents by address.
    RemoteMedia,
    /// Files of the provider's account, by id.
    FileIds,
    /// Conversations, responses and prompts kept by the provider.
    StoredState,
    /// The answer is written when nobody listens.
    Background,
    /// Machines at the provider, and the skills in them.
    Containers,
    /// Tools of a type that is not known here.
    UnknownTools,
}

impl ProviderCapability {
    pub const ALL: [Self; 13] = [
        Self::WebSearch,
        Self::WebFetch,
        Self::CodeInterpreter,
        Self::ComputerUse,
        Self::FileSearch,
        Self::ImageGeneration,
        Self::RemoteMcp,
        Self::RemoteMedia,
        Self::FileIds,
        Self::StoredState,
        Self::Background,
        Self::Containers,
        Self::UnknownTools,
    ];

    /// The name that grants it.
    pub fn name(self) -> &'static str {
        match self {
            Self::WebSearch => "web_search",
            Self::WebFetch => "web_fetch",
            Self::CodeInterpreter => "code_interpreter",
            Self::ComputerUse => "computer_use",
            Self::FileSearch => "file_search",
            Self::ImageGeneration => "image_generation",
            Self::RemoteMcp => "remote_mcp",
            Self::RemoteMedia => "remote_media",
            Self::FileIds => "file_ids",
            Self::StoredState => "stored_state",
            Self::Background => "background",
            Self::Containers => "containers",
            Self::UnknownTools => "unknown_tools",
        }
    }

    /// The values of `anthropic-beta` that go with it: Anthropic refuses its tools and fields without them.
    pub fn anthropic_betas(self) -> &'static [&'static str] {
        match self {
            Self::CodeInterpreter => &["code-execution-2025-05-22", "code-execution-2025-08-25"],
            Self::Containers => &["skills-2025-10-02"],
            Self::FileIds => &["files-api-2025-04-14"],
            Self::RemoteMcp => {
                &["mcp-client-2025-04-04", "mcp-client-2025-11-20", "mcp-client-2026-09-15"]
            }
            Self::StoredState => &["message-threads-2026-08-12"],
            Self::UnknownTools => &["advisor-tool-2026-03-01"],
            Self::WebFetch => &["web-fetch-2025-09-10"],
            Self::WebSearch => &["web-search-2025-03-05"],
            Self::Background
            | Self::ComputerUse
            | Self::FileSearch
            | Self::ImageGeneration
            | Self::RemoteMedia => &[],
        }
    }

    /// What a tool of this type needs; `None` where it runs at the client.
    ///
    /// Clients run functions, the shells and editors that providers describe, and the computers and
    /// browsers that models operate by asking for clicks. `tool_search` looks through the request's own
    /// tools and reaches nothing.
    pub(super) fn for_tool_type(kind: &str) -> Option<Self> {
        let runs_at_client = CLIENT_TOOL_TYPES.contains(&kind)
            || CLIENT_TOOL_PREFIXES.iter().any(|family| kind.starts_with(family));
        if runs_at_client {
            return None;
        }
        let hosted = HOSTED_TOOL_PREFIXES.iter().find(|(family, _)| kind.starts_with(family));
        Some(hosted.map_or(Self::UnknownTools, |(_, capability)| *capability))
    }

    /// What a tool needs that has this key: Gemini's are told by their keys instead of a type, and
    /// `LiteLLM` passes them on whatever the type says.
    pub(super) fn for_tool_key(key: &str) -> Option<Self> {
        let hosted = HOSTED_TOOL_KEYS.iter().find(|(name, _)| *name == key);
        hosted.map(|(_, capability)| *capability)
    }
}

/// Whole types of tools that run at the client.
const CLIENT_TOOL_TYPES: &[&str] = &[
    "apply_patch",
    "computer",
    "computer_use",
    "computer_use_preview",
    "custom",
    "function",
    "local_shell",
    "namespace",
    "shell",
    "tool_search",
];

/// Beginnings of types that run at the client: what Anthropic puts before a date.
const CLIENT_TOOL_PREFIXES: &[&str] = &[
    "bash_2",
    "browser_toolset_2",
    "computer_2",
    "computer_toolset_2",
    "memory_2",
    "text_editor_2",
    "tool_search_tool_",
];

/// Beginnings of types that run at the provider, so that tomorrow's version is known as well.
const HOSTED_TOOL_PREFIXES: &[(&str, ProviderCapability)] = &[
    ("browser_search", ProviderCapability::WebSearch),
    ("code_execution", ProviderCapability::CodeInterpreter),
    ("code_interpreter", ProviderCapability::CodeInterpreter),
    ("computer", ProviderCapability::ComputerUse),
    ("container", ProviderCapability::Containers),
    ("enterprise_web_search", ProviderCapability::WebSearch),
    ("file_search", ProviderCapability::FileSearch),
    ("google_maps", ProviderCapability::WebSearch),
    ("google_search", ProviderCapability::WebSearch),
    ("image_generation", ProviderCapability::ImageGeneration),
    ("live_search", ProviderCapability::WebSearch),
    ("mcp", ProviderCapability::RemoteMcp),
    ("programmatic_tool_calling", ProviderCapability::CodeInterpreter),
    ("retrieval", ProviderCapability::FileSearch),
    ("skill", ProviderCapability::Containers),
    ("url_context", ProviderCapability::WebFetch),
    ("web_fetch", ProviderCapability::WebFetch),
    ("web_search", ProviderCapability::WebSearch),
    ("x_search", ProviderCapability::WebSearch),
];

const HOSTED_TOOL_KEYS: &[(&str, ProviderCapability)] = &[
    ("codeExecution", ProviderCapability::CodeInterpreter),
    ("code_execution", ProviderCapability::CodeInterpreter),
    ("enterpriseWebSearch", ProviderCapability::WebSearch),
    ("enterprise_web_search", ProviderCapability::WebSearch),
    ("fileSearch", ProviderCapability::FileSearch),
    ("file_search", ProviderCapability::FileSearch),
    ("googleMaps", ProviderCapability::WebSearch),
    ("googleSearch", ProviderCapability::WebSearch),
    ("googleSearchRetrieval", ProviderCapability::WebSearch),
    ("google_maps", ProviderCapability::WebSearch),
    ("google_search", ProviderCapability::WebSearch),
    ("google_search_retrieval", ProviderCapability::WebSearch),
    ("retrieval", ProviderCapability::FileSearch),
    ("urlContext", ProviderCapability::WebFetch),
    ("url_context", ProviderCapability::WebFetch),
    ("web_search", ProviderCapability::WebSearch),
];
