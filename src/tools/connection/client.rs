//! The HTTP client of one connection: TLS to its one host, at an address that was checked.
//!
//! **Invariant:** the client connects to the very addresses that were checked. No second look-up comes between the check
//! and the connection, and each new connection has a check of its own. Connections that are made at the same time may
//! share a look-up.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Extensions, Request, Response, Uri};
use hyper::body::{Body, Incoming};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{CaptureConnection, capture_connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tower_service::Service;

use super::body::ConnectRequestBody;
use crate::base::host_lookups::{HostLookupError, RunLookups};
use crate::base::host_reach::{HostReach, HostReachError};
use crate::base::interim_limit::{ConnectionProgress, InterimLimitConnector};
use crate::base::tls::load_root_store;
use crate::tools::http_connector::IDLE_TIMEOUT;

/// The client of one connection. Its idle connections are shared by no other run.
#[derive(Clone)]
pub(super) struct ConnectionClient(
    Client<InterimLimitConnector<HttpsConnector<CheckedConnector>>, ConnectRequestBody>,
);

/// A connector that looks a host up, checks the addresses and connects to a checked one.
#[derive(Clone)]
struct CheckedConnector {
    reach: HostReach,
    lookups: RunLookups,
}

/// The reason why no connection was made.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Lookup(#[from] HostLookupError),
    #[error("no address of the host answers")]
    Unreachable(#[source] io::Error),
    #[error("the host does not answer in time")]
    TimedOut,
}

/// The reason why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendFault {
    /// The host has no address that the connection allows.
    Address,
    /// Too many look-ups of hosts run, so that nothing was sent.
    Busy,
    Failed,
}

impl ConnectionClient {
    /// Creates the client. An error is the mistake in the connection's settings.
    pub(super) fn new(
        reach: HostReach,
        ca_file: Option<&Path>,
        lookups: RunLookups,
    ) -> Result<Self, String> {
        let builder = rustls::ClientConfig::builder();
        let tls = match ca_file {
            Some(file) => {
                let roots = load_root_store(file).map_err(|error| error.to_string())?;
                builder.with_root_certificates(roots)
            }
            None => builder.with_native_roots().map_err(|_| {
                "this machine trusts no authority; install its CA certificates, or give `ca_file`"
                    .to_owned()
            })?,
        };
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls.with_no_client_auth())
            .https_only()
            .enable_http1()
            .wrap_connector(CheckedConnector { reach, lookups });
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(MAX_IDLE)
            .http1_max_buf_size(MAX_HEAD_BYTES)
            .build(InterimLimitConnector::new(connector));
        Ok(Self(client))
    }

    /// Sends a request. Redirects are answers like any other.
    ///
    /// hyper sends a request again that it has not begun to send. A request that was sent over an idle connection, as the
    /// server closed it, is sent again once if it may be: it has no body, and its method changes nothing.
    pub(super) async fn send_request(
        &self,
        mut request: Request<ConnectRequestBody>,
    ) -> Result<Response<Incoming>, SendFault> {
        let again = copy_repeatable(&request);
        let connection = capture_connection(&mut request);
        let (answer, is_first) = match (self.0.request(request).await, again) {
            (Err(_), Some(again)) if was_closed_while_idle(&connection) => {
                (self.0.request(again).await, false)
            }
            (answer, _) => (answer, true),
        };
        answer.map_err(|error| {
            tracing::debug!(error = &error as &dyn Error, "a connection's server does not answer");
            match find_lookup_error(&error) {
                // The first request may have reached the server, so the second one is no proof that nothing was sent.
                Some(HostLookupError::Busy) if is_first => SendFault::Busy,
                Some(HostLookupError::Reach(error)) if !is_unknown(error) => SendFault::Address,
                _ => SendFault::Failed,
            }
        })
    }
}

/// Returns a copy of a request that may be sent twice.
fn copy_repeatable(request: &Request<ConnectRequestBody>) -> Option<Request<ConnectRequestBody>> {
    if !request.method().is_safe() || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(request.body().to_empty());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    Some(copy)
}

fn was_closed_while_idle(connection: &CaptureConnection) -> bool {
    let mut facts = Extensions::new();
    if let Some(connected) = &*connection.connection_metadata() {
        connected.get_extras(&mut facts);
    }
    facts.get::<ConnectionProgress>().is_some_and(ConnectionProgress::was_closed_while_idle)
}

fn find_lookup_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a HostLookupError> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(ConnectError::Lookup(error)) = error.downcast_ref::<ConnectError>() {
            return Some(error);
        }
        cause = error.source();
    }
    None
}

fn is_unknown(error: &HostReachError) -> bool {
    matches!(error, HostReachError::Unknown { .. })
}

impl CheckedConnector {
    async fn connect(self, uri: Uri) -> Result<TokioIo<TcpStream>, ConnectError> {
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = uri.port_u16().unwrap_or(443);
        let connecting = async {
            let mut last = io::Error::from(io::ErrorKind::NotConnected);
            for address in self.lookups.find_addresses(host, port, self.reach).await? {
                match TcpStream::connect((address, port)).await {
                    Ok(stream) => {
                        // A failure costs only time: small writes may wait for each other.
                        let _ = stream.set_nodelay(true);
                        return Ok(TokioIo::new(stream));
                    }
                    Err(error) => last = error,
                }
            }
            Err(ConnectError::Unreachable(last))
        };
        tokio::time::timeout(CONNECT_TIMEOUT, connecting)
            .await
            .unwrap_or(Err(ConnectError::TimedOut))
    }
}

impl Service<Uri> for CheckedConnector {
    type Response = TokioIo<TcpStream>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.clone().connect(uri);
        Box::pin(async move { Ok(connecting.await?) })
    }
}

impl fmt::Debug for ConnectionClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectionClient")
    }
}

/// The longest time of a look-up and a connection. Our choice.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The largest head of an answer, in bytes, and the most that is read ahead. Our choice: the memory that a request is counted
/// with.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// The most unused connections. Our choice: clients such as npm make several requests at once.
const MAX_IDLE: usize = 4;
