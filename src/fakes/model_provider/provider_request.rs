//! The fields of a request's body that change an answer.

use memchr::memmem;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::script::{self, ProviderScript};

/// A request's body, of any protocol.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ProviderRequest<'a> {
    pub(super) model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptionsField>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    pub(super) encoding_format: Option<String>,
    pub(super) dimensions: Option<usize>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) input: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
struct StreamOptionsField {
    include_usage: Option<bool>,
}

/// The text of one message of a conversation.
#[derive(Debug, Deserialize)]
struct ChatTurn {
    content: Option<String>,
    output: Option<String>,
}

impl<'a> ProviderRequest<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(body)
    }

    pub(super) fn is_streaming(&self) -> bool {
        self.stream == Some(true)
    }

    /// Returns true if a chat stream is to end with a chunk of usage.
    pub(super) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage) == Some(true)
    }

    /// Returns the request's limit of output tokens.
    pub(super) fn output_limit(&self) -> Option<u64> {
        // Each protocol has its own name for the limit.
        self.max_completion_tokens.or(self.max_output_tokens).or(self.max_tokens)
    }

    /// Returns true if the request has a tool of this name, or `NAMESPACE/NAME`.
    pub(super) fn offers_tool(&self, name: &str) -> bool {
        let tools = self.tools.and_then(|tools| serde_json::from_str::<Value>(tools.get()).ok());
        let mut tools = tools.as_ref().and_then(Value::as_array).into_iter().flatten();
        match split_namespace(name) {
            // Chat completions put the name into the function.
            (None, name) => {
                tools.any(|tool| tool["name"] == name || tool["function"]["name"] == name)
            }
            (Some(namespace), name) => {
                let inner = tools.filter(|tool| tool["name"] == namespace);
                inner
                    .filter_map(|tool| tool["tools"].as_array())
                    .flatten()
                    .any(|tool| tool["name"] == name)
            }
        }
    }

    /// Returns true if the conversation contains a tool's result. The search looks for the protocols' words in the raw
    /// JSON. A user's text may contain the same words, which is acceptable for a fake provider.
    pub(super) fn has_tool_result(&self) -> bool {
        let words = ["\"tool\"", "\"tool_result\"", "\"function_call_output\""];
        [self.messages, self.input].into_iter().flatten().any(|conversation| {
            let bytes = conversation.get().as_bytes();
            words.iter().any(|word| memmem::find(bytes, word.as_bytes()).is_some())
        })
    }

    /// Returns the text of the last message, of a user or a tool, or `None` if that message is not plain text.
    pub(super) fn last_text(&self) -> Option<String> {
        let conversation = self.messages.or(self.input)?;
        // A conversation with structured content does not parse here, and has no plain text.
        let mut turns: Vec<ChatTurn> = serde_json::from_str(conversation.get()).ok()?;
        let last = turns.pop()?;
        last.content.or(last.output).filter(|words| !words.is_empty())
    }

    /// Returns the script of a model named `fake/SCRIPT`, based on the provider's script. Other models use the
    /// provider's script.
    pub(super) fn resolve_script(
        &self,
        default: &ProviderScript,
    ) -> Result<ProviderScript, script::ScriptError> {
        match self.model.as_deref().and_then(|model| model.strip_prefix(MODEL_PREFIX)) {
            Some(text) => default.with_overrides(text),
            None => Ok(default.clone()),
        }
    }
}

/// Splits the name of a tool in a namespace. Codex puts the tools of each server of MCP into a namespace.
pub(super) fn split_namespace(tool: &str) -> (Option<&str>, &str) {
    tool.split_once('/').map_or((None, tool), |(namespace, name)| (Some(namespace), name))
}

/// The prefix of a model name that contains a script. Every proxy passes model names on unchanged.
const MODEL_PREFIX: &str = "fake/";
