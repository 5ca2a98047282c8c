//! Which headers pass, and which are ours.
//!
//! **Invariant:** nothing a client sends can reach the upstream's authentication, attribution or
//! routing: a header passes only if it stands in a short list, everything else is written by us.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use serde::{Deserialize, Serialize};

use crate::base::header_lines::{HeaderLines, push_line};
use crate::base::rope::ByteRope;
use crate::gateway::run::{RequestId, RunIdentity};
use crate::gateway::upstream::redactor::SecretRedactor;
use crate::gateway::upstream::{self, UpstreamKind, UpstreamUrl};
use crate::llm::protocol::GatewayRoute;

/// What an operator may change about headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeaderConfig {
    /// Values of `anthropic-beta` that pass; others are taken out of the list. One list for all runs that have the same.
    #[serde(deserialize_with = "read_shared_list", serialize_with = "write_shared_list")]
    pub anthropic_beta: Arc<Vec<String>>,
    /// Values of `openai-beta` that pass.
    pub openai_beta: Vec<String>,
    /// Query strings that pass, whole; any other is dropped.
    pub queries: Vec<String>,
    /// Sent as `x-litellm-tags`.
    pub tags: Vec<String>,
    /// Whether the upstream is told of the run's trace, where the run is part of one.
    pub traceparent: bool,
    /// Whether the client may see `x-litellm-response-cost`.
    pub expose_response_cost: bool,
}

/// The headers that we set, the same for each call of a run, made once.
#[derive(Debug)]
pub struct InjectedHeaders {
    fields: HeaderMap,
    /// The same as text, for HTTP/1.1.
    text: Vec<u8>,
    kind: UpstreamKind,
    redactor: SecretRedactor,
}

/// The head of a client's request, as far as anything in it may go upstream.
pub trait ClientHead {
    fn path(&self) -> &str;

    fn query(&self) -> Option<&str>;

    /// The values of a field, in their order.
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]>;
}

/// The head of one request on its way upstream.
#[derive(Clone, Debug)]
pub struct UpstreamRequestHead {
    route: GatewayRoute,
    /// Of a route whose path ends with a name: the name.
    name: Option<Box<str>>,
    query: Option<Box<str>>,
    overwrites: Arc<InjectedHeaders>,
    /// What differs from call to call.
    fields: HeaderLines,
}

/// A run's identity that cannot be written as headers.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be sent as a header; use printable ASCII without line breaks")]
pub struct IdentityHeaderError {
    what: &'static str,
}

impl InjectedHeaders {
    /// # Errors
    /// A value that no header can hold.
    pub fn new(
        upstream: &upstream::UpstreamConfig,
        identity: &RunIdentity,
        config: &HeaderConfig,
    ) -> Result<Self, IdentityHeaderError> {
        let (key, kind) = (&upstream.api_key, upstream.kind);
        let mut fields = HeaderMap::new();
        let mut set = |name: &'static str, what, value: &str, is_secret| {
            let mut value =
                HeaderValue::from_str(value).map_err(|_| IdentityHeaderError { what })?;
            value.set_sensitive(is_secret);
            fields.insert(HeaderName::from_static(name), value);
            Ok(())
        };
        set("host", "the upstream's address", upstream.url.authority().as_str(), false)?;
        set("user-agent", "our name", USER_AGENT, false)?;
        set("accept-encoding", "the encoding", "identity", false)?;
        match kind {
            UpstreamKind::Anthropic => {
                set("x-api-key", "the upstream's key", key.expose_secret(), true)?;
            }
            _ if key.is_empty() => {}
            _ => set(
                "authorization",
                "the upstream's key",
                &format!("Bearer {}", key.expose_secret()),
                true,
            )?,
        }
        if kind == UpstreamKind::Litellm {
            set("x-litellm-end-user-id", "the billing account", &identity.account, false)?;
            set(
                "x-litellm-spend-logs-metadata",
                "the metadata",
                &identity.spend_logs_metadata(),
                false,
            )?;
            if !config.tags.is_empty() {
                set("x-litellm-tags", "a tag", &config.tags.join(","), false)?;
            }
        }
        let mut text = Vec::new();
        for (name, value) in &fields {
            push_line(&mut text, name.as_str(), value.as_bytes());
        }
        Ok(Self { fields, text, kind, redactor: SecretRedactor::new(key) })
    }

    /// Masks our credential in what the upstream says.
    pub fn redactor(&self) -> SecretRedactor {
        self.redactor.clone()
    }

    /// Takes the headers out of a response whose values hold our credential: their client must not have it, nor our logs.
    pub fn remove_reflected(&self, fields: &mut HeaderLines) {
        fields.retain(|_, value| !self.redactor.contains_secret(value));
    }
}

impl UpstreamRequestHead {
    /// The head for a call: our headers, and those of the client's that pass.
    pub fn new(
        route: GatewayRoute,
        request: &impl ClientHead,
        config: &HeaderConfig,
        overwrites: Arc<InjectedHeaders>,
        request_id: &RequestId,
    ) -> Self {
        let query =
            request.query().filter(|query| config.queries.iter().any(|listed| listed == query));
        let mut fields = forwarded_headers(request, config);
        if overwrites.kind == UpstreamKind::Litellm {
            fields.push(CALL_ID_HEADER, request_id.as_str().as_bytes());
        }
        if overwrites.kind == UpstreamKind::Anthropic && fields.get(ANTHROPIC_VERSION).is_none() {
            fields.push(ANTHROPIC_VERSION, OLDEST_ANTHROPIC_VERSION);
        }
        let name = match route {
            GatewayRoute::Model => request.path().strip_prefix(route.path()).map(Box::from),
            _ => None,
        };
        Self { route, name, query: query.map(Into::into), overwrites, fields }
    }

    /// Adds a header that is none of ours: a rule of the operator has seen to that.
    pub fn push(&mut self, name: &HeaderName, value: &HeaderValue) {
        self.fields.push(name.as_str(), value.as_bytes());
    }

    /// Says which span the call is.
    pub fn set_traceparent(&mut self, traceparent: &HeaderValue) {
        self.fields.push(TRACEPARENT_HEADER, traceparent.as_bytes());
    }

    /// The head as HTTP/1.1 text, with the length of the body that follows.
    pub fn to_http1_bytes(&self, body_length: u64) -> Vec<u8> {
        let mut text = Vec::new();
        self.write_http1(body_length, &mut text);
        text
    }

    /// Adds the head as HTTP/1.1 text, with the length of the body that follows.
    pub fn write_http1(&self, body_length: u64, text: &mut Vec<u8>) {
        let query = self.query.as_deref();
        let mut digits = itoa::Buffer::new();
        let (kind, length) = if self.route.method() == http::Method::POST {
            ("content-type: application/json\r\ncontent-length: ", digits.format(body_length))
        } else {
            ("", "")
        };
        let parts: [&[u8]; 12] = [
            self.route.method().as_str().as_bytes(),
            b" ",
            self.route.path().as_bytes(),
            self.name.as_deref().unwrap_or_default().as_bytes(),
            query.map_or(b"", |_| b"?"),
            query.unwrap_or_default().as_bytes(),
            b" HTTP/1.1\r\n",
            &self.overwrites.text,
            self.fields.as_bytes(),
            kind.as_bytes(),
            length.as_bytes(),
            if length.is_empty() { b"\r\n" } else { b"\r\n\r\n" },
        ];
        text.reserve(parts.iter().map(|part| part.len()).sum());
        for part in parts {
            text.extend_from_slice(part);
        }
    }

    /// The head as hyper wants it.
    pub fn to_hyper_request(
        &self,
        target: &UpstreamUrl,
        body_length: u64,
    ) -> Request<Option<ByteRope>> {
        let mut request = Request::new(None);
        *request.method_mut() = self.route.method().clone();
        *request.uri_mut() =
            target.route_uri(self.route.path(), self.name.as_deref(), self.query.as_deref());
        let fields = request.headers_mut();
        fields.clone_from(&self.overwrites.fields);
        fields.remove(header::HOST);
        fields.extend(self.fields.clone().into_headers());
        if self.route.method() == http::Method::POST {
            fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            fields.insert(header::CONTENT_LENGTH, HeaderValue::from(body_length));
        }
        request
    }
}

impl<B> ClientHead for Request<B> {
    fn path(&self) -> &str {
        self.uri().path()
    }

    fn query(&self) -> Option<&str> {
        self.uri().query()
    }

    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.headers().get_all(name).iter().map(HeaderValue::as_bytes)
    }
}

/// The client's headers that go upstream.
fn forwarded_headers(request: &impl ClientHead, config: &HeaderConfig) -> HeaderLines {
    let mut passed = HeaderLines::with_capacity(PASSED_BYTES);
    for name in [header::ACCEPT.as_str(), ANTHROPIC_VERSION] {
        if let Some(value) = request.values(name).next() {
            passed.push(name, value);
        }
    }
    for (name, listed) in
        [(ANTHROPIC_BETA, &*config.anthropic_beta), (OPENAI_BETA, &config.openai_beta)]
    {
        if let Some(value) = listed_values(request.values(name), listed) {
            passed.push(name, value.as_bytes());
        }
    }
    passed
}

/// The listed ones among the values of a header that may be repeated and holds comma lists.
fn listed_values<'a>(values: impl Iterator<Item = &'a [u8]>, listed: &[String]) -> Option<String> {
    let mut kept = String::new();
    // What is no ASCII text is nobody's value.
    let values =
        values.filter(|value| value.is_ascii()).filter_map(|value| str::from_utf8(value).ok());
    for value in values.flat_map(|value| value.split(',')).map(str::trim) {
        if listed.iter().any(|listed| listed == value) {
            kept.push_str(if kept.is_empty() { "" } else { "," });
            kept.push_str(value);
        }
    }
    (!kept.is_empty()).then_some(kept)
}

/// The name under which a header of the upstream's response is kept, if it is.
///
/// [`filter_for_client`] takes those out again that only the audit wants.
pub fn kept_header_name(name: &str) -> Option<&'static str> {
    KEPT_RESPONSE_HEADERS.into_iter().find(|kept| kept.eq_ignore_ascii_case(name))
}

/// What the upstream said about the call itself, for the records.
#[derive(Clone, Debug, Default)]
pub struct ResponseMetadata {
    pub call_id: Option<Box<str>>,
    pub response_cost: Option<Box<str>>,
}

/// Takes the facts out of a response's kept headers and leaves what the client may see.
pub fn filter_for_client(fields: &mut HeaderLines, config: &HeaderConfig) -> ResponseMetadata {
    let fact = |name: &str| {
        let value = fields.get(name).filter(|value| value.is_ascii())?;
        str::from_utf8(value).ok().map(Into::into)
    };
    let facts = ResponseMetadata {
        call_id: fact(CALL_ID_HEADER),
        response_cost: fact(RESPONSE_COST_HEADER),
    };
    if !config.expose_response_cost {
        fields.retain(|name, _| name != RESPONSE_COST_HEADER.as_bytes());
    }
    facts
}

fn write_shared_list<S: serde::Serializer>(
    list: &Arc<Vec<String>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    list.as_slice().serialize(serializer)
}

fn read_shared_list<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Arc<Vec<String>>, D::Error> {
    Vec::deserialize(deserializer).map(Arc::new)
}

impl Default for HeaderConfig {
    fn default() -> Self {
        let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
        Self {
            anthropic_beta: Arc::new(owned(&DEFAULT_BETAS)),
            openai_beta: vec!["responses=experimental".to_owned()],
            // Claude Code asks for `/v1/messages?beta=true`.
            queries: vec!["beta=true".to_owned()],
            tags: vec![],
            traceparent: true,
            expose_response_cost: false,
        }
    }
}

/// Betas that have the provider do nothing outside, keep nothing and choose no other model, account or speed: of those that
/// the Anthropic SDK 2.12 lists and Claude Code 2.1.330 knows. Betas of a capability pass where that is granted.
const DEFAULT_BETAS: [&str; 36] = [
    "advanced-tool-use-2025-11-20",
    "claude-code-20250219",
    "compact-2026-01-12",
    "compact-2026-09-04",
    "computer-use-2024-10-22",
    "computer-use-2025-01-24",
    "computer-use-2025-11-24",
    "context-1m-2025-08-07",
    "context-management-2025-06-27",
    "dev-full-thinking-2025-05-14",
    "effort-2025-11-24",
    "extended-cache-ttl-2025-04-11",
    "fine-grained-tool-streaming-2025-05-14",
    "inline-tools-2026-09-15",
    "interleaved-thinking-2025-05-14",
    "mid-conversation-output-config-2026-07-01",
    "mid-conversation-system-2026-04-07",
    "mid-conversation-system-clear-at-2026-08-21",
    "mid-conversation-tool-changes-2026-07-01",
    "model-context-window-exceeded-2025-08-26",
    "output-128k-2025-02-19",
    "output-300k-2026-03-24",
    "pdfs-2024-09-25",
    "per-turn-control-2026-07-01",
    "prompt-caching-2024-07-31",
    "prompt-caching-scope-2026-01-05",
    "redact-thinking-2026-02-12",
    "structured-outputs-2025-11-13",
    "structured-outputs-2025-12-15",
    "task-budgets-2026-03-13",
    "thinking-binding-controls-2026-08-01",
    "thinking-display-updates-2026-08-18",
    "thinking-token-count-2026-05-13",
    "token-counting-2024-11-01",
    "token-efficient-tools-2025-02-19",
    "tool-search-tool-2025-10-19",
];

/// Response headers that are kept; of these, [`RESPONSE_COST_HEADER`] stays inside.
const KEPT_RESPONSE_HEADERS: [&str; 10] = [
    "content-type",
    // We ask for none; an upstream that encodes all the same must say so to the client, too.
    "content-encoding",
    "cache-control",
    "retry-after",
    "retry-after-ms",
    "x-request-id",
    "request-id",
    "x-should-retry",
    "x-litellm-call-id",
    "x-litellm-response-cost",
];

const ANTHROPIC_VERSION: &str = "anthropic-version";
const ANTHROPIC_BETA: &str = "anthropic-beta";
const OPENAI_BETA: &str = "openai-beta";
const CALL_ID_HEADER: &str = "x-litellm-call-id";
const RESPONSE_COST_HEADER: &str = "x-litellm-response-cost";
const TRACEPARENT_HEADER: &str = "traceparent";

/// The API demands a version; this one has been valid from the start.
const OLDEST_ANTHROPIC_VERSION: &[u8] = b"2023-06-01";

/// LiteLLM turns a client's own `User-Agent` into tags and into changes of behaviour.
const USER_AGENT: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// The call's id and what passes, in one allocation in nearly every case.
const PASSED_BYTES: usize = 192;
