//! The scrape endpoint: `GET /metrics`, `GET /health`, and nothing else.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
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

/// Answers scrapes until `shutdown` resolves, then gives those under way [`LINGER`] to end.
///
/// `render` runs on a blocking thread: a scrape of ten thousand runs takes a tenth of a second,
/// which no stream should wait for.
pub async fn serve<R>(listener: TcpListener, render: R, shutdown: impl Future<Output = ()>)
where
    R: Fn() -> Vec<u8> + Clone + Send + 'static,
{
    let mut shutdown = pin!(shutdown);
    let mut scrapes = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = scrapes.join_next() => (),
            accepted = listener.accept(), if scrapes.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(scrapes.spawn(converse(stream, render.clone()))),
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
async fn converse<R>(stream: TcpStream, render: R)
where
    R: Fn() -> Vec<u8> + Clone + Send + 'static,
{
    let service = service_fn(move |request| {
        let render = render.clone();
        async move { Ok::<_, Infallible>(answer(&request, render).await) }
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

async fn answer<R>(request: &Request<Incoming>, render: R) -> Response<Full<Bytes>>
where
    R: FnOnce() -> Vec<u8> + Send + 'static,
{
    let path = request.uri().path();
    if !matches!(path, "/metrics" | "/health" | "/healthz") {
        return reply(StatusCode::NOT_FOUND, JSON, r#"{"error":"not_found"}"#);
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal =
            reply(StatusCode::METHOD_NOT_ALLOWED, JSON, r#"{"error":"method_not_allowed"}"#);
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    if path != "/metrics" {
        return reply(StatusCode::OK, JSON, r#"{"status":"ok"}"#);
    }
    match spawn_blocking(render).await {
        Ok(text) => reply(StatusCode::OK, TEXT, text),
        Err(error) => {
            tracing::error!(%error, "rendering the metrics panicked");
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
