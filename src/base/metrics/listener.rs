//! The scrape endpoint: it serves `GET /health` and the pages that its creator has added.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::discovery::ScrapeTarget;
use crate::base::timestamp::is_clock_in_range;

/// A page of the listener: its path and its body.
#[derive(Clone)]
pub struct HttpPage {
    path: &'static str,
    content_type: &'static str,
    /// Renders the body. The argument is the local address of the client's connection.
    body: Arc<dyn Fn(SocketAddr) -> Vec<u8> + Send + Sync>,
}

impl HttpPage {
    /// Creates the page `/metrics` with Prometheus text.
    pub fn metrics_page(render: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self {
            path: "/metrics",
            content_type: PROMETHEUS_CONTENT_TYPE,
            body: Arc::new(move |_| render()),
        }
    }

    /// Creates the page `/sd`, which tells Prometheus the addresses to scrape (`http_sd_configs`).
    pub fn discovery_page(target: ScrapeTarget) -> Self {
        Self {
            path: "/sd",
            content_type: JSON_CONTENT_TYPE,
            body: Arc::new(move |asked| target.render_targets(asked)),
        }
    }
}

impl fmt::Debug for HttpPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpPage").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Answers scrapes until `shutdown` resolves. Open scrapes then have [`SHUTDOWN_GRACE`] to end.
///
/// A page is rendered on a blocking thread: a scrape of ten thousand runs takes a tenth of a second, and streams must
/// not wait for it.
pub async fn serve_pages(
    listener: TcpListener,
    pages: Vec<HttpPage>,
    shutdown: impl Future<Output = ()>,
) {
    let pages: Arc<[HttpPage]> = pages.into();
    let mut shutdown = pin!(shutdown);
    let mut scrapes = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = scrapes.join_next() => (),
            accepted = listener.accept(), if scrapes.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(scrapes.spawn(serve_connection(stream, Arc::clone(&pages)))),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection on the metrics listener");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            },
        }
    }
    drop(listener);
    drop(timeout(SHUTDOWN_GRACE, async { while scrapes.join_next().await.is_some() {} }).await);
}

/// Answers one request of a connection and closes it: without keep-alive an idle scraper holds no slot.
async fn serve_connection(stream: TcpStream, pages: Arc<[HttpPage]>) {
    let Ok(asked) = stream.local_addr() else { return };
    let service = service_fn(move |request| {
        let pages = Arc::clone(&pages);
        async move { Ok::<_, Infallible>(respond_to_request(&request, &pages, asked).await) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .auto_date_header(is_clock_in_range())
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => (),
        Ok(Err(error)) => tracing::debug!(%error, "a scrape broke off"),
        Err(_) => tracing::debug!("a scrape took longer than {CONNECTION_TIMEOUT:?}"),
    }
}

async fn respond_to_request(
    request: &Request<Incoming>,
    pages: &[HttpPage],
    asked: SocketAddr,
) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let page = pages.iter().find(|page| page.path == path);
    if page.is_none() && !matches!(path, "/health" | "/healthz") {
        return text_response(StatusCode::NOT_FOUND, JSON_CONTENT_TYPE, r#"{"error":"not_found"}"#);
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = text_response(
            StatusCode::METHOD_NOT_ALLOWED,
            JSON_CONTENT_TYPE,
            r#"{"error":"method_not_allowed"}"#,
        );
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    let Some(HttpPage { content_type, body, .. }) = page.cloned() else {
        return text_response(StatusCode::OK, JSON_CONTENT_TYPE, r#"{"status":"ok"}"#);
    };
    match spawn_blocking(move || body(asked)).await {
        Ok(text) => text_response(StatusCode::OK, content_type, text),
        Err(error) => {
            tracing::error!(%error, "making a page for Prometheus panicked");
            text_response(
                StatusCode::INTERNAL_SERVER_ERROR,
                JSON_CONTENT_TYPE,
                r#"{"error":"internal"}"#,
            )
        }
    }
}

fn text_response(
    status: StatusCode,
    kind: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// The largest number of connections that are served at the same time. Other connections wait in the kernel's backlog.
/// Our choice: two scrapers and a health check need four.
const MAX_CONNECTIONS: usize = 16;

/// The longest time for the head of a request. Our choice: an operator's network is near.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest life of a connection. Prometheus gives up after its `scrape_timeout`, 10 s by default.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that a shutdown waits for open scrapes, so that a run's last figures are not lost. Our choice.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

/// The pause after a failed accept. Our choice: a process without free file descriptors would fail again at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const JSON_CONTENT_TYPE: &str = "application/json";
const PROMETHEUS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
