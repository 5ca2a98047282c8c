//! The recipient of a rejection: the client's protocol, and the client's family if that family needs
//! another status.
//!
//! The reaction of each family to each status is measured ([the table](crate::manual::clients)). A
//! family has a variant only if both conditions hold: the protocol's usual status makes the family
//! retry, and request headers identify the family.

use crate::gateway::upstream::headers::{ClientField, ClientHead};
use crate::llm::protocol::LlmProtocol;

/// The recipient of a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Audience {
    pub protocol: LlmProtocol,
    pub family: ClientFamily,
}

/// Clients that obey the same statuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientFamily {
    /// Clients that stop at the protocol's own status.
    #[default]
    Standard,
    /// The Vercel AI SDK, and clients that are built with that SDK.
    AiSdk,
    /// Clients that call through `LiteLLM`: aider, `OpenHands`, `DSPy`, smolagents' `LiteLLMModel`.
    Litellm,
}

impl Audience {
    /// Detects the family from the headers of a request.
    pub fn of(protocol: LlmProtocol, head: &impl ClientHead) -> Self {
        let agent = head.values(ClientField::UserAgent).next().and_then(known_agent);
        let family = match (agent, protocol) {
            (Some(LITELLM), _) => ClientFamily::Litellm,
            // LiteLLM calls OpenAI's SDK through raw responses, under that SDK's name. Other clients of
            // raw responses stop at 400 as well.
            (Some(OPENAI), _) if head.values(ClientField::RawResponse).next().is_some() => {
                ClientFamily::Litellm
            }
            (Some(AI_SDK), LlmProtocol::Responses) => ClientFamily::AiSdk,
            _ => ClientFamily::Standard,
        };
        Self { protocol, family }
    }
}

impl From<LlmProtocol> for Audience {
    fn from(protocol: LlmProtocol) -> Self {
        Self { protocol, family: ClientFamily::Standard }
    }
}

/// Returns the part of a `user-agent` that may identify a family.
fn known_agent(agent: &[u8]) -> Option<&'static str> {
    // The order decides: LiteLLM's own name wins over the name of the SDK that LiteLLM uses.
    // The first letter comes first, because a search for a whole word costs more than these short texts are worth.
    let has_name = |name: &&str| {
        let name = name.as_bytes();
        memchr::memchr_iter(name[0], agent).any(|at| agent[at..].starts_with(name))
    };
    [LITELLM, OPENAI, AI_SDK].into_iter().find(has_name)
}

const LITELLM: &str = "litellm";
const OPENAI: &str = "OpenAI/Python";
const AI_SDK: &str = "ai-sdk";
