//! The things that a provider can do for an agent outside the sandbox, by the names that grant
//! them.
//!
//! A sandbox without network is not isolated if the provider fetches a page for the agent.
//! Therefore every tool that a provider runs, every address that it fetches and everything that it
//! stores needs a grant. The rule covers future tools too: a tool type that is not known to run at
//! the client counts as running at the provider.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The capabilities that a run has been granted.
pub type CapabilitySet = BTreeSet<ProviderCapability>;

/// An action outside the sandbox that an operator can grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderCapability {
    /// The provider searches the web or a map service.
    WebSearch,
    /// The provider fetches web pages.
    WebFetch,
    /// The provider runs code that the model wrote.
    CodeInterpreter,
    /// The provider operates a computer that is not the client's. The computer tools known today
    /// act at the client and need no grant.
    ComputerUse,
    /// The provider searches files that the provider stores.
    FileSearch,
    /// The provider generates images.
    ImageGeneration,
    /// The provider calls an MCP server at any address.
    RemoteMcp,
    /// The provider, or `LiteLLM`, fetches images and documents by address.
    RemoteMedia,
    /// The request refers to files of the provider's account by their ids.
    FileIds,
    /// The provider stores conversations, responses and prompts, or reads stored ones.
    StoredState,
    /// The provider writes the answer in the background, after the request has ended.
    Background,
    /// The provider runs containers, with skills in them.
    Containers,
    /// The request has tools of a type that this gateway does not know.
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

    /// Returns the name that grants the capability.
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

    /// Returns the values of `anthropic-beta` that belong to the capability. Anthropic refuses its
    /// tools and fields without them.
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

    /// Returns the capability that a tool of this type needs, or `None` if the tool runs at the
    /// client.
    ///
    /// Clients run functions, the shells and editors that providers describe, and the computers and
    /// browsers that models operate by requesting clicks. `tool_search` searches the request's own
    /// tools and reaches nothing else.
    pub(super) fn for_tool_type(kind: &str) -> Option<Self> {
        let runs_at_client = CLIENT_TOOL_TYPES.contains(&kind)
            || CLIENT_TOOL_PREFIXES.iter().any(|family| kind.starts_with(family));
        if runs_at_client {
            return None;
        }
        // Client types were excluded above, so the short prefix `computer` only matches types that
        // no client runs.
        let hosted = HOSTED_TOOL_PREFIXES.iter().find(|(family, _)| kind.starts_with(family));
        Some(hosted.map_or(Self::UnknownTools, |(_, capability)| *capability))
    }

    /// Returns the capability that a tool with this key needs. Gemini's tools are identified by
    /// their keys instead of a type, and `LiteLLM` passes these keys on whatever the type is.
    pub(super) fn for_tool_key(key: &str) -> Option<Self> {
        let hosted = HOSTED_TOOL_KEYS.iter().find(|(name, _)| *name == key);
        hosted.map(|(_, capability)| *capability)
    }
}

/// Complete types of tools that run at the client.
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

/// Prefixes of types that run at the client. Anthropic appends a date to each.
const CLIENT_TOOL_PREFIXES: &[&str] = &[
    "bash_2",
    "browser_toolset_2",
    "computer_2",
    "computer_toolset_2",
    "memory_2",
    "text_editor_2",
    "tool_search_tool_",
];

/// Prefixes of types that run at the provider. A prefix also covers later versions of a tool.
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

/// Keys of Gemini's tools, with the capability that each needs.
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
