//! Clients on a run's socket: an ordinary client, and one that sends arbitrary bytes.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// A client that makes each request on a new connection.
#[derive(Clone, Debug)]
pub(crate) struct TestClient {
    socket: PathBuf,
    authorization: Option<HeaderValue>,
}

/// A response that was read to its end.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A response whose body is still arriving.
pub(crate) struct ResponseStream {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
}

/// Replies whose heads have arrived on one HTTP/2 connection, and whose bodies the client gives no window.
pub(crate) struct UntakenReplies {
    _replies: Vec<http::Response<Incoming>>,
    connection: JoinHandle<hyper::Result<()>>,
}

impl UntakenReplies {
    pub(crate) async fn get(socket: &Path, path: &str, count: usize) -> Self {
        let io = TokioIo::new(UnixStream::connect(socket).await.unwrap());
        let mut client = http2::Builder::new(TokioExecutor::new());
        let (sender, connection) =
            client.initial_stream_window_size(0).handshake(io).await.unwrap();
        let connection = tokio::spawn(connection);
        let replies = (0..count).map(|_| {
            let request = Request::get(format!("http://localhost{path}"));
            let request = request.body(Full::<Bytes>::default()).unwrap();
            sender.clone().send_request(request)
        });
        let replies = futures_util::future::try_join_all(replies).await.unwrap();
        assert!(replies.iter().all(|reply| reply.status() == StatusCode::OK));
        Self { _replies: replies, connection }
    }
}

impl Drop for UntakenReplies {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl TestClient {
    pub(crate) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), authorization: None }
    }

    /// Makes the client send this token with each request.
    pub(crate) fn with_token(self, token: &str) -> Self {
        Self { authorization: Some(format!("Bearer {token}").parse().unwrap()), ..self }
    }

    pub(crate) async fn get(&self, path: &str) -> TestResponse {
        self.ask(Method::GET, path, "", &[]).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> TestResponse {
        self.post_with(path, body, &[]).await
    }

    pub(crate) async fn post_with(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> TestResponse {
        self.open_with(path, body, headers).await.finish().await.unwrap()
    }

    /// Sends a request and returns when the head of the response has arrived.
    pub(crate) async fn open(&self, path: &str, body: &Value) -> ResponseStream {
        self.open_with(path, body, &[]).await
    }

    pub(crate) async fn open_with(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> ResponseStream {
        self.start(post_request(path, body, headers)).await.unwrap()
    }

    /// Sends a request that may be invalid.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> TestResponse {
        self.send(build_request(method, path, body, headers)).await
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> TestResponse {
        self.start(request).await.unwrap().finish().await.unwrap()
    }

    /// Sends as [`TestClient::open`] does, but returns an error if the connection breaks before the response.
    pub(crate) async fn start(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> hyper::Result<ResponseStream> {
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let socket = UnixStream::connect(&self.socket).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
        tokio::spawn(connection);
        sender.send_request(request).await.map(ResponseStream::from)
    }

    /// Opens an HTTP/2 connection.
    pub(crate) async fn http2(&self) -> http2::SendRequest<Full<Bytes>> {
        let socket = TokioIo::new(self.connect().await);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), socket).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// Sends bytes unchanged, and returns everything that arrives until the gateway closes the connection.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut socket = UnixStream::connect(&self.socket).await.unwrap();
        // The gateway may answer and close before it has read everything.
        let _ = socket.write_all(bytes).await;
        let mut answer = vec![];
        let _ = socket.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Returns whether a process listens on the socket.
    pub(crate) async fn is_served(&self) -> bool {
        UnixStream::connect(&self.socket).await.is_ok()
    }

    pub(crate) async fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).await.unwrap()
    }
}

impl TestResponse {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

impl From<http::Response<Incoming>> for ResponseStream {
    fn from(response: http::Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        Self { status: head.status, headers: head.headers, body }
    }
}

impl ResponseStream {
    /// Returns the next frame; `None` at an orderly end.
    pub(crate) async fn frame(&mut self) -> hyper::Result<Option<Bytes>> {
        match self.body.frame().await {
            Some(frame) => Ok(Some(frame?.into_data().unwrap())),
            None => Ok(None),
        }
    }

    /// Reads the rest of the response.
    pub(crate) async fn finish(self) -> hyper::Result<TestResponse> {
        let body = self.body.collect().await?.to_bytes();
        Ok(TestResponse { status: self.status, headers: self.headers, body })
    }

    /// Reads until the response ends or breaks. Returns what arrived, and whether it ended in order.
    pub(crate) async fn rest(mut self) -> (String, bool) {
        let mut text = String::new();
        loop {
            match self.frame().await {
                Ok(Some(frame)) => text.push_str(&String::from_utf8_lossy(&frame)),
                Ok(None) => return (text, true),
                Err(_broken) => return (text, false),
            }
        }
    }
}

/// An ordinary client's JSON request.
pub(crate) fn post_request(
    path: &str,
    body: &Value,
    headers: &[(&str, &str)],
) -> Request<Full<Bytes>> {
    build_request(Method::POST, path, &body.to_string(), headers)
}

/// A request that may be invalid; the body is JSON unless a header states its type.
pub(crate) fn build_request(
    method: Method,
    path: &str,
    body: &str,
    headers: &[(&str, &str)],
) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if !body.is_empty() && !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/json");
    }
    request.body(Full::from(body.to_owned())).unwrap()
}
