//! Checks the names of models: only names that every reader takes for one model are sent upstream.
//!
//! LiteLLM calls every part of a name with commas and cuts blanks off. It also takes some names for
//! an address, an agent or a pattern. No such name is a model that the operator allowed for the
//! run, and the price table contains none of them.

use std::cell::RefCell;
use std::sync::Arc;

use super::capability::ProviderCapability;
use crate::base::hidden_characters::is_hidden;

/// The rule for a model's name, phrased to follow "must be" in an error.
pub const MODEL_NAME_RULE: &str = "the name of one model: 1 to 256 bytes, without a comma, \
     `*`, `://`, control or invisible characters, and without blanks at its ends";

/// The facts that a model's name states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelNameFacts {
    /// The result of [`is_model_name`].
    pub(super) is_valid: bool,
    /// The result of [`capability_of_model`].
    pub(super) capability: Option<ProviderCapability>,
}

thread_local! {
    /// The name of the last call on this thread, and its facts. Most calls of a thread name one model.
    static LAST_NAME: RefCell<(Arc<str>, ModelNameFacts)> =
        RefCell::new((Arc::default(), ModelNameFacts::read_name("")));
}

impl ModelNameFacts {
    /// Returns a name and its facts, from memory if the thread's last call has the same name.
    pub(super) fn of_name(name: &str) -> (Arc<str>, Self) {
        LAST_NAME.with_borrow_mut(|last| {
            if *last.0 != *name {
                *last = (name.into(), Self::read_name(name));
            }
            last.clone()
        })
    }

    fn read_name(name: &str) -> Self {
        Self { is_valid: is_model_name(name), capability: capability_of_model(name) }
    }
}

/// Returns true if every reader takes `name` for the name of one model.
///
/// ```
/// # use cogni_gateway::llm::request::is_model_name;
/// assert!(is_model_name("openrouter/qwen/qwen3-coder:free"));
/// assert!(!is_model_name("gpt-5,gpt-5-mini"), "LiteLLM calls both");
/// assert!(!is_model_name("gpt\u{200b}-5"), "it looks like another name");
/// ```
pub fn is_model_name(name: &str) -> bool {
    // `..b' '` covers every ASCII control character; the blank itself is allowed inside a name.
    let is_odd = |byte: &u8| matches!(byte, b',' | b'*' | ..b' ' | 0x7f);
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_MODEL_BYTES || bytes.iter().any(is_odd) {
        return false;
    }
    let is_address = memchr::memchr_iter(b':', bytes).any(|at| bytes[at..].starts_with(b"://"));
    // ASCII control characters are excluded already. Only other scripts need the slower checks by
    // character, for C1 controls such as U+0085, for characters that a reader does not see, and for their blanks.
    let is_plain = if name.is_ascii() {
        !name.starts_with(' ') && !name.ends_with(' ')
    } else {
        !name.contains(is_hidden) && name.trim().len() == name.len()
    };
    is_plain && !is_address
}

/// Returns the capability that a model uses without a tool in the request, judged by the model's
/// name. Returns `None` for a model that only generates text.
pub fn capability_of_model(name: &str) -> Option<ProviderCapability> {
    let bytes = name.as_bytes();
    // Words are compared whole, so `search` does not match `NousResearch`. The first letter tells most words apart.
    let is_any = |words: &[&str], initials: u32, word: &[u8]| {
        word.first().is_some_and(|first| initials & initial_bit(*first) != 0)
            && words.iter().any(|own| own.as_bytes().eq_ignore_ascii_case(word))
    };
    let has_part = |part: &&str| {
        let (part, first) = (part.as_bytes(), part.as_bytes()[0]);
        let is_here = |at: usize| {
            bytes[at..].get(..part.len()).is_some_and(|text| text.eq_ignore_ascii_case(part))
        };
        memchr::memchr2_iter(first, first.to_ascii_uppercase(), bytes).any(is_here)
    };
    let mut words = bytes.split(|letter| !letter.is_ascii_alphanumeric());
    if words.any(|word| is_any(&SEARCH_WORDS, SEARCH_INITIALS, word))
        || SEARCH_PARTS.iter().any(has_part)
    {
        return Some(ProviderCapability::WebSearch);
    }
    // Agent names count only as path segments before the last slash: `x-ai/grok-4.20-multi-agent`
    // is an ordinary model.
    let path = &bytes[..memchr::memrchr(b'/', bytes)?];
    let mut segments = path.split(|letter| *letter == b'/');
    let is_agent = segments.any(|segment| is_any(&AGENT_SEGMENTS, AGENT_INITIALS, segment));
    is_agent.then_some(ProviderCapability::UnknownTools)
}

/// Returns a set with a bit for the first letter of each word.
const fn initials(words: &[&str]) -> u32 {
    let (mut letters, mut at) = (0, 0);
    while at < words.len() {
        letters |= initial_bit(words[at].as_bytes()[0]);
        at += 1;
    }
    letters
}

/// Returns the bit of a letter, in either case. Other characters share these bits, so a bit is a hint and no proof.
const fn initial_bit(first: u8) -> u32 {
    1 << (first & 31)
}

/// The maximum length of a model's name, in bytes. Our choice: the longest names in use, ARNs, are
/// under 150 bytes.
pub(super) const MAX_MODEL_BYTES: usize = 256;

/// Words in the names of models that search the web for each answer: Perplexity's models, OpenAI's
/// `-search-preview` and `-search-api`, Groq's `compound`, `OpenRouter`'s `:online`, and models of
/// other providers.
const SEARCH_WORDS: [&str; 9] = [
    "browsing",
    "compound",
    "deepsearch",
    "online",
    "perplexity",
    "pplx",
    "search",
    "sonar",
    "websearch",
];

const SEARCH_INITIALS: u32 = initials(&SEARCH_WORDS);
const AGENT_INITIALS: u32 = initials(&AGENT_SEGMENTS);

/// Substrings of the names of models that search the web.
const SEARCH_PARTS: [&str; 1] = ["deep-research"];

/// Path segments of names that LiteLLM takes for an agent with its own tools.
const AGENT_SEGMENTS: [&str; 11] = [
    "a2a",
    "agent",
    "agent_engine",
    "agentcore",
    "agents",
    "databricks_agent",
    "langflow",
    "langgraph",
    "litellm_agent",
    "manus",
    "ragflow",
];

#[cfg(test)]
mod tests {
    use super::{ModelNameFacts, ProviderCapability, capability_of_model, is_model_name};

    /// The facts of the last name are those of no other name.
    #[test]
    fn a_name_that_is_remembered_has_its_own_facts() {
        let names = ["gpt-5", "gpt-5", "", "sonar", "a,b", "gpt-5", "gpt-5-search-api", "a2a/x"];
        for name in names {
            let (is_valid, capability) = (is_model_name(name), capability_of_model(name));
            let facts = ModelNameFacts { is_valid, capability };
            assert_eq!(ModelNameFacts::of_name(name), (name.into(), facts), "{name}");
        }
    }

    #[test]
    fn a_name_is_the_name_of_one_model() {
        for name in [
            "gpt-5",
            "m",
            "bedrock/arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-v1:0",
            "claude-3@20240229",
            "ft:gpt-4o:org::id",
            "my model",
            "modèle",
        ] {
            assert!(is_model_name(name), "{name}");
        }
        for name in [
            "",
            "a,b",
            "a,",
            "a\n",
            "a\u{0}b",
            "a\u{7f}",
            "a\u{85}b",
            " a",
            "a ",
            "a\u{a0}",
            "\u{2028}a",
            "*",
            "openai/*",
            "http://a.example",
            "huggingface/https://a.example/v1",
            &"a".repeat(257),
        ] {
            assert!(!is_model_name(name), "{name:?}");
        }
    }

    #[test]
    fn a_model_that_acts_by_itself_says_so_in_its_name() {
        for name in [
            "openai/gpt-5:online",
            "gpt-4o-search-preview-2025-03-11",
            "gpt-5-search-api",
            "perplexity/openai/gpt-5.2",
            "sonar",
            "Sonar-Pro",
            "groq/compound-mini",
            "llama-3.1-sonar-small-128k-online",
            "gemini/deep-research-pro-preview-12-2025",
            "aihubmix/gemini-3-flash-preview-search",
        ] {
            assert_eq!(capability_of_model(name), Some(ProviderCapability::WebSearch), "{name}");
        }
        for name in
            ["a2a/helper", "litellm_agent/gpt-5", "bedrock/agentcore/arn:aws", "azure_ai/agents/x"]
        {
            assert_eq!(capability_of_model(name), Some(ProviderCapability::UnknownTools), "{name}");
        }
        for name in [
            "gpt-5",
            "NousResearch/Hermes-4-70B",
            "x-ai/grok-4.20-multi-agent",
            "agent",
            "firesearch-ocr-v6",
        ] {
            assert_eq!(capability_of_model(name), None, "{name}");
        }
    }
}
