//! The wire protocols and the routes that speak them.

/// A served route: one exact path, one method, one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GatewayRoute {
    ChatCompletions,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Models,
    /// One model of the list. The rest of the path after the route's prefix is the model's name.
    Model,
    Health,
    RunStatus,
}

/// The format of a route's bodies and error responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LlmProtocol {
    /// Chat completions, the older completions, and embeddings.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// Anthropic Messages and `count_tokens`.
    Messages,
}

impl GatewayRoute {
    pub const ALL: [Self; 10] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Embeddings,
        Self::Models,
        Self::Model,
        Self::Health,
        Self::RunStatus,
    ];

    /// Returns the route for a method and a raw path. The path is compared byte for byte, without
    /// decoding.
    pub fn from_request_line(method: &http::Method, path: &str) -> Option<Self> {
        if let Some(name) = path.strip_prefix(Self::Model.path()) {
            return (*method == http::Method::GET && is_model_path(name)).then_some(Self::Model);
        }
        Self::ALL.into_iter().find(|route| route.path() == path && route.method() == method)
    }

    /// Returns the route's path. [`GatewayRoute::Model`] has only a prefix, which the model's name
    /// follows.
    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Embeddings => "/v1/embeddings",
            Self::Models => "/v1/models",
            Self::Model => "/v1/models/",
            Self::Health => "/health",
            Self::RunStatus => "/run/status",
        }
    }

    pub fn method(self) -> &'static http::Method {
        match self {
            Self::Models | Self::Model | Self::Health | Self::RunStatus => &http::Method::GET,
            _ => &http::Method::POST,
        }
    }

    /// Returns the name used in audit records and metric labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Embeddings => "embeddings",
            Self::Models => "models",
            Self::Model => "model",
            Self::Health => "health",
            Self::RunStatus => "run_status",
        }
    }

    pub fn protocol(self) -> LlmProtocol {
        match self {
            Self::Responses => LlmProtocol::Responses,
            Self::Messages | Self::CountTokens => LlmProtocol::Messages,
            _ => LlmProtocol::Chat,
        }
    }

    /// Returns true if the provider charges tokens for a call.
    pub fn spends_tokens(self) -> bool {
        self.counts_as_turn() || self == Self::Embeddings
    }

    /// Returns true if a call counts as a turn, because the model generates text.
    pub fn counts_as_turn(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions | Self::Responses | Self::Messages)
    }
}

/// Returns true if an upstream's status says that a call failed on which the provider may have worked: a 5xx or 408.
/// LiteLLM answers 408 if its own timeout has ended the call.
pub fn is_failure_status(status: u16) -> bool {
    status >= 500 || status == 408
}

/// Returns true if every reader of the path takes the name literally.
fn is_model_path(name: &str) -> bool {
    // `%` is not in the set: no percent-encoding can hide a slash or a dot from this check.
    let is_plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'@' | b'/')
    };
    // An empty segment or a dot segment could be removed by a reader that normalizes paths.
    let is_step = |part: &str| matches!(part, "" | "." | "..");
    name.len() <= MAX_MODEL_BYTES && name.bytes().all(is_plain) && !name.split('/').any(is_step)
}

/// The maximum length of a model's name in a path, in bytes. The limit for a name in a body is the
/// same.
const MAX_MODEL_BYTES: usize = 256;
