//! Any request head is served only on an exact route, and the upstream gets one well-formed head with the gateway's
//! identity headers, once.
#![cfg_attr(fuzzing, no_main)]

use std::sync::Arc;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::gateway::pipeline::request_head;
use cogni_gateway::gateway::run::{RequestId, RunIdentity};
use cogni_gateway::gateway::upstream;
use cogni_gateway::gateway::upstream::headers::{
    HeaderConfig, InjectedHeaders, UpstreamRequestHead,
};
use cogni_gateway_fuzz::fuzz_target;
use http::Request;

fuzz_target!(|data: &[u8]| {
    let Some(request) = parse_request(data) else { return };
    let Ok(route) = request_head::match_route(&request) else { return };
    assert_eq!((request.uri().path(), request.method()), (route.path(), route.method()));
    let config = HeaderConfig::default();
    let head = UpstreamRequestHead::new(
        route,
        &request,
        &config,
        injected_headers(&config),
        &RequestId::new(),
    );
    check_head(&head.to_http1_bytes(0));
});

/// Parses the request as hyper would; bytes that are not HTTP are skipped.
fn parse_request(data: &[u8]) -> Option<Request<()>> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Request::new(&mut fields);
    head.parse(data).ok()?.is_complete().then_some(())?;
    let request = Request::builder().method(head.method?).uri(head.path?);
    let fields = head.headers.iter();
    fields.fold(request, |request, field| request.header(field.name, field.value)).body(()).ok()
}

fn injected_headers(config: &HeaderConfig) -> Arc<InjectedHeaders> {
    let identity = RunIdentity {
        run: "run-1".into(),
        attempt: "0".into(),
        account: "acct-1".into(),
        ..RunIdentity::default()
    };
    let upstream = upstream::UpstreamConfig {
        api_key: SecretString::new("sk-real"),
        ..upstream::UpstreamConfig::default()
    };
    Arc::new(InjectedHeaders::new(&upstream, &identity, config).expect("a valid identity"))
}

fn check_head(head: &[u8]) {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut outgoing = httparse::Request::new(&mut fields);
    let length = outgoing.parse(head).expect("we send HTTP");
    assert_eq!(length, httparse::Status::Complete(head.len()), "one head, and nothing after it");
    for field in outgoing.headers.iter() {
        assert!(SENT.contains(&field.name), "`{}` goes upstream", field.name);
        let times = outgoing.headers.iter().filter(|other| other.name == field.name).count();
        assert_eq!(times, 1, "`{}` goes upstream twice", field.name);
    }
    let value =
        |name| outgoing.headers.iter().find(|field| field.name == name).map(|field| field.value);
    assert_eq!(value("authorization"), Some(&b"Bearer sk-real"[..]));
    assert_eq!(value("x-litellm-end-user-id"), Some(&b"acct-1"[..]));
}

/// The headers that LiteLLM ever receives.
const SENT: &[&str] = &[
    "host",
    "user-agent",
    "accept-encoding",
    "authorization",
    "x-litellm-end-user-id",
    "x-litellm-spend-logs-metadata",
    "x-litellm-call-id",
    "content-type",
    "content-length",
    "accept",
    "anthropic-version",
    "anthropic-beta",
    "openai-beta",
];
