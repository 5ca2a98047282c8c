//! An endpoint in this process, behind a server that has read the whole request.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use http::{HeaderMap, Method, StatusCode};

/// The body's share of the memory that the server may hold. An endpoint that keeps a part of the body for longer than the
/// request keeps the share with it.
pub type BodyShare = Arc<dyn Any + Send + Sync>;

/// A request whose body is in memory.
#[derive(Clone, Copy, Debug)]
pub struct LocalRequest<'a> {
    pub method: &'a Method,
    /// The raw path, without the query.
    pub path: &'a str,
    pub query: Option<&'a str>,
    pub headers: &'a HeaderMap,
    pub body: &'a [u8],
    pub share: &'a BodyShare,
    /// The calling process, if the kernel reports it.
    pub pid: Option<u32>,
}

/// A response with a JSON body, or with none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    pub status: StatusCode,
    /// The JSON; empty for a response without a body.
    pub body: String,
    /// The methods that the path has, for a response to another method.
    pub allow: Option<&'static str>,
    /// The code of the error, for the caller's own records; `None` for a success.
    pub code: Option<&'static str>,
    pub retry: RetryAdvice,
}

/// An answer to a request.
pub enum EndpointAnswer {
    Reply(LocalReply),
    /// Server-sent events, the last of which ends the response.
    Events(LocalEvents),
}

/// Server-sent events, each as it goes to the client. The server asks for the next event when the connection has room for
/// it. If the client leaves, the server drops the events.
pub type LocalEvents = Pin<Box<dyn Stream<Item = String> + Send>>;

/// The endpoint's advice whether the client should repeat a refused request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RetryAdvice {
    /// The endpoint gives no advice.
    #[default]
    None,
    /// The same request never succeeds.
    Never,
    After(Duration),
}

/// The future of an answer.
pub type EndpointAnswerFuture<'a> = Pin<Box<dyn Future<Output = EndpointAnswer> + Send + 'a>>;

/// An endpoint that answers requests.
pub trait LocalEndpoint: Send + Sync {
    /// Answers a request. If the client leaves, the server drops the future.
    fn handle_request<'a>(&'a self, request: LocalRequest<'a>) -> EndpointAnswerFuture<'a>;
}

impl From<LocalReply> for EndpointAnswer {
    fn from(reply: LocalReply) -> Self {
        Self::Reply(reply)
    }
}
