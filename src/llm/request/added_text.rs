//! Counts the text that a provider adds to a request and bills as the request's input.
//!
//! A request with tools gets a preamble that explains how to call them, and each tool that the provider defines gets a
//! description that the request does not contain. A request of 300 bytes can so have 2,000 tokens of input. Hosted
//! tools and stored conversations add text of any length.

use super::capability::ProviderCapability;

/// The text that a provider adds to one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AddedText {
    /// True if the request has tools, or asks for an answer in a format. LiteLLM asks some providers for a format with
    /// a tool.
    has_preamble: bool,
    /// The tokens of the descriptions of provider-defined tools.
    descriptions: u32,
    /// True if the request lets the provider add a text of any length.
    is_open_ended: bool,
}

impl AddedText {
    /// Records that the provider explains its tools or a format to the model.
    pub(super) fn note_preamble(&mut self) {
        self.has_preamble = true;
    }

    /// Records a tool by its type.
    pub(super) fn note_tool_type(&mut self, kind: &[u8]) {
        if DESCRIBED_BY_CLIENT.contains(&kind) {
            return;
        }
        let known = DESCRIPTION_TOKENS.iter().find(|(prefix, _)| kind.starts_with(prefix));
        let tokens = known.map_or(MAX_DESCRIPTION_TOKENS, |(_, tokens)| *tokens);
        self.descriptions = self.descriptions.saturating_add(tokens);
    }

    /// Records a capability that the request uses.
    pub(super) fn note_capability(&mut self, capability: ProviderCapability) {
        self.is_open_ended |= adds_any_length(capability);
    }

    /// Returns the tokens that the provider adds in any case.
    pub(super) fn count_tokens(self) -> u64 {
        let preamble = if self.has_preamble { MAX_PREAMBLE_TOKENS } else { 0 };
        u64::from(preamble.saturating_add(self.descriptions))
    }

    /// Returns the most tokens that the provider can add.
    pub(super) fn max_tokens(self) -> u64 {
        let open = if self.is_open_ended { MAX_CONTEXT_TOKENS } else { 0 };
        self.count_tokens().saturating_add(open)
    }
}

/// Returns true if the provider itself decides how much text the capability adds to the input: pages, search results,
/// the tools of a server, the output of code, or an earlier conversation.
///
/// Images and files by address or id are counted with the media. A picture that the provider draws is output.
fn adds_any_length(capability: ProviderCapability) -> bool {
    match capability {
        ProviderCapability::WebSearch
        | ProviderCapability::WebFetch
        | ProviderCapability::CodeInterpreter
        | ProviderCapability::ComputerUse
        | ProviderCapability::FileSearch
        | ProviderCapability::RemoteMcp
        | ProviderCapability::StoredState
        | ProviderCapability::Containers
        | ProviderCapability::UnknownTools => true,
        ProviderCapability::ImageGeneration
        | ProviderCapability::RemoteMedia
        | ProviderCapability::FileIds
        | ProviderCapability::Background => false,
    }
}

/// The most tokens of the preamble for tools. Anthropic publishes 159 to 530, by the model and the tool choice
/// (<https://docs.anthropic.com/en/docs/tool-use-pricing-and-tokens>). The tokenizer of its newer models makes about 30 %
/// more tokens of a text (<https://platform.claude.com/docs/en/build-with-claude/token-counting>), and some models have
/// a longer preamble. No other provider publishes a number.
const MAX_PREAMBLE_TOKENS: u32 = 1_000;

/// The tokens of the descriptions of provider-defined tools, by a prefix of the type.
///
/// Anthropic publishes 245 for `bash`, 700 for `text_editor`, and for `computer` 735 beside up to 499 for its system
/// prompt (<https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview>, the pages of the tools). The numbers
/// here are a third larger, for newer tokenizers.
const DESCRIPTION_TOKENS: [(&[u8], u32); 3] =
    [(b"bash_", 330), (b"text_editor_", 940), (b"computer", 1_650)];

/// The tokens of a provider-defined tool without a published number. Our choice: more than the longest one with a number.
const MAX_DESCRIPTION_TOKENS: u32 = 2_000;

/// The types of tools whose whole description is in the request.
const DESCRIBED_BY_CLIENT: [&[u8]; 3] = [b"function", b"custom", b"namespace"];

/// The largest context of today's models, in tokens.
const MAX_CONTEXT_TOKENS: u64 = 1_000_000;
