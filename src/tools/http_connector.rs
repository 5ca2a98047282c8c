//! The connections of tools to servers of the operator's choice.

use http::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;

use crate::base::interim_limit::InterimLimitConnector;

/// Parses the address of a server, and returns a connector for it. An error is the mistake.
///
/// # Errors
/// Returns an error if the address is not an `http` or `https` URL, or if the system has no authorities for `https`.
pub(super) fn parse_server_url(
    url: &str,
) -> Result<(Uri, InterimLimitConnector<HttpsConnector<HttpConnector>>), &'static str> {
    let uri: Uri = url.parse().map_err(|_| "is not a URL; give one such as `https://host/path`")?;
    let is_plain = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && uri.query().is_none();
    if !is_plain {
        return Err("must begin with `http://` or `https://` and have no user, password or query");
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
    let connector = builder.https_or_http().enable_http1().build();
    Ok((uri, InterimLimitConnector::new(connector)))
}
