//! What a request asks for: the few fields of its body that change an answer.

use memchr::memmem;
use serde::Deserialize;
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
}

#[derive(Debug, Deserialize)]
struct StreamOptionsField {
    include_usage: Option<bool>,
}

/// One turn of a conversation, as far as it is text.
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

    /// Whether a chat stream shall end with a chunk of usage.
    pub(super) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage) == Some(true)
    }

    /// The most output tokens the request allows.
    pub(super) fn output_limit(&self) -> Option<u64> {
        self.max_completion_tokens.or(self.max_output_tokens).or(self.max_tokens)
    }

    /// Whether the conversation holds a tool's result. Looks for the three protocols' words without
    /// taking the conversation apart; that a user says them is a risk a fake can take.
    pub(super) fn has_tool_result(&self) -> bool {
        let words = ["\"tool\"", "\"tool_result\"", "\"function_call_output\""];
        [self.messages, self.input].into_iter().flatten().any(|conversation| {
            let bytes = conversation.get().as_bytes();
            words.iter().any(|word| memmem::find(bytes, word.as_bytes()).is_some())
        })
    }

    /// The text that the conversation ends with, of a user or a tool; none where it is no plain text.
    pub(super) fn last_text(&self) -> Option<String> {
        let conversation = self.messages.or(self.input)?;
        let mut turns: Vec<ChatTurn> = serde_json::from_str(conversation.get()).ok()?;
        let last = turns.pop()?;
        last.content.or(last.output).filter(|words| !words.is_empty())
    }

    /// The script of a model named `fake/SCRIPT`, over the provider's own; of any other, that.
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

/// A model name that begins so goes on as a script: names pass through any proxy unharmed.
const MODEL_PREFIX: &str = "fake/";
