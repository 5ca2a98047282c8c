//! An endpoint in this process that reads a request and writes its response piece by piece.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;

/// A request whose body has not been read.
#[derive(Debug)]
pub struct StreamedRequest {
    pub request: Request<Incoming>,
    /// The calling process, if the kernel reports it.
    pub pid: Option<u32>,
}

/// A response whose body is not complete yet.
pub struct StreamedReply {
    pub response: Response<StreamedBody>,
    /// The code of the error, for the caller's own records; `None` for a success.
    pub code: Option<&'static str>,
    /// The bytes of the request's body that were read so far.
    pub request_bytes: Arc<AtomicU64>,
}

/// A body that may end with an error. The client sees a connection that ends without its terminator then.
pub type StreamedBody = UnsyncBoxBody<Bytes, Box<dyn Error + Send + Sync>>;

/// The future of a streamed reply.
pub type StreamedReplyFuture<'a> = Pin<Box<dyn Future<Output = StreamedReply> + Send + 'a>>;

/// An endpoint that answers requests while they arrive.
pub trait StreamedEndpoint: Send + Sync {
    /// Answers a request. If the client leaves, the server drops the future or the body.
    fn handle_streamed(&self, request: StreamedRequest) -> StreamedReplyFuture<'_>;
}
