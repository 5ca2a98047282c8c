//! Who is told of a refusal: the protocol that is spoken, and the family of clients where that is told by another status.
//!
//! What each family does at which status is measured ([the table](crate::manual::clients)). A family stands here only
//! where its protocol's usual status has it try again, and where it can be told from others by its headers.

use memchr::memmem;

use crate::gateway::upstream::headers::ClientHead;
use crate::llm::protocol::LlmProtocol;

/// Who is told of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Audience {
    pub protocol: LlmProtocol,
    pub family: ClientFamily,
}

/// Clients that obey the same statuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientFamily {
    /// All that stop at the protocol's own status.
    #[default]
    Usual,
    /// The Vercel AI SDK, and what is made with it.
    AiSdk,
    /// What calls by way of `LiteLLM`: aider, `OpenHands`, `DSPy`, smolagents' `LiteLLMModel`.
    Litellm,
}

impl Audience {
    /// The family by the headers of a request.
    pub fn of(protocol: LlmProtocol, head: &impl ClientHead) -> Self {
        let agent = head.values("user-agent").next().and_then(known_agent);
        let family = match (agent, protocol) {
            (Some(LITELLM), _) => ClientFamily::Litellm,
            // It uses OpenAI's SDK by its raw responses, under that SDK's name. Others that do so stop at 400 as well.
            (Some(OPENAI), _) if head.values(RAW_RESPONSE).next().is_some() => {
                ClientFamily::Litellm
            }
            (Some(AI_SDK), LlmProtocol::Responses) => ClientFamily::AiSdk,
            _ => ClientFamily::Usual,
        };
        Self { protocol, family }
    }
}

impl From<LlmProtocol> for Audience {
    fn from(protocol: LlmProtocol) -> Self {
        Self { protocol, family: ClientFamily::Usual }
    }
}

/// The part of a `user-agent` by which a family may be told.
fn known_agent(agent: &[u8]) -> Option<&'static str> {
    [LITELLM, OPENAI, AI_SDK]
        .into_iter()
        .find(|name| memmem::find(agent, name.as_bytes()).is_some())
}

/// LiteLLM's mark in the requests that it makes with OpenAI's SDK.
pub const RAW_RESPONSE: &str = "x-stainless-raw-response";

const LITELLM: &str = "litellm";
const OPENAI: &str = "OpenAI/Python";
const AI_SDK: &str = "ai-sdk";
