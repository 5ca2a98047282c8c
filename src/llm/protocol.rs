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
    /// One model of the list; its name is the rest of the path.
    Model,
    Health,
    RunStatus,
}

/// The shape a route's bodies and errors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LlmProtocol {
    /// Chat completions, and the older completions and embeddings beside it.
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

    /// The route for a method and a raw path, compared byte for byte: nothing is decoded first.
    pub fn from_request_line(method: &http::Method, path: &str) -> Option<Self> {
        if let Some(name) = path.strip_prefix(Self::Model.path()) {
            return (*method == http::Method::GET && is_model_path(name)).then_some(Self::Model);
        }
        Self::ALL.into_iter().find(|route| route.path() == path && route.method() == method)
    }

    /// The path, whole but for [`GatewayRoute::Model`]: behind that stands a name.
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

    /// The name used in audit records and metric labels.
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

    /// Whether the provider charges tokens for a call.
    pub fn spends_tokens(self) -> bool {
        self.counts_as_turn() || self == Self::Embeddings
    }

    /// Whether a call counts as a turn: the model generates.
    pub fn counts_as_turn(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions | Self::Responses | Self::Messages)
    }
}

/// Whether a model's name can stand in a path without being read in another way there.
fn is_model_path(name: &str) -> bool {
    let is_plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'@' | b'/')
    };
    let is_step = |part: &str| matches!(part, "" | "." | "..");
    name.len() <= MAX_MODEL_BYTES && name.bytes().all(is_plain) && !name.split('/').any(is_step)
}

/// As long as the name of a model in a body.
const MAX_MODEL_BYTES: usize = 256;
