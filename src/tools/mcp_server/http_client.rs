//! The HTTP requests to one server. A redirect is not followed, so a credential reaches no other host.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;

use super::answer::{AnswerMessage, MAX_ENVELOPE_BYTES, McpAnswer, parse_message};
use super::credential::to_header;
use super::error::McpServerError;
use super::request::{McpRequest, McpSession};
use crate::tools::config::McpServerConfig;
use crate::tools::credential_source::CredentialSource;
use crate::tools::http_connector::{ServerConnector, build_client, parse_server_url};
use crate::tools::run_credentials::RunCredentials;

/// The client of one address.
#[derive(Debug)]
pub(super) struct McpHttpClient {
    uri: Uri,
    credentials: Vec<(HeaderName, CredentialSource)>,
    client: Client<ServerConnector, Full<Bytes>>,
    secrets: Arc<RunCredentials>,
}

impl McpHttpClient {
    /// Creates the client. An error is the key of the server's table, and the mistake.
    pub(super) fn new(
        url: &str,
        config: &McpServerConfig,
        secrets: &Arc<RunCredentials>,
    ) -> Result<Self, (String, String)> {
        let (uri, connector) =
            parse_server_url(url).map_err(|problem| ("url".to_owned(), problem.to_owned()))?;
        let is_local = uri.host().is_some_and(|host| LOCAL_HOSTS.contains(&host));
        if !config.headers.is_empty() && uri.scheme_str() == Some("http") && !is_local {
            let problem = "is `http`, and a credential may not cross a network without TLS; give an `https` URL";
            return Err(("url".to_owned(), problem.to_owned()));
        }
        let credentials = config.headers.iter().map(|(name, source)| {
            let wrong = |problem: &str| (format!("headers.{name}"), problem.to_owned());
            let parsed = HeaderName::try_from(name).map_err(|_| wrong("is not a header's name"))?;
            if OWN_HEADERS.contains(&parsed.as_str()) || parsed.as_str().starts_with("mcp-") {
                return Err(wrong("is a header of the protocol; remove it"));
            }
            if !source.has_one_place() {
                return Err(wrong("needs one of `env` and `file`"));
            }
            Ok((parsed, source.clone()))
        });
        let credentials = credentials.collect::<Result<_, _>>()?;
        let client = build_client(connector);
        Ok(Self { uri, credentials, client, secrets: Arc::clone(secrets) })
    }

    /// Sends a request, or a notification if there is no id, and returns the answer.
    ///
    /// # Errors
    /// Returns an error if there is no valid answer. An error of the server's method is part of the answer.
    pub(super) async fn post(
        &self,
        session: &McpSession,
        request: &McpRequest<'_>,
        id: Option<u64>,
        max_bytes: usize,
    ) -> Result<McpAnswer, McpServerError> {
        let mut built = Request::post(&self.uri)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream");
        for (name, value) in session.headers(request) {
            built = built.header(name, value);
        }
        for (name, source) in &self.credentials {
            let value = source.read_value().map_err(McpServerError::Credential)?;
            built = built.header(name, to_header(&value)?);
            self.secrets.add_value(&value);
        }
        let body = Full::new(Bytes::from(session.body(request, id)));
        let built = built.body(body).map_err(|_| McpServerError::Malformed("the session's id"))?;
        let response = self.client.request(built).await;
        let response = response.map_err(|error| McpServerError::Unreachable(error.to_string()))?;
        let status = response.status();
        let session = response.headers().get("mcp-session-id");
        let session = session.and_then(|id| id.to_str().ok()).map(str::to_owned);
        let Some(id) = id.filter(|_| status != StatusCode::ACCEPTED) else {
            return if status.is_success() {
                Ok(McpAnswer { session, ..McpAnswer::default() })
            } else {
                Err(McpServerError::Status(status.as_u16()))
            };
        };
        let message = match read_message(response, id, max_bytes + MAX_ENVELOPE_BYTES).await {
            Ok(message) => message,
            // A refusal in HTTP has any body.
            Err(_) if !status.is_success() => return Err(McpServerError::Status(status.as_u16())),
            Err(error) => return Err(error),
        };
        if !status.is_success() && message.error.is_none() {
            return Err(McpServerError::Status(status.as_u16()));
        }
        let guard = self.secrets.guard_answer();
        Ok(McpAnswer { session, program: 0, message: Some(message), guard })
    }
}

/// Reads the message with an id from a body of JSON or of events, and no more than `max_bytes`.
async fn read_message(
    response: Response<Incoming>,
    id: u64,
    max_bytes: usize,
) -> Result<AnswerMessage, McpServerError> {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_stream = kind.is_some_and(|kind| kind.starts_with("text/event-stream"));
    let mut body = response.into_body();
    let (mut received, mut size, mut events) = (vec![], 0, EventReader::default());
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| McpServerError::Unreachable(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        size += data.len();
        if size > max_bytes {
            return Err(McpServerError::TooLarge);
        }
        if !is_stream {
            received.extend_from_slice(&data);
            continue;
        }
        // A stream may stay open behind its last message, so each event is read when it is complete.
        for event in events.read_frame(&data) {
            match parse_message(&event, id) {
                Ok(message) => return Ok(message),
                // The server waits for an answer of its own, which does not come.
                Err(McpServerError::AsksForInput) => return Err(McpServerError::AsksForInput),
                Err(_) => {}
            }
        }
    }
    if is_stream {
        Err(McpServerError::Malformed("the stream has no result"))
    } else {
        parse_message(&received, id)
    }
}

/// A reader of a stream of events, which reads each byte once.
#[derive(Default)]
struct EventReader {
    /// The bytes of the line that has begun.
    line: Vec<u8>,
    /// The data of the event that has begun.
    data: Vec<u8>,
}

impl EventReader {
    /// Returns the data of the events that end in a frame.
    fn read_frame(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut ended = vec![];
        for part in frame.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                ended.extend(self.read_line(line.trim_ascii_end()));
            }
        }
        ended
    }

    /// Reads a line, and returns the data of the event that it ends.
    fn read_line(&mut self, line: &[u8]) -> Option<Vec<u8>> {
        if line.is_empty() {
            return Some(std::mem::take(&mut self.data)).filter(|data| !data.is_empty());
        }
        if let Some(text) = line.strip_prefix(b"data:") {
            if !self.data.is_empty() {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(text.strip_prefix(b" ").unwrap_or(text));
        }
        None
    }
}

/// The hosts that a request reaches without a network.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// The headers that are made here.
const OWN_HEADERS: [&str; 7] = [
    "accept",
    "connection",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
    "upgrade",
];
