//! The findings of a body's scan.

use super::json_context::SchemaAddresses;
use crate::llm::request::added_text::AddedText;
use crate::llm::request::capability::{CapabilitySet, ProviderCapability};
use crate::llm::request::media::RequestMedia;

/// A capability that a body needs, and the position of the need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::llm::request) struct RequiredCapability {
    pub(in crate::llm::request) capability: ProviderCapability,
    /// The top-level field that contains the need.
    pub(in crate::llm::request) field: &'static str,
    /// The tool's type, or the key that needs the capability; safe to print.
    pub(in crate::llm::request) detail: Box<str>,
}

/// The findings of a body's scan.
#[derive(Clone, Debug, Default)]
pub(in crate::llm::request) struct BodyFindings {
    /// The capabilities that the body's parts and tools need, each once.
    pub(in crate::llm::request) needs: Vec<RequiredCapability>,
    pub(in crate::llm::request) media: RequestMedia,
    pub(in crate::llm::request) added: AddedText,
    /// The number of numbers in arrays. A prompt may be a list of token numbers.
    pub(in crate::llm::request) numbers: u64,
    /// True if the provider is asked to read the conversation once more in order to shorten it.
    pub(in crate::llm::request) is_compacted: bool,
    /// True if the body asks for a cache lifetime that no provider charges with the call.
    pub(in crate::llm::request) has_long_cache: bool,
    /// The number of texts to embed that begin like addresses. The model decides whether they are fetched.
    pub(in crate::llm::request) embedded_addresses: u64,
    pub(in crate::llm::request) schema_addresses: SchemaAddresses,
    /// The offset of a web search tool that states whether it may reach outside. Codex sends such a tool and states
    /// `false`.
    pub(in crate::llm::request) modest_search: Option<u64>,
}

impl BodyFindings {
    /// Counts the texts that begin like addresses as fetched by the provider.
    pub(in crate::llm::request) fn count_embedded_as_fetched(&mut self) {
        self.media.count_fetched(self.embedded_addresses);
        if self.needs.iter().all(|need| need.capability != ProviderCapability::RemoteMedia) {
            let (capability, field) = (ProviderCapability::RemoteMedia, "input");
            self.needs.push(RequiredCapability { capability, field, detail: "url".into() });
        }
    }

    /// Records the text that the provider adds for the capabilities of the body's parts, of its fields and of its model.
    pub(in crate::llm::request) fn note_added_text(
        &mut self,
        of_fields: &CapabilitySet,
        of_model: Option<ProviderCapability>,
    ) {
        let of_parts = self.needs.iter().map(|need| need.capability);
        for capability in of_parts.chain(of_fields.iter().copied()).chain(of_model) {
            self.added.note_capability(capability);
        }
    }
}
