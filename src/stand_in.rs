//! A stand-in for GitHub, for the demo and the tests: the part of its REST API that the relay calls, and git over
//! HTTP, on one port of the loopback.
//!
//! It keeps what it is told, demands a token for everything, and answers, refuses and limits in GitHub's own words and
//! headers. What [`Hub`] is told in advance goes wrong: an answer is lost after its work was done, a request waits
//! at the [gate](Hub::gate), a limit is reached. Repositories are bare ones on this disk, so a pull request needs a branch
//! that was really pushed.
//!
//! **Invariant:** nothing but a request with a good token changes or shows a repository.

mod access;
mod fault;
mod git;
mod hub;
mod pull;
mod reply;
mod rest;
mod route;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use crate::base::drain::Drain;

pub use fault::{Fault, Trouble};
pub use hub::{Call, Hub};
pub use pull::Pull;
pub use route::Operation;

use reply::Reply;
use route::Route;

/// A stand-in that listens, and does not answer yet.
#[derive(Debug)]
pub struct Forge {
    listener: TcpListener,
    addr: SocketAddr,
    hub: Hub,
}

/// What a caller is given instead of an answer: the connection ends.
#[derive(Debug, thiserror::Error)]
#[error("the answer is lost, as was asked for")]
struct Lost;

impl Forge {
    /// Listens on `addr`, with no repository and no token that it accepts.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn bind(addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        Ok(Self { listener, addr, hub: Hub::new(format!("http://{addr}")) })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What it knows, to be told and asked.
    pub fn hub(&self) -> Hub {
        self.hub.clone()
    }

    /// Answers until `shutdown`, and then cuts what is open: a request at the gate would never end.
    pub async fn serve(self, shutdown: CancellationToken) {
        let drain = Drain::default();
        while let Some(accepted) = shutdown.run_until_cancelled(self.listener.accept()).await {
            match accepted {
                Ok((stream, _)) => drain.spawn(connection(stream, self.hub.clone(), drain.clone())),
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        // Nobody will open the gate any more.
        self.hub.gate().open(Semaphore::MAX_PERMITS / 2);
        drain.finish(Duration::ZERO).await;
    }
}

async fn connection(stream: TcpStream, hub: Hub, drain: Drain) {
    let hub = Arc::new(hub);
    let working = drain.clone();
    let service = service_fn(move |request| {
        let hub = hub.clone();
        let (answered, answer) = oneshot::channel();
        // What has been asked for is done, also where the one who asked has gone.
        working.spawn(async move { drop(answered.send(handle(&hub, request).await)) });
        async move { answer.await.unwrap_or(Err(Lost)) }
    });
    let cut = drain.cut().clone();
    let server = auto::Builder::new(drain);
    let conversation = server.serve_connection(TokioIo::new(stream), service);
    if let Some(Err(error)) = cut.run_until_cancelled(conversation).await {
        tracing::debug!(%error, "connection ended early");
    }
}

/// Answers one request, unless it was told to lose the answer.
async fn handle(hub: &Hub, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Lost> {
    let (head, body) = request.into_parts();
    let Ok(body) = Limited::new(body, BODY_LIMIT).collect().await else { return Err(Lost) };
    let body = body.to_bytes();
    let Some(route) = Route::find(&head) else { return Ok(Reply::not_found().into_response()) };
    hub.called(&route, &head, &body);
    let fault = hub.fault(route.operation());
    match fault {
        Some(Trouble::Refuse(reply)) => return Ok(reply.into_response()),
        Some(Trouble::HoldBefore) => hub.gate().pass().await,
        _ => (),
    }
    let reply = match &route {
        Route::Git(ask) => git::answer(hub, ask, &head, body).await,
        Route::Rest(ask) => rest::answer(hub, ask, &head, &body),
    };
    match fault {
        Some(Trouble::LoseReply) => return Err(Lost),
        Some(Trouble::HoldAfter) => hub.gate().pass().await,
        _ => (),
    }
    Ok(reply.into_response())
}

/// A push of everything the tests have, many times over.
const BODY_LIMIT: usize = 512 << 20;

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
