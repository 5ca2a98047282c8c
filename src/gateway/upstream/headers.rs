//! The headers of a call in both directions: the client's headers that pass, and the headers that the gateway sets.
//!
//! **Invariant:** nothing a client sends can reach the upstream's authentication, attribution or routing. A client's
//! header passes only if a short list names the header. The gateway writes all other headers.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use serde::{Deserialize, Serialize};

use crate::base::header_lines::{HeaderLines, is_field_name, push_line};
use crate::base::rope::ByteRope;
use crate::base::secret_redactor::SecretRedactor;
use crate::base::trace_context::TraceContext;
use crate::gateway::run::{RequestId, RunIdentity};
use crate::gateway::upstream::{self, UpstreamKind, UpstreamUrl};
use crate::llm::protocol::GatewayRoute;
use crate::llm::response::ResponseFormat;

/// The operator's settings for headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeaderConfig {
    /// The values of `anthropic-beta` that pass. Other values are removed from the header. Runs with equal lists share
    /// one list.
    #[serde(deserialize_with = "read_shared_list", serialize_with = "write_shared_list")]
    pub anthropic_beta: Arc<Vec<String>>,
    /// The values of `openai-beta` that pass.
    pub openai_beta: Vec<String>,
    /// The query strings that pass. A query is compared as a whole; any other query is dropped.
    pub queries: Vec<String>,
    /// The tags that the gateway sends as `x-litellm-tags`.
    pub tags: Vec<String>,
    /// A switch: true sends the run's trace to the upstream, provided that the run belongs to a trace.
    pub traceparent: bool,
    /// A switch: true lets the client see `x-litellm-response-cost`.
    pub expose_response_cost: bool,
}

/// The headers that the gateway sets. They are equal for each call of a run, so the run makes them once.
#[derive(Debug)]
pub struct InjectedHeaders {
    fields: HeaderMap,
    /// The headers of `fields` as text, for HTTP/1.1.
    text: Vec<u8>,
    kind: UpstreamKind,
    redactor: SecretRedactor,
}

/// The parts of a client's request head that may go upstream.
pub trait ClientHead {
    fn path(&self) -> &str;

    fn query(&self) -> Option<&str>;

    /// Returns the values of a field, in the order of the request.
    fn values(&self, field: ClientField) -> impl Iterator<Item = &[u8]>;
}

/// A field of a client's request that the pipeline reads. It reads no other field of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientField {
    Accept,
    AnthropicVersion,
    AnthropicBeta,
    OpenaiBeta,
    /// The header that LiteLLM sends in requests that it makes with OpenAI's SDK.
    RawResponse,
    UserAgent,
}

/// The head of one request on its way upstream.
#[derive(Clone, Debug)]
pub struct UpstreamRequestHead {
    route: GatewayRoute,
    /// The name at the end of the path, for a route whose path ends with a name.
    name: Option<Box<str>>,
    query: Option<Box<str>>,
    injected_headers: Arc<InjectedHeaders>,
    /// The header lines that differ from call to call.
    fields: HeaderLines,
}

/// An error for a part of a run's identity that cannot be written as a header.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be sent as a header; use printable ASCII without line breaks")]
pub struct IdentityHeaderError {
    what: &'static str,
}

impl InjectedHeaders {
    /// Makes the headers of a run from its identity and the operator's settings.
    ///
    /// # Errors
    /// Returns an error if a value cannot be a header value.
    pub fn new(
        upstream: &upstream::UpstreamConfig,
        identity: &RunIdentity,
        config: &HeaderConfig,
    ) -> Result<Self, IdentityHeaderError> {
        let (key, kind) = (&upstream.api_key, upstream.kind);
        let mut fields = HeaderMap::new();
        let mut set = |name: &'static str, described_value, value: &str, is_secret| {
            let mut value = HeaderValue::from_str(value)
                .map_err(|_| IdentityHeaderError { what: described_value })?;
            // A sensitive value never appears in debug output, and HTTP/2 does not index it.
            value.set_sensitive(is_secret);
            fields.insert(HeaderName::from_static(name), value);
            Ok(())
        };
        set("host", "the upstream's address", upstream.url.authority().as_str(), false)?;
        set("user-agent", "the gateway's name", USER_AGENT, false)?;
        // The gateway reads usage from the body, so the upstream must not compress it.
        set("accept-encoding", "the encoding", "identity", false)?;
        match kind {
            UpstreamKind::Anthropic => {
                set("x-api-key", "the upstream's key", key.expose_secret(), true)?;
            }
            // An upstream without a key gets no header at all, instead of an empty credential.
            _ if key.is_empty() => {}
            _ => set(
                "authorization",
                "the upstream's key",
                &format!("Bearer {}", key.expose_secret()),
                true,
            )?,
        }
        // Only LiteLLM knows these headers. Another provider would receive the account and metadata for no reason.
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
        // The text is made once, so that an HTTP/1.1 call copies it without formatting.
        let mut text = Vec::new();
        for (name, value) in &fields {
            push_line(&mut text, name.as_str(), value.as_bytes());
        }
        Ok(Self { fields, text, kind, redactor: SecretRedactor::new(key) })
    }

    /// Returns a redactor that masks the gateway's credential in a response body.
    pub fn redactor(&self) -> SecretRedactor {
        self.redactor.clone()
    }

    /// Reads the headers of a response that the gateway needs itself, and removes those that the client may not see: the
    /// cost, unless the operator's settings expose it, and each header that contains the gateway's credential. The
    /// records may not see the credential either.
    pub fn filter_response(
        &self,
        fields: &mut HeaderLines,
        config: &HeaderConfig,
    ) -> ResponseMetadata {
        let is_hidden =
            |name: &[u8]| name == RESPONSE_COST_HEADER.as_bytes() && !config.expose_response_cost;
        let (mut media_type, mut encoding, mut call_id, mut cost) = (None, None, None, None);
        let (mut is_encoded, mut has_removed) = (false, false);
        // One search of all lines: hardly any head contains a credential.
        let may_contain = self.redactor.contains_secret(fields.as_bytes());
        for (name, value) in fields.iter() {
            // The format is that of the response as it came, whatever the client sees of the header.
            if name == b"content-type" {
                media_type.get_or_insert(value);
            } else if name == b"content-encoding" {
                encoding.get_or_insert(value);
                is_encoded |= !value.eq_ignore_ascii_case(b"identity");
            }
            if may_contain && self.redactor.contains_secret(value) {
                has_removed = true;
                continue;
            }
            if name == CALL_ID_HEADER.as_bytes() {
                call_id.get_or_insert(value);
            } else if name == RESPONSE_COST_HEADER.as_bytes() {
                cost.get_or_insert(value);
            }
            has_removed |= is_hidden(name);
        }
        let text = |value: Option<&[u8]>| {
            str::from_utf8(value.filter(|value| value.is_ascii())?).ok().map(Into::into)
        };
        let format = ResponseFormat::from_headers(media_type, encoding);
        let (call_id, response_cost) = (text(call_id), text(cost));
        if has_removed {
            fields.retain(|name, value| !is_hidden(name) && !self.redactor.contains_secret(value));
        }
        ResponseMetadata { format, is_encoded, call_id, response_cost }
    }
}

impl UpstreamRequestHead {
    /// Makes the head for one call from the gateway's headers and the client's headers that pass.
    pub fn new(
        route: GatewayRoute,
        request: &impl ClientHead,
        config: &HeaderConfig,
        injected_headers: Arc<InjectedHeaders>,
        request_id: &RequestId,
    ) -> Self {
        // The whole query must be listed: a single unknown parameter could change the routing of the call.
        let query =
            request.query().filter(|query| config.queries.iter().any(|listed| listed == query));
        let mut fields = forwarded_headers(request, config);
        // The request id becomes LiteLLM's call id, so that the spend logs and the audit log can be joined.
        if injected_headers.kind == UpstreamKind::Litellm {
            fields.push(CALL_ID_HEADER, request_id.as_bytes());
        }
        // The API rejects a call without a version, and some clients send none.
        if injected_headers.kind == UpstreamKind::Anthropic
            && fields.get(ANTHROPIC_VERSION).is_none()
        {
            fields.push(ANTHROPIC_VERSION, OLDEST_ANTHROPIC_VERSION);
        }
        let name = match route {
            GatewayRoute::Model => request.path().strip_prefix(route.path()).map(Box::from),
            _ => None,
        };
        Self { route, name, query: query.map(Into::into), injected_headers, fields }
    }

    /// Adds a header that the gateway does not set. An operator's rule has checked the name and the value.
    pub fn push(&mut self, name: &HeaderName, value: &HeaderValue) {
        self.fields.push(name.as_str(), value.as_bytes());
    }

    /// Adds the `traceparent` header, which names the span of this call in the run's trace, unless the operator's
    /// settings leave the header out.
    pub fn set_traceparent(
        &mut self,
        config: &HeaderConfig,
        trace: &TraceContext,
        request_id: &RequestId,
    ) {
        if config.traceparent {
            let traceparent = trace.traceparent(&request_id.span_id());
            self.fields.push(TRACEPARENT_HEADER, traceparent.as_bytes());
        }
    }

    /// Returns the head as HTTP/1.1 text, with the length of the body that follows.
    pub fn to_http1_bytes(&self, body_length: u64) -> Vec<u8> {
        let mut text = Vec::new();
        self.write_http1(body_length, &mut text);
        text
    }

    /// Appends the head as HTTP/1.1 text, with the length of the body that follows.
    pub fn write_http1(&self, body_length: u64, text: &mut Vec<u8>) {
        let query = self.query.as_deref();
        let mut digits = itoa::Buffer::new();
        // The gateway writes both fields itself. The client's `content-length` is wrong after any edit of the body.
        let (kind, length) = if self.route.method() == http::Method::POST {
            ("content-type: application/json\r\ncontent-length: ", digits.format(body_length))
        } else {
            ("", "")
        };
        // Each line of `injected_headers.text` and `fields` ends with a line break. The last part ends the head with an empty
        // line.
        let parts: [&[u8]; 12] = [
            self.route.method().as_str().as_bytes(),
            b" ",
            self.route.path().as_bytes(),
            self.name.as_deref().unwrap_or_default().as_bytes(),
            query.map_or(b"", |_| b"?"),
            query.unwrap_or_default().as_bytes(),
            b" HTTP/1.1\r\n",
            &self.injected_headers.text,
            self.fields.as_bytes(),
            kind.as_bytes(),
            length.as_bytes(),
            if length.is_empty() { b"\r\n" } else { b"\r\n\r\n" },
        ];
        // One allocation at most: the parts are summed before they are copied.
        text.reserve(parts.iter().map(|part| part.len()).sum());
        for part in parts {
            text.extend_from_slice(part);
        }
    }

    /// Returns the head as hyper expects it.
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
        fields.clone_from(&self.injected_headers.fields);
        // hyper writes the host from the URI, as `host` or as `:authority`.
        fields.remove(header::HOST);
        fields.extend(self.fields.clone().into_headers());
        if self.route.method() == http::Method::POST {
            fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            fields.insert(header::CONTENT_LENGTH, HeaderValue::from(body_length));
        }
        request
    }
}

impl ClientField {
    pub const ALL: [Self; 6] = [
        Self::Accept,
        Self::AnthropicVersion,
        Self::AnthropicBeta,
        Self::OpenaiBeta,
        Self::RawResponse,
        Self::UserAgent,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::AnthropicVersion => ANTHROPIC_VERSION,
            Self::AnthropicBeta => "anthropic-beta",
            Self::OpenaiBeta => "openai-beta",
            Self::RawResponse => "x-stainless-raw-response",
            Self::UserAgent => "user-agent",
        }
    }
}

impl<B> ClientHead for Request<B> {
    fn path(&self) -> &str {
        self.uri().path()
    }

    fn query(&self) -> Option<&str> {
        self.uri().query()
    }

    fn values(&self, field: ClientField) -> impl Iterator<Item = &[u8]> {
        self.headers().get_all(field.name()).iter().map(HeaderValue::as_bytes)
    }
}

/// Returns the client's headers that go upstream.
fn forwarded_headers(request: &impl ClientHead, config: &HeaderConfig) -> HeaderLines {
    let mut passed = HeaderLines::with_capacity(PASSED_BYTES);
    // `accept` and the API version have no effect on account or routing, so their values pass unchecked.
    for field in [ClientField::Accept, ClientField::AnthropicVersion] {
        if let Some(value) = request.values(field).next() {
            passed.push(field.name(), value);
        }
    }
    // A beta header can switch on features, so only listed values pass.
    for (field, listed) in [
        (ClientField::AnthropicBeta, &*config.anthropic_beta),
        (ClientField::OpenaiBeta, &config.openai_beta),
    ] {
        if let Some(value) = listed_values(request.values(field), listed) {
            passed.push(field.name(), value.as_bytes());
        }
    }
    passed
}

/// Returns the listed values of a header that may occur several times and may hold comma lists.
fn listed_values<'a>(values: impl Iterator<Item = &'a [u8]>, listed: &[String]) -> Option<String> {
    let mut joined = String::new();
    // A beta value is ASCII text. Other bytes are dropped.
    let values =
        values.filter(|value| value.is_ascii()).filter_map(|value| str::from_utf8(value).ok());
    for value in values.flat_map(|value| value.split(',')).map(str::trim) {
        if listed.iter().any(|listed| listed == value) {
            joined.push_str(if joined.is_empty() { "" } else { "," });
            joined.push_str(value);
        }
    }
    // A header without any listed value is not sent at all.
    (!joined.is_empty()).then_some(joined)
}

/// Returns the name under which a response header of the upstream is kept; `None` if the header is dropped.
///
/// [`InjectedHeaders::filter_response`] removes the headers again that only the audit log needs.
pub fn kept_header_name(name: &str) -> Option<&'static str> {
    KEPT_RESPONSE_HEADERS.into_iter().find(|known| is_field_name(name, known))
}

/// The facts that the headers of a response state.
#[derive(Clone, Debug)]
pub struct ResponseMetadata {
    pub format: ResponseFormat,
    /// True if the body is encoded. The gateway sends `accept-encoding: identity`, so a body must not be encoded.
    pub is_encoded: bool,
    /// The upstream's id of the call, for the records.
    pub call_id: Option<Box<str>>,
    /// The upstream's statement of the cost, for the records.
    pub response_cost: Option<Box<str>>,
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
            // Claude Code calls `/v1/messages?beta=true`.
            queries: vec!["beta=true".to_owned()],
            tags: vec![],
            traceparent: true,
            expose_response_cost: false,
        }
    }
}

/// The `anthropic-beta` values that pass by default, out of those that the Anthropic SDK 2.12 lists and Claude Code
/// 2.1.330 knows. With these values the provider does nothing outside, stores nothing, and chooses no other model,
/// account or speed. Betas of a capability pass where the operator has granted the capability.
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

/// The response headers that are kept. [`RESPONSE_COST_HEADER`] stays inside the gateway.
const KEPT_RESPONSE_HEADERS: [&str; 10] = [
    "content-type",
    // The gateway asks for no encoding. An upstream that encodes nevertheless must tell the client so.
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
const CALL_ID_HEADER: &str = "x-litellm-call-id";
const RESPONSE_COST_HEADER: &str = "x-litellm-response-cost";
const TRACEPARENT_HEADER: &str = "traceparent";

/// The version that the gateway sends if the client sends none. The API demands a version, and this version has been
/// valid from the start.
const OLDEST_ANTHROPIC_VERSION: &[u8] = b"2023-06-01";

/// The gateway's `User-Agent`. The client's own would not pass, because LiteLLM turns it into tags and changes of
/// behaviour.
const USER_AGENT: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// The initial capacity for the call id and the passed headers, in bytes. One allocation is enough in nearly every
/// case.
const PASSED_BYTES: usize = 192;
