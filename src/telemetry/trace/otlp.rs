//! Converts spans to OTLP messages.

mod message;

use std::time::{SystemTime, UNIX_EPOCH};

use message::{
    AnyValue, AnyValueKind, ExportTraceServiceRequest, ExportTraceServiceResponse,
    InstrumentationScope, KeyValue, OtlpResource, OtlpSpanKind, OtlpStatus, OtlpStatusCode,
    ResourceSpans, ScopeSpans,
};
use prost::Message;

use super::{FinishedSpan, QueuedSpan, TraceSpanKind};

/// The value of a span's attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum SpanAttributeValue {
    Text(String),
    Count(i64),
    Float(f64),
    Bool(bool),
}

/// A builder of requests. The builder holds the part that is equal in every request: this service's name and version.
#[derive(Clone, Debug)]
pub(super) struct ExportRequestBuilder {
    resource: OtlpResource,
    scope: InstrumentationScope,
}

impl ExportRequestBuilder {
    pub(super) fn new(service_name: &str) -> Self {
        let name = env!("CARGO_PKG_NAME").to_owned();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let attributes = [("service.name", service_name), ("service.version", &version)];
        let attributes =
            attributes.map(|(key, value)| key_value(key, SpanAttributeValue::from(value)));
        Self {
            resource: OtlpResource { attributes: attributes.into() },
            scope: InstrumentationScope { name, version },
        }
    }

    /// Returns the body of a request that carries these spans.
    pub(super) fn encode_request(&self, spans: impl Iterator<Item = QueuedSpan>) -> Vec<u8> {
        let scope = Some(self.scope.clone());
        let spans = spans.map(message::OtlpSpan::from).collect();
        let scope_spans = vec![ScopeSpans { scope, spans, schema_url: SCHEMA_URL.to_owned() }];
        let resource = Some(self.resource.clone());
        let this_service =
            ResourceSpans { resource, scope_spans, schema_url: SCHEMA_URL.to_owned() };
        ExportTraceServiceRequest { resource_spans: vec![this_service] }.encode_to_vec()
    }
}

impl From<QueuedSpan> for message::OtlpSpan {
    fn from(QueuedSpan { trace, parent, is_parent_remote, span }: QueuedSpan) -> Self {
        let FinishedSpan { id, name, kind, started, ended, mut attributes, error } = span;
        // The conventions want the cause as an attribute and in the status.
        attributes.extend(error.as_deref().map(|word| ("error.type", word.into())));
        Self {
            trace_id: trace.as_bytes().to_vec(),
            span_id: id.as_bytes().to_vec(),
            parent_span_id: parent.map(|span| span.as_bytes().to_vec()).unwrap_or_default(),
            // Only sampled spans reach the queue, so the flag is constant.
            flags: SAMPLED_FLAG
                | message::HAS_IS_REMOTE_FLAG
                | if is_parent_remote { message::IS_REMOTE_FLAG } else { 0 },
            name,
            kind: match kind {
                TraceSpanKind::Internal => OtlpSpanKind::Internal.into(),
                TraceSpanKind::Client => OtlpSpanKind::Client.into(),
            },
            start_time_unix_nano: unix_nanoseconds(started),
            // A clock that was set back must not make a span end before its start.
            end_time_unix_nano: unix_nanoseconds(ended.max(started)),
            attributes: attributes.into_iter().map(|(key, value)| key_value(key, value)).collect(),
            status: error.map(|word| OtlpStatus {
                code: OtlpStatusCode::Error.into(),
                message: word.into_owned(),
            }),
        }
    }
}

impl From<SpanAttributeValue> for AnyValue {
    fn from(value: SpanAttributeValue) -> Self {
        let value = match value {
            SpanAttributeValue::Text(text) => AnyValueKind::String(text),
            SpanAttributeValue::Count(count) => AnyValueKind::Int(count),
            SpanAttributeValue::Float(number) => AnyValueKind::Double(number),
            SpanAttributeValue::Bool(is) => AnyValueKind::Bool(is),
        };
        Self { value: Some(value) }
    }
}

impl From<&str> for SpanAttributeValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for SpanAttributeValue {
    fn from(count: u64) -> Self {
        // OTLP has signed integers only.
        Self::Count(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

impl From<bool> for SpanAttributeValue {
    fn from(is: bool) -> Self {
        Self::Bool(is)
    }
}

impl From<f64> for SpanAttributeValue {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

/// Returns the number of spans that a collector rejects in its response.
pub(super) fn rejected_spans(answer: &[u8]) -> usize {
    // A response that cannot be decoded says nothing about rejected spans, so all count as taken.
    let read = ExportTraceServiceResponse::decode(answer).ok();
    let refused = read.and_then(|answer| Some(answer.partial_success?.rejected_spans));
    refused.and_then(|spans| usize::try_from(spans).ok()).unwrap_or_default()
}

fn key_value(key: &str, value: SpanAttributeValue) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(value.into()) }
}

fn unix_nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The flag for a sampled trace in W3C Trace Context.
const SAMPLED_FLAG: u32 = 1;

/// The version of the conventions that define the attributes' names.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.38.0";
