//! A fake model provider for the demo, the tests and the benches.
//!
//! The provider serves chat completions, completions, Responses, Messages, embeddings and models like the real
//! providers behind `LiteLLM`, with `LiteLLM`'s headers, over HTTP/1.1 and HTTP/2 without TLS. A [`ProviderScript`]
//! decides the content, the speed and the failures of answers. A request can override options of the provider's script
//! in its model's name, as in `"model": "fake/chunks=100,interval=20ms,fault=reset@3"`. The model's name is the only
//! field that every proxy passes on unchanged.
//!
//! A strict provider also refuses what OpenAI and Anthropic refuse, so that a test notices what a gateway drops or leaves.
//!
//! [`ProviderRequestLog`] has the received requests, and `GET /_seen?last=N` returns them over HTTP (`DELETE` clears
//! them). Answers that a script holds back wait at the [`ResponseGate`], which `POST /_gate` opens for one answer.
//!
//! **Invariant:** each event is written by its own system call, unless a script joins events or the client reads too
//! slowly.

mod answer;
mod breakable_socket;
mod embeddings;
mod event;
mod generated_body;
mod headers;
mod playback;
mod protocol;
mod provider_request;
mod request_log;
mod route;
pub mod script;
mod server;
mod strict;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::base::task_group::TaskGroup;

pub use crate::base::response_gate::ResponseGate;
pub use request_log::{
    AnswerEnd, MAX_KEPT_BODY_BYTES, MAX_KEPT_REQUESTS, ProviderRequestLog, RecordedRequest,
};
pub use script::ProviderScript;

use breakable_socket::{BreakableSocket, ConnectionBreaker};
use server::ProviderShared;

/// A provider that listens and does not answer yet.
#[derive(Debug)]
pub struct FakeProvider {
    listener: TcpListener,
    addr: SocketAddr,
    shared: Arc<ProviderShared>,
}

impl FakeProvider {
    /// Listens on `addr`. Requests that name no script of their own use `script`.
    pub async fn bind(addr: SocketAddr, script: ProviderScript) -> io::Result<Self> {
        Self::bind_with(addr, script, false).await
    }

    /// Listens on `addr`, and refuses each request that OpenAI or Anthropic would refuse.
    pub async fn bind_strict(addr: SocketAddr, script: ProviderScript) -> io::Result<Self> {
        Self::bind_with(addr, script, true).await
    }

    async fn bind_with(
        addr: SocketAddr,
        script: ProviderScript,
        is_strict: bool,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let seen = Arc::new(ProviderRequestLog::default());
        let shared =
            Arc::new(ProviderShared { script, is_strict, seen, gate: ResponseGate::default() });
        Ok(Self { listener, addr, shared })
    }

    /// Returns the address on which the provider listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the log of received requests.
    pub fn request_log(&self) -> Arc<ProviderRequestLog> {
        self.shared.seen.clone()
    }

    /// Returns the gate at which a script holds answers back.
    pub fn response_gate(&self) -> ResponseGate {
        self.shared.gate.clone()
    }

    /// Writes each request to `file` after its end, as a line of JSON.
    pub fn record_requests_to(&self, file: File) {
        self.shared.seen.record_to(file);
    }

    /// Serves until `shutdown`, and then aborts open connections, because a scripted stall would never end.
    pub async fn serve(self, shutdown: CancellationToken) {
        let drain = TaskGroup::default();
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        while let Some((stream, place)) =
            shutdown.run_until_cancelled(accept_connection(&self.listener, &places)).await
        {
            drain.spawn_task(serve_connection(stream, place, self.shared.clone(), drain.clone()));
        }
        // From here on an aborted answer is recorded as the provider's shutdown, and not as a client's disconnect.
        self.shared.seen.mark_closing();
        drain.shut_down(Duration::ZERO).await;
    }
}

/// Waits for a permit and then for a connection. Pauses while the process has no free file descriptor.
async fn accept_connection(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (TcpStream, OwnedSemaphorePermit) {
    // The permit comes first: a connection above the limit stays in the kernel's queue.
    let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, place),
            Err(error) => {
                tracing::warn!(%error, "the fake server cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Serves one connection until its end.
async fn serve_connection(
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
    shared: Arc<ProviderShared>,
    drain: TaskGroup,
) {
    // Events are small; without this option the kernel would delay them.
    let _open = shared.seen.track_connection();
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "the connection ended before it began");
    }
    // The socket and the requests of a connection share the breaker.
    let breaker = Arc::new(ConnectionBreaker::default());
    let socket = TokioIo::new(BreakableSocket::new(stream, breaker.clone()));
    let service = service_fn(move |request| {
        let (shared, breaker) = (shared.clone(), breaker.clone());
        async move { server::handle(&shared, &breaker, request).await }
    });
    // `drain` counts the tasks, and its token aborts the connection at the shutdown.
    let cut = drain.abort_token().clone();
    let server = auto::Builder::new(drain);
    if let Some(Err(error)) =
        cut.run_until_cancelled(server.serve_connection(socket, service)).await
    {
        tracing::debug!(%error, "connection ended early");
    }
}

/// The maximum number of connections. Our choice: more than any test or bench opens, and fewer than the usual limit of
/// open files.
const MAX_CONNECTIONS: usize = 20_000;
/// The pause after a failed accept.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
