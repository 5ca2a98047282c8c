//! An endpoint in this process that reads a request and writes its response piece by piece.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use http::{Request, Response, request};
use http_body_util::combinators::UnsyncBoxBody;
use rustls::ServerConfig;

use super::keyed_permits::KeyedPermit;

/// A request whose body has not been read.
#[derive(Debug)]
pub struct StreamedRequest {
    pub request: Request<StreamedBody>,
    /// The calling process, if the kernel reports it.
    pub pid: Option<u32>,
    /// The name of the tunnel that the request came through; `None` for a request that came without one.
    pub tunnel: Option<Arc<str>>,
}

/// The head of a request for a tunnel.
#[derive(Clone, Copy, Debug)]
pub struct TunnelRequest<'a> {
    pub head: &'a request::Parts,
    /// True if the request has a body, which such a request must not have.
    pub has_body: bool,
    /// The calling process, if the kernel reports it.
    pub pid: Option<u32>,
}

/// A tunnel that may be opened. The server ends TLS in it, and hands its requests to the endpoint.
pub struct OpenTunnel {
    /// The name that the requests of the tunnel have.
    pub name: Arc<str>,
    pub tls: Arc<ServerConfig>,
    /// The future that ends when the tunnel must end, whatever its client does.
    pub stop: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The permit among the open tunnels.
    pub permit: KeyedPermit,
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

    /// Decides about a tunnel.
    ///
    /// # Errors
    /// Returns the reply to a refused request.
    fn open_tunnel(&self, request: TunnelRequest<'_>) -> Result<OpenTunnel, Box<StreamedReply>>;

    /// Returns the most bytes of a request's body that the endpoint keeps in memory at one time, beside the piece that
    /// passes.
    fn kept_bytes(&self, request: &StreamedRequest) -> u64;
}

/// The path of the list of connections.
pub const CONNECT_LIST_PATH: &str = "/connect";

/// The path of the certificate that the programs of a sandbox must trust to use tunnels.
pub const CONNECT_CERTIFICATE_PATH: &str = "/connect/ca.pem";

/// The beginning of the path of a request over a connection.
pub const CONNECT_PATH_PREFIX: &str = "/connect/";
