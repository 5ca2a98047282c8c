//! The connections of tools to servers of the operator's choice.

use std::time::Duration;

use http::Uri;
use http::uri::Authority;
use hyper::body::Body;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::base::interim_limit::InterimLimitConnector;
use crate::base::shared_resolver::{SharedLookupConnector, SharedResolver};

/// A connector to a server of the operator's choice.
pub(super) type ServerConnector = InterimLimitConnector<HttpsConnector<SharedLookupConnector>>;

/// Parses the address of a server, and returns a connector for it. An error is the mistake.
///
/// # Errors
/// Returns an error if the address is not an `http` or `https` URL or has no valid port, or if the system has no authorities
/// for `https`.
pub(super) fn parse_server_url(url: &str) -> Result<(Uri, ServerConnector), &'static str> {
    let uri: Uri = url.parse().map_err(|_| "is not a URL; give one such as `https://host/path`")?;
    let is_plain = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && uri.query().is_none();
    if !is_plain {
        return Err("must begin with `http://` or `https://` and have no user, password or query");
    }
    if !uri.authority().is_some_and(has_valid_port) {
        return Err("has no valid port; give one such as `https://host:8443/path`");
    }
    let builder = HttpsConnectorBuilder::new();
    let builder = if uri.scheme_str() == Some("https") {
        let roots = builder.with_native_roots();
        roots.map_err(|_| "needs `https`, and this machine trusts no authority")?
    } else {
        // Plain HTTP needs no authorities, so a machine without any must not fail here.
        let none =
            rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
        builder.with_tls_config(none.with_no_client_auth())
    };
    let builder = builder.https_or_http().enable_http1();
    let connector = builder.wrap_connector(SharedResolver::connector());
    Ok((uri, InterimLimitConnector::new(connector)))
}

/// Returns true if an authority has no port, or one that a server can have.
pub(super) fn has_valid_port(authority: &Authority) -> bool {
    let has_none = authority.as_str().ends_with(authority.host());
    has_none || authority.port_u16().is_some_and(|port| port != 0)
}

/// Returns a client of one server. It closes an unused connection before the server does, so that few requests meet the
/// end of their connection.
pub(super) fn build_client<B>(connector: ServerConnector) -> Client<ServerConnector, B>
where
    B: Body + Send,
    B::Data: Send,
{
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .build(connector)
}

/// The time for which an unused connection is kept. Our choice: shorter than the usual 5 s of servers.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
