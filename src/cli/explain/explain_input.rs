//! The request in a file: a whole HTTP request, or only its body.

use anyhow::{Context, bail};
use bytes::Bytes;
use http::{Request, header};
use serde_json::{Map, Value};

use crate::llm::protocol::GatewayRoute;
use crate::tools::exec_endpoint::EXEC_PATH;

/// The request to explain.
#[derive(Debug)]
pub struct ExplainInput {
    pub request: Request<()>,
    pub body: Bytes,
    /// True if the route was guessed from the body.
    pub is_guessed: bool,
}

impl ExplainInput {
    /// Parses a request or a body. `route` is the path that a body is posted to.
    ///
    /// # Errors
    /// Returns an error if the text looks like a request and is not a valid one, or if `route` is given for a request
    /// with its own path.
    pub fn parse(text: Vec<u8>, route: Option<&str>) -> anyhow::Result<Self> {
        if is_request(&text) {
            if route.is_some() {
                bail!("the file has a request line, so `--route` has no meaning; leave it out");
            }
            return Self::parse_request(&Bytes::from(text));
        }
        // A bare body has no path, so the route comes from the flag or from the body's fields.
        let path = route.map_or_else(|| guess_path(&text).to_owned(), str::to_owned);
        let request = Request::post(&path).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(()).with_context(|| format!("`{path}` is not a path"))?;
        Ok(Self { request, body: Bytes::from(text), is_guessed: route.is_none() })
    }

    fn parse_request(text: &Bytes) -> anyhow::Result<Self> {
        let mut fields = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Request::new(&mut fields);
        let length = match head.parse(text).context("the file is not an HTTP request")? {
            httparse::Status::Complete(length) => length,
            httparse::Status::Partial => bail!(
                "the head of the request does not end; put an empty line after its last header"
            ),
        };
        let path = head.path.unwrap_or_default();
        let mut request = Request::builder().method(head.method.unwrap_or_default()).uri(path);
        for field in head.headers.iter() {
            request = request.header(field.name, field.value);
        }
        let request = request.body(()).with_context(|| format!("`{path}` cannot be asked for"))?;
        Ok(Self { request, body: text.slice(length..), is_guessed: false })
    }
}

/// Returns true if the first line ends like the first line of a request.
fn is_request(text: &[u8]) -> bool {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_end();
    [&b" HTTP/1.1"[..], b" HTTP/1.0"].iter().any(|version| line.ends_with(version))
}

/// Guesses the path of a body from its fields.
fn guess_path(body: &[u8]) -> &'static str {
    let fields: Map<String, Value> = serde_json::from_slice(body).unwrap_or_default();
    let has = |names: &[&str]| names.iter().any(|name| fields.contains_key(*name));
    // No body for a model has a field `tool`.
    if has(&["tool"]) {
        return EXEC_PATH;
    }
    // `messages` is a field of two protocols, so the fields that only one of them has are checked first.
    let route = match () {
        () if has(&["system", "stop_sequences", "anthropic_version"]) => GatewayRoute::Messages,
        () if has(&["messages"]) => GatewayRoute::ChatCompletions,
        () if has(&["input"]) => GatewayRoute::Responses,
        () if has(&["prompt"]) => GatewayRoute::Completions,
        () => GatewayRoute::ChatCompletions,
    };
    route.path()
}

/// The maximum number of headers: the default of a served run.
const MAX_HEADERS: usize = 100;
