//! A collector of spans in OpenTelemetry's protocol.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio::net::TcpListener;

/// A collector that stores what it receives.
pub(crate) struct TraceCollector {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<ReceivedSpans>>,
}

#[derive(Clone, Default)]
pub(crate) struct ReceivedSpans {
    pub(crate) heads: Vec<String>,
    pub(crate) requests: Vec<ExportTraceServiceRequest>,
}

impl TraceCollector {
    pub(crate) async fn start(status: StatusCode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(ReceivedSpans::default()));
        let keep = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let keep = Arc::clone(&keep);
                let service =
                    service_fn(move |request| take_spans(Arc::clone(&keep), status, request));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, seen }
    }

    pub(crate) fn seen(&self) -> ReceivedSpans {
        self.seen.lock().unwrap().clone()
    }
}

impl ReceivedSpans {
    pub(crate) fn spans(&self) -> Vec<Span> {
        let all = self.requests.iter().flat_map(|request| &request.resource_spans);
        all.flat_map(|of_us| &of_us.scope_spans).flat_map(|scope| scope.spans.clone()).collect()
    }
}

async fn take_spans(
    keep: Arc<Mutex<ReceivedSpans>>,
    status: StatusCode,
    request: Request<Incoming>,
) -> hyper::Result<Response<Full<Bytes>>> {
    let header = |name| {
        request.headers().get(name).map_or("-", |value: &http::HeaderValue| value.to_str().unwrap())
    };
    let head = format!(
        "{} {} {} {} {}",
        request.method(),
        request.uri().path(),
        header("content-type"),
        header("authorization"),
        header("x-team")
    );
    let body = request.into_body().collect().await?.to_bytes();
    let mut seen = keep.lock().unwrap();
    seen.heads.push(head);
    seen.requests.push(ExportTraceServiceRequest::decode(body).unwrap());
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    Ok(response)
}

/// Formats a span without ids and times.
pub(crate) fn format_span(span: &Span, indent: &str) -> String {
    let mut text = format!("{indent}{} (kind {})", span.name, span.kind);
    if let Some(status) = &span.status {
        write!(text, ": {}", status.message).unwrap();
    }
    text.push('\n');
    for KeyValue { key, value, .. } in &span.attributes {
        let value = match value.as_ref().unwrap().value.as_ref().unwrap() {
            any_value::Value::StringValue(_) if key == "cogni.call.id" => "[id]".to_owned(),
            any_value::Value::DoubleValue(_) if key.ends_with("chunk") => "[seconds]".to_owned(),
            any_value::Value::StringValue(text) => text.clone(),
            any_value::Value::IntValue(count) => count.to_string(),
            any_value::Value::DoubleValue(number) => number.to_string(),
            other => format!("{other:?}"),
        };
        writeln!(text, "{indent}  {key} = {value}").unwrap();
    }
    text
}
