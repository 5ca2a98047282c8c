//! A client like an agent's: plain HTTP on the run's socket.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

/// A client of one run's socket.
pub(super) struct DemoHttpClient<'a> {
    pub(super) socket: &'a Path,
}

/// An answer, with the arrival time of each frame.
pub(super) struct DemoResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) frames: Vec<(Duration, String)>,
}

impl DemoHttpClient<'_> {
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<DemoResponse> {
        self.send(Request::get(path).body(Full::default())?).await
    }

    pub(super) async fn post(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> anyhow::Result<DemoResponse> {
        let mut request = Request::post(path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(Full::from(body.to_string()))?).await
    }

    /// Sends one request on its own connection. The connection is polled concurrently with the request.
    async fn send(&self, mut request: Request<Full<Bytes>>) -> anyhow::Result<DemoResponse> {
        request.headers_mut().insert("host", http::HeaderValue::from_static("localhost"));
        let socket =
            UnixStream::connect(self.socket).await.context("the run's socket does not answer")?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
        let started = Instant::now();
        let exchange = async {
            let mut response = sender.send_request(request).await?;
            let mut frames = vec![];
            while let Some(frame) = response.frame().await {
                if let Ok(data) = frame?.into_data() {
                    frames.push((started.elapsed(), String::from_utf8_lossy(&data).into_owned()));
                }
            }
            let (head, _) = response.into_parts();
            // Dropping the sender ends the connection, so that the join below can finish.
            drop(sender);
            Ok(DemoResponse { status: head.status, headers: head.headers, frames })
        };
        let (answer, connection) = tokio::join!(exchange, connection);
        let answer: anyhow::Result<DemoResponse> = answer;
        connection.context("the connection broke")?;
        answer
    }
}

impl DemoResponse {
    /// Returns the error's code as text.
    pub(super) fn error_code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(super) fn text(&self) -> String {
        self.frames.iter().map(|(_, frame)| frame.as_str()).collect()
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text()).unwrap_or_default()
    }

    pub(super) fn litellm_headers(&self) -> String {
        let names = self.headers.keys().map(http::HeaderName::as_str);
        let names: Vec<_> = names
            .filter(|name| name.starts_with("x-litellm") || name.starts_with("llm_provider"))
            .collect();
        names.join(", ")
    }
}
