//! A fake GitHub for the demo and the tests. It has the part of the REST API that the relay calls, and git over HTTP,
//! on one port of the loopback interface.
//!
//! The server stores what it receives, demands a token for every request, and answers, refuses and limits with GitHub's
//! own texts and headers. [`FakeGithubHandle`] can inject failures: an answer is lost after its work was done, a
//! request waits at the [gate](FakeGithubHandle::response_gate), or a limit is reached. Its repositories are bare ones
//! on this disk, so a pull request needs a branch that was really pushed.
//!
//! **Invariant:** only a request with a valid token changes or reads a repository.

mod access;
mod fault;
mod git;
mod hub;
mod pull_request;
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

use crate::base::task_group::TaskGroup;

pub use fault::{FaultRule, InjectedFailure};
pub use hub::{FakeGithubHandle, RecordedCall};
pub use pull_request::FakePullRequest;
pub use route::GithubOperation;

use reply::FakeResponse;
use route::FakeGithubRoute;

/// A fake GitHub that listens and does not answer yet.
#[derive(Debug)]
pub struct FakeGithub {
    listener: TcpListener,
    addr: SocketAddr,
    hub: FakeGithubHandle,
}

/// The error that replaces an answer: the connection ends.
#[derive(Debug, thiserror::Error)]
#[error("the answer is lost, as the test has requested")]
struct ReplyLostError;

impl FakeGithub {
    /// Listens on `addr`, with no repository and no accepted token.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn bind(addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        Ok(Self { listener, addr, hub: FakeGithubHandle::new(format!("http://{addr}")) })
    }

    /// Returns the address on which the server listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns a handle to the server's state.
    pub fn github_handle(&self) -> FakeGithubHandle {
        self.hub.clone()
    }

    /// Serves until `shutdown`, and then aborts open connections, because a request at the gate would never end.
    pub async fn serve(self, shutdown: CancellationToken) {
        let drain = TaskGroup::default();
        while let Some(accepted) = shutdown.run_until_cancelled(self.listener.accept()).await {
            match accepted {
                Ok((stream, _)) => {
                    drain.spawn_task(serve_connection(stream, self.hub.clone(), drain.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "the fake server cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
        // No test opens the gate after the shutdown, so the waiting requests are let through.
        self.hub.response_gate().allow_answers(Semaphore::MAX_PERMITS / 2);
        drain.shut_down(Duration::ZERO).await;
    }
}

async fn serve_connection(stream: TcpStream, hub: FakeGithubHandle, drain: TaskGroup) {
    let hub = Arc::new(hub);
    let working = drain.clone();
    let service = service_fn(move |request| {
        let hub = hub.clone();
        // The connection waits for the result only through this channel.
        let (answered, answer) = oneshot::channel();
        // The work is done in its own task, so that a client's disconnect does not undo or stop the work.
        working.spawn_task(async move { drop(answered.send(handle(&hub, request).await)) });
        async move { answer.await.unwrap_or(Err(ReplyLostError)) }
    });
    // `drain` counts the tasks, and its token aborts the connection at the shutdown.
    let cut = drain.abort_token().clone();
    let server = auto::Builder::new(drain);
    let conversation = server.serve_connection(TokioIo::new(stream), service);
    if let Some(Err(error)) = cut.run_until_cancelled(conversation).await {
        tracing::debug!(%error, "connection ended early");
    }
}

/// Answers one request, or loses the answer if a fault demands it.
async fn handle(
    hub: &FakeGithubHandle,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, ReplyLostError> {
    let (head, body) = request.into_parts();
    // The whole body is read first: a lost answer must come after a complete request.
    let Ok(body) = Limited::new(body, MAX_BODY_BYTES).collect().await else {
        return Err(ReplyLostError);
    };
    let body = body.to_bytes();
    let Some(route) = FakeGithubRoute::match_route(&head) else {
        return Ok(FakeResponse::not_found().into_response());
    };
    // 1. The call is recorded, also if a fault refuses it.
    hub.record_call(&route, &head, &body);
    // 2. A fault before the work: an error answer, or a wait at the gate.
    let fault = hub.take_fault(route.operation());
    match fault {
        Some(InjectedFailure::Refuse(reply)) => return Ok(reply.into_response()),
        Some(InjectedFailure::HoldBefore) => hub.response_gate().wait_for_pass().await,
        _ => (),
    }
    // 3. The work.
    let reply = match &route {
        FakeGithubRoute::Git(ask) => git::handle_git(hub, ask, &head, body).await,
        FakeGithubRoute::Rest(ask) => rest::handle_rest(hub, ask, &head, &body),
    };
    // 4. A fault after the work: a lost answer, or a wait at the gate.
    match fault {
        Some(InjectedFailure::LoseReply) => return Err(ReplyLostError),
        Some(InjectedFailure::HoldAfter) => hub.response_gate().wait_for_pass().await,
        _ => (),
    }
    Ok(reply.into_response())
}

/// The maximum size of a body. Our choice: many times the largest push of the tests.
const MAX_BODY_BYTES: usize = 512 << 20;

/// The pause after a failed accept, such as with no free file descriptor.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
