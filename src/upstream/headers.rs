//! Which headers pass, and which are ours.
//!
//! **Invariant:** nothing a client sends can reach the upstream's authentication, attribution or
//! routing: a header passes only if it stands in a short list, everything else is written by us.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use serde::{Deserialize, Serialize};

use crate::base::rope::Rope;
use crate::protocol::Route;
use crate::run::{Identity, RequestId};
use crate::upstream::redactor::Redactor;
use crate::upstream::{self, Kind, Target};

/// What an operator may change about headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Values of `anthropic-beta` that pass; others are taken out of the list.
    pub anthropic_beta: Vec<String>,
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
pub struct Overwrites {
    fields: HeaderMap,
    /// The same as text, for HTTP/1.1.
    text: Vec<u8>,
    kind: Kind,
    redactor: Redactor,
}

/// The head of one request on its way upstream.
#[derive(Clone, Debug)]
pub struct Outgoing {
    route: Route,
    query: Option<String>,
    overwrites: Arc<Overwrites>,
    /// What differs from call to call.
    fields: Vec<(HeaderName, HeaderValue)>,
}

/// A run's identity that cannot be written as headers.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be sent as a header; use printable ASCII without line breaks")]
pub struct Invalid {
    what: &'static str,
}

impl Overwrites {
    /// # Errors
    /// A value that no header can hold.
    pub fn new(
        upstream: &upstream::Config,
        identity: &Identity,
        config: &Config,
    ) -> Result<Self, Invalid> {
        let (key, kind) = (&upstream.api_key, upstream.kind);
        let mut fields = HeaderMap::new();
        let mut set = |name: &'static str, what, value: &str, is_secret| {
            let mut value = HeaderValue::from_str(value).map_err(|_| Invalid { what })?;
            value.set_sensitive(is_secret);
            fields.insert(HeaderName::from_static(name), value);
            Ok(())
        };
        set("host", "the upstream's address", upstream.url.authority().as_str(), false)?;
        set("user-agent", "our name", USER_AGENT, false)?;
        set("accept-encoding", "the encoding", "identity", false)?;
        match kind {
            Kind::Anthropic => set("x-api-key", "the upstream's key", key.expose(), true)?,
            _ if key.is_empty() => {}
            _ => set(
                "authorization",
                "the upstream's key",
                &format!("Bearer {}", key.expose()),
                true,
            )?,
        }
        if kind == Kind::Litellm {
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
            push_line(&mut text, name, value);
        }
        Ok(Self { fields, text, kind, redactor: Redactor::new(key) })
    }

    /// Masks our credential in what the upstream says.
    pub fn redactor(&self) -> Redactor {
        self.redactor.clone()
    }

    /// Takes the headers out of a response whose values hold our credential: their client must not have it, nor our logs.
    pub fn remove_reflected(&self, headers: &mut HeaderMap) {
        let reflects = |value: &HeaderValue| self.redactor.finds(value.as_bytes());
        while let Some(name) =
            headers.iter().find_map(|(name, value)| reflects(value).then(|| name.clone()))
        {
            headers.remove(name);
        }
    }
}

impl Outgoing {
    /// The head for a call: our headers, and those of the client's that pass.
    pub fn new<B>(
        route: Route,
        request: &Request<B>,
        config: &Config,
        overwrites: Arc<Overwrites>,
        request_id: &RequestId,
    ) -> Self {
        let query = request
            .uri()
            .query()
            .filter(|query| config.queries.iter().any(|listed| listed == query));
        let mut fields = passed(request.headers(), config);
        if overwrites.kind == Kind::Litellm {
            fields.push((CALL_ID, request_id.to_header()));
        }
        if overwrites.kind == Kind::Anthropic
            && !fields.iter().any(|(name, _)| name == ANTHROPIC_VERSION)
        {
            fields.push((ANTHROPIC_VERSION, HeaderValue::from_static(OLDEST_ANTHROPIC_VERSION)));
        }
        Self { route, query: query.map(str::to_owned), overwrites, fields }
    }

    /// Adds a header that is none of ours: a rule of the operator has seen to that.
    pub fn push(&mut self, name: HeaderName, value: HeaderValue) {
        self.fields.push((name, value));
    }

    /// Says which span the call is.
    pub fn trace(&mut self, traceparent: HeaderValue) {
        self.fields.push((TRACEPARENT, traceparent));
    }

    /// The head as HTTP/1.1 text, with the length of the body that follows.
    pub fn http1(&self, body_length: u64) -> Vec<u8> {
        let mut text = Vec::with_capacity(self.overwrites.text.len() + HEAD_ROOM_BYTES);
        text.extend_from_slice(self.route.method().as_str().as_bytes());
        text.push(b' ');
        text.extend_from_slice(self.route.path().as_bytes());
        if let Some(query) = &self.query {
            text.push(b'?');
            text.extend_from_slice(query.as_bytes());
        }
        text.extend_from_slice(b" HTTP/1.1\r\n");
        text.extend_from_slice(&self.overwrites.text);
        for (name, value) in &self.fields {
            push_line(&mut text, name, value);
        }
        if self.route.method() == http::Method::POST {
            text.extend_from_slice(b"content-type: application/json\r\ncontent-length: ");
            text.extend_from_slice(itoa::Buffer::new().format(body_length).as_bytes());
            text.extend_from_slice(b"\r\n");
        }
        text.extend_from_slice(b"\r\n");
        text
    }

    /// The head as hyper wants it.
    pub fn request(&self, target: &Target, body_length: u64) -> Request<Option<Rope>> {
        let mut request = Request::new(None);
        *request.method_mut() = self.route.method().clone();
        *request.uri_mut() = target.uri(self.route.path(), self.query.as_deref());
        let fields = request.headers_mut();
        fields.clone_from(&self.overwrites.fields);
        fields.remove(header::HOST);
        fields.extend(self.fields.iter().cloned());
        if self.route.method() == http::Method::POST {
            fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            fields.insert(header::CONTENT_LENGTH, HeaderValue::from(body_length));
        }
        request
    }
}

/// The client's headers that go upstream.
fn passed(headers: &HeaderMap, config: &Config) -> Vec<(HeaderName, HeaderValue)> {
    let mut passed = Vec::with_capacity(4);
    for name in [header::ACCEPT, ANTHROPIC_VERSION] {
        if let Some(value) = headers.get(&name) {
            passed.push((name, value.clone()));
        }
    }
    for (name, listed) in
        [(ANTHROPIC_BETA, &config.anthropic_beta), (OPENAI_BETA, &config.openai_beta)]
    {
        if let Some(value) =
            headers.contains_key(&name).then(|| listed_values(headers, &name, listed)).flatten()
        {
            passed.push((name, value));
        }
    }
    passed
}

/// The listed ones among the values of a header that may be repeated and holds comma lists.
fn listed_values(headers: &HeaderMap, name: &HeaderName, listed: &[String]) -> Option<HeaderValue> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let values = values.flat_map(|value| value.split(',')).map(str::trim);
    let kept: Vec<_> = values.filter(|value| listed.iter().any(|listed| listed == value)).collect();
    if kept.is_empty() { None } else { HeaderValue::from_str(&kept.join(",")).ok() }
}

/// The name under which a header of the upstream's response is kept, if it is.
///
/// [`to_client`] takes those out again that only the audit wants.
pub fn keeps(name: &str) -> Option<&'static str> {
    KEPT.into_iter().find(|kept| kept.eq_ignore_ascii_case(name))
}

/// What the upstream said about the call itself, for the records.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub call_id: Option<HeaderValue>,
    pub response_cost: Option<HeaderValue>,
}

/// Takes the facts out of a response's kept headers and leaves what the client may see.
pub fn to_client(headers: &mut HeaderMap, config: &Config) -> Facts {
    let call_id = headers.get(CALL_ID).cloned();
    let response_cost = if config.expose_response_cost {
        headers.get(RESPONSE_COST).cloned()
    } else {
        headers.remove(RESPONSE_COST)
    };
    Facts { call_id, response_cost }
}

fn push_line(text: &mut Vec<u8>, name: &HeaderName, value: &HeaderValue) {
    for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
        text.extend_from_slice(part);
    }
}

impl Default for Config {
    fn default() -> Self {
        let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
        Self {
            anthropic_beta: owned(&[
                "claude-code-20250219",
                "fine-grained-tool-streaming-2025-05-14",
                "interleaved-thinking-2025-05-14",
                "prompt-caching-2024-07-31",
                "token-counting-2024-11-01",
            ]),
            openai_beta: vec!["responses=experimental".to_owned()],
            // Claude Code asks for `/v1/messages?beta=true`.
            queries: vec!["beta=true".to_owned()],
            tags: vec![],
            traceparent: true,
            expose_response_cost: false,
        }
    }
}

/// Response headers that are kept; of these, [`RESPONSE_COST`] stays inside.
const KEPT: [&str; 10] = [
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

const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const ANTHROPIC_BETA: HeaderName = HeaderName::from_static("anthropic-beta");
const OPENAI_BETA: HeaderName = HeaderName::from_static("openai-beta");
const CALL_ID: HeaderName = HeaderName::from_static("x-litellm-call-id");
const RESPONSE_COST: HeaderName = HeaderName::from_static("x-litellm-response-cost");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The API demands a version; this one has been valid from the start.
const OLDEST_ANTHROPIC_VERSION: &str = "2023-06-01";

/// LiteLLM turns a client's own `User-Agent` into tags and into changes of behaviour.
const USER_AGENT: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// Request line, call id, length and what passes, in one allocation in nearly every case.
const HEAD_ROOM_BYTES: usize = 512;
