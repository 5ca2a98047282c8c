//! The scrape endpoint: `GET /health`, the pages it is given, and nothing else.

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

use super::discovery::Target;

/// What is served at a path.
#[derive(Clone)]
pub struct Page {
    path: &'static str,
    kind: &'static str,
    /// Given the address at which it was asked.
    body: Arc<dyn Fn(SocketAddr) -> Vec<u8> + Send + Sync>,
}

impl Page {
    /// `/metrics`: Prometheus text.
    pub fn metrics(render: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self { path: "/metrics", kind: TEXT, body: Arc::new(move |_| render()) }
    }

    /// `/sd`: where Prometheus finds what there is to scrape, by `http_sd_configs`.
    pub fn discovery(target: Target) -> Self {
        Self { path: "/sd", kind: JSON, body: Arc::new(move |asked| target.answer(asked)) }
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Answers scrapes until `shutdown` resolves, then gives those under way [`LINGER`] to end.
///
/// A page is made on a blocking thread: a scrape of ten thousand runs takes a tenth of a second,
/// which no stream should wait for.
pub async fn serve(listener: TcpListener, pages: Vec<Page>, shutdown: impl Future<Output = ()>) {
    let pages: Arc<[Page]> = pages.into();
    let mut shutdown = pin!(shutdown);
    let mut scrapes = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = scrapes.join_next() => (),
            accepted = listener.accept(), if scrapes.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(scrapes.spawn(converse(stream, Arc::clone(&pages)))),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a scrape");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    drop(timeout(LINGER, async { while scrapes.join_next().await.is_some() {} }).await);
}

/// One connection, one answer: without keep-alive an idle scraper holds no slot.
async fn converse(stream: TcpStream, pages: Arc<[Page]>) {
    let Ok(asked) = stream.local_addr() else { return };
    let service = service_fn(move |request| {
        let pages = Arc::clone(&pages);
        async move { Ok::<_, Infallible>(answer(&request, &pages, asked).await) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(SCRAPE_TIME, connection).await {
        Ok(Ok(())) => (),
        Ok(Err(error)) => tracing::debug!(%error, "a scrape broke off"),
        Err(_) => tracing::debug!("a scrape took longer than {SCRAPE_TIME:?}"),
    }
}

async fn answer(
    request: &Request<Incoming>,
    pages: &[Page],
    asked: SocketAddr,
) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let page = pages.iter().find(|page| page.path == path);
    if page.is_none() && !matches!(path, "/health" | "/healthz") {
        return reply(StatusCode::NOT_FOUND, JSON, r#"{"error":"not_found"}"#);
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal =
            reply(StatusCode::METHOD_NOT_ALLOWED, JSON, r#"{"error":"method_not_allowed"}"#);
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    let Some(Page { kind, body, .. }) = page.cloned() else {
        return reply(StatusCode::OK, JSON, r#"{"status":"ok"}"#);
    };
    match spawn_blocking(move || body(asked)).await {
        Ok(text) => reply(StatusCode::OK, kind, text),
        Err(error) => {
            tracing::error!(%error, "making a page for Prometheus panicked");
            reply(StatusCode::INTERNAL_SERVER_ERROR, JSON, r#"{"error":"internal"}"#)
        }
    }
}

fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Connections served at once; the rest wait in the kernel's backlog. Ours: two scrapers and a
/// health check need four.
const CONNECTIONS: usize = 16;

/// How long a head may take to arrive. Ours: an operator's network is near.
const HEAD_TIME: Duration = Duration::from_secs(5);

/// How long one connection may live. Prometheus gives up after its `scrape_timeout`, 10 s by default.
const SCRAPE_TIME: Duration = Duration::from_secs(10);

/// How long a shutdown waits for scrapes under way, so that a run's last figures are not lost.
const LINGER: Duration = Duration::from_secs(1);

/// The pause after a failed accept: out of file descriptors is not cured by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
