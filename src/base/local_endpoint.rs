//! An endpoint in this process, behind a server that has read the whole request.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

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

/// The future of a reply.
pub type LocalReplyFuture<'a> = Pin<Box<dyn Future<Output = LocalReply> + Send + 'a>>;

/// An endpoint that answers requests.
pub trait LocalEndpoint: Send + Sync {
    /// Answers a request. If the client leaves, the server drops the future.
    fn handle_request<'a>(&'a self, request: LocalRequest<'a>) -> LocalReplyFuture<'a>;
}
