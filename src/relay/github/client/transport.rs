//! The connection to the API: direct, or through a proxy that sees only encrypted data.

use std::error::Error as Cause;
use std::io;
use std::iter;
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::Connect;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::CertificateError;

use super::error::one_line;
use super::{GithubConfig, GithubError};
use crate::base;
use crate::base::interim_limit::InterimLimitConnector;
use crate::base::shared_resolver::{SharedLookupConnector, SharedResolver};

/// The HTTP client of one API, which has one host and so one route.
#[derive(Clone)]
pub(super) enum GithubTransport {
    Direct(HttpsClient<SharedLookupConnector>),
    Proxied(HttpsClient<Tunnel<SharedLookupConnector>>),
}

pub(super) type HttpsClient<C> =
    legacy::Client<InterimLimitConnector<HttpsConnector<C>>, Full<Bytes>>;

impl GithubTransport {
    pub(super) fn new(config: &GithubConfig) -> io::Result<Self> {
        let mut tcp = SharedResolver::connector();
        tcp.set_connect_timeout(Some(config.connect_timeout));
        Ok(match config.network.proxy_for(&config.url) {
            None => Self::Direct(build_client(config, tcp)?),
            Some(proxy) => {
                // The proxy gets a `CONNECT` request only. TLS runs from this process to the API.
                let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
                let tunnel = match proxy.basic_auth() {
                    Some(auth) => tunnel.with_auth(auth.clone()),
                    None => tunnel,
                };
                Self::Proxied(build_client(config, tunnel)?)
            }
        })
    }

    /// Sends a request once.
    ///
    /// # Errors
    /// Returns [`GithubError::NoResponse`] if there is no answer. Its text has the reason and the setting to check.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, GithubError> {
        let (sent, setting) = match self {
            Self::Direct(http) => (http.request(request).await, "GITHUB_API_URL"),
            Self::Proxied(http) => (http.request(request).await, "HTTPS_PROXY"),
        };
        sent.map_err(|error| GithubError::NoResponse(describe_error(&error, setting)))
    }
}

/// Returns the reason why a request was not answered. `setting` names the address that was connected to.
fn describe_error(error: &legacy::Error, setting: &str) -> String {
    let causes =
        || iter::successors(Some(error as &(dyn Cause + 'static)), |error| wrapped_error(*error));
    // A certificate error is the most specific cause, wherever it is in the chain of causes.
    let certificate = causes().find_map(|cause| match cause.downcast_ref() {
        Some(rustls::Error::InvalidCertificate(error)) => Some(error),
        _ => None,
    });
    if let Some(error) = certificate {
        let why = one_line(&error.to_string());
        return format!("its certificate is not accepted ({why}); {}", certificate_advice(error));
    }
    let why = root_cause(error);
    if error.is_connect() {
        return format!("there is no connection to it ({why}); check `{setting}` and the network");
    }
    let is_not_http =
        causes().any(|cause| cause.downcast_ref().is_some_and(hyper::Error::is_parse));
    if is_not_http {
        return format!("what answers does not speak HTTP ({why}); check `GITHUB_API_URL`");
    }
    why
}

/// Returns the text of the last cause of an error. Each error before the last repeats the cause, or says less.
pub(super) fn root_cause(error: &(dyn Cause + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| wrapped_error(*error));
    causes.last().map(|last| one_line(&last.to_string())).unwrap_or_default()
}

/// Returns the error that an error wraps. The `source` of an `io::Error` would skip the error that it wraps.
fn wrapped_error<'a>(error: &'a (dyn Cause + 'static)) -> Option<&'a (dyn Cause + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

/// Returns the advice for a certificate error.
fn certificate_advice(error: &CertificateError) -> &'static str {
    use CertificateError as E;
    match error {
        E::Expired | E::ExpiredContext { .. } | E::NotValidYet | E::NotValidYetContext { .. } => {
            "renew it, or set this machine's clock"
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => "check `GITHUB_API_URL`",
        // The TLS library has no variant of its own for this error.
        E::Other(_) if error.to_string().contains("CaUsedAsEndEntity") => {
            "the server shows an authority's certificate as its own, such as a self-signed one: make the server one \
             that the authority signs, and keep the authority's PEM file in `GITHUB_CA_FILE`"
        }
        _ => "name the PEM file of the authority that signed it in `GITHUB_CA_FILE`",
    }
}

/// Builds a client with the configured certificate authority, or with this machine's authorities.
fn build_client<C: Clone>(config: &GithubConfig, inner: C) -> io::Result<HttpsClient<C>>
where
    InterimLimitConnector<HttpsConnector<C>>: Connect + Clone,
{
    let builder = HttpsConnectorBuilder::new();
    // A configured authority replaces this machine's authorities, and is not added to them.
    let builder = match &config.network.ca_file {
        Some(path) => {
            let roots = base::tls::load_root_store(path).map_err(io::Error::other)?;
            let tls = rustls::ClientConfig::builder().with_root_certificates(roots);
            builder.with_tls_config(tls.with_no_client_auth())
        }
        None if config.url.scheme() == Some(&Scheme::HTTPS) => builder.with_native_roots()?,
        // Without TLS the client needs no certificate authorities, and the machine may have none.
        None => {
            let none = rustls::RootCertStore::empty();
            let tls = rustls::ClientConfig::builder().with_root_certificates(none);
            builder.with_tls_config(tls.with_no_client_auth())
        }
    };
    // HTTP/1.1 only, as the module promises: one request, one answer.
    let connector = builder.https_or_http().enable_http1().wrap_connector(inner);
    let connector = InterimLimitConnector::new(connector);
    Ok(legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .build(connector))
}

/// The time after which an idle connection is closed. Our choice.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
