//! Spans as OTLP has them.

mod message;

use std::time::{SystemTime, UNIX_EPOCH};

use message::{
    AnyValue, AnyValueKind, ExportTraceServiceRequest, ExportTraceServiceResponse,
    InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, SpanKind, Status,
    StatusCode,
};
use prost::Message;

use super::{Kind, Placed, Span};

/// What an attribute may be.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Text(String),
    Count(i64),
    Float(f64),
    Is(bool),
}

/// What is the same in every request: who we are.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    resource: Resource,
    scope: InstrumentationScope,
}

impl Frame {
    pub(super) fn new(service_name: &str) -> Self {
        let name = env!("CARGO_PKG_NAME").to_owned();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let attributes = [("service.name", service_name), ("service.version", &version)];
        let attributes = attributes.map(|(key, value)| pair(key, Value::from(value)));
        Self {
            resource: Resource { attributes: attributes.into() },
            scope: InstrumentationScope { name, version },
        }
    }

    /// The body of a request that tells of these spans.
    pub(super) fn around(&self, spans: impl Iterator<Item = Placed>) -> Vec<u8> {
        let scope = Some(self.scope.clone());
        let spans = spans.map(message::Span::from).collect();
        let scope_spans = vec![ScopeSpans { scope, spans, schema_url: SCHEMA.to_owned() }];
        let resource = Some(self.resource.clone());
        let of_us = ResourceSpans { resource, scope_spans, schema_url: SCHEMA.to_owned() };
        ExportTraceServiceRequest { resource_spans: vec![of_us] }.encode_to_vec()
    }
}

impl From<Placed> for message::Span {
    fn from(Placed { trace, parent, is_parent_remote, span }: Placed) -> Self {
        let Span { id, name, kind, started, ended, mut attributes, error } = span;
        attributes.extend(error.as_deref().map(|word| ("error.type", word.into())));
        Self {
            trace_id: trace.as_bytes().to_vec(),
            span_id: id.as_bytes().to_vec(),
            parent_span_id: parent.map(|span| span.as_bytes().to_vec()).unwrap_or_default(),
            flags: SAMPLED
                | message::HAS_IS_REMOTE
                | if is_parent_remote { message::IS_REMOTE } else { 0 },
            name,
            kind: match kind {
                Kind::Internal => SpanKind::Internal.into(),
                Kind::Client => SpanKind::Client.into(),
            },
            start_time_unix_nano: nanoseconds(started),
            end_time_unix_nano: nanoseconds(ended.max(started)),
            attributes: attributes.into_iter().map(|(key, value)| pair(key, value)).collect(),
            status: error
                .map(|word| Status { code: StatusCode::Error.into(), message: word.into_owned() }),
        }
    }
}

impl From<Value> for AnyValue {
    fn from(value: Value) -> Self {
        let value = match value {
            Value::Text(text) => AnyValueKind::String(text),
            Value::Count(count) => AnyValueKind::Int(count),
            Value::Float(number) => AnyValueKind::Double(number),
            Value::Is(is) => AnyValueKind::Bool(is),
        };
        Self { value: Some(value) }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Value {
    fn from(is: bool) -> Self {
        Self::Is(is)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

/// How many spans a collector's answer says it did not want.
pub(super) fn refused(answer: &[u8]) -> usize {
    let read = ExportTraceServiceResponse::decode(answer).ok();
    let refused = read.and_then(|answer| Some(answer.partial_success?.rejected_spans));
    refused.and_then(|spans| usize::try_from(spans).ok()).unwrap_or_default()
}

fn pair(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(value.into()) }
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The flag of W3C's Trace Context.
const SAMPLED: u32 = 1;

/// The version of the conventions that the attributes' names are from.
const SCHEMA: &str = "https://opentelemetry.io/schemas/1.38.0";
