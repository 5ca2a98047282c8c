//! The way to the API: straight, or through a proxy that sees nothing of what is said.

use std::error::Error as Cause;
use std::io;
use std::iter;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::CertificateError;

use super::error::short;
use super::{Config, Error};
use crate::base;

/// Always the same one: there is but one host.
#[derive(Clone)]
pub(super) enum Way {
    Straight(Http<HttpConnector>),
    Tunnel(Http<Tunnel<HttpConnector>>),
}

pub(super) type Http<C> = legacy::Client<HttpsConnector<C>, Full<Bytes>>;

impl Way {
    pub(super) fn new(config: &Config) -> io::Result<Self> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(config.connect_timeout));
        Ok(match config.network.proxy_to(&config.url) {
            None => Self::Straight(client(config, tcp)?),
            Some(proxy) => {
                let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
                let tunnel = match proxy.basic_auth() {
                    Some(auth) => tunnel.with_auth(auth.clone()),
                    None => tunnel,
                };
                Self::Tunnel(client(config, tunnel)?)
            }
        })
    }

    /// Sends a request once.
    ///
    /// # Errors
    /// There is no answer; the text says why, and which setting to look at.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Error> {
        let (sent, setting) = match self {
            Self::Straight(http) => (http.request(request).await, "GITHUB_API_URL"),
            Self::Tunnel(http) => (http.request(request).await, "HTTPS_PROXY"),
        };
        sent.map_err(|error| Error::Unanswered(told(&error, setting)))
    }
}

/// Tells why a request was not answered. `setting` is where the way begins.
fn told(error: &legacy::Error, setting: &str) -> String {
    let causes = || iter::successors(Some(error as &(dyn Cause + 'static)), |error| cause(*error));
    let certificate = causes().find_map(|cause| match cause.downcast_ref() {
        Some(rustls::Error::InvalidCertificate(error)) => Some(error),
        _ => None,
    });
    if let Some(error) = certificate {
        let why = short(&error.to_string());
        return format!("its certificate is not accepted ({why}); {}", advice(error));
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

/// Finds the last cause of an error: each error before it repeats what it wraps, or says less.
pub(super) fn root_cause(error: &(dyn Cause + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| cause(*error));
    causes.last().map(|last| short(&last.to_string())).unwrap_or_default()
}

/// Finds what an error wraps. An `io::Error` skips over that when it is asked for its source.
fn cause<'a>(error: &'a (dyn Cause + 'static)) -> Option<&'a (dyn Cause + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

fn advice(error: &CertificateError) -> &'static str {
    use CertificateError as E;
    match error {
        E::Expired | E::ExpiredContext { .. } | E::NotValidYet | E::NotValidYetContext { .. } => {
            "renew it, or set this machine's clock"
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => "check `GITHUB_API_URL`",
        _ => "name the PEM file of the authority that signed it in `GITHUB_CA_FILE`",
    }
}

fn client<C: Clone>(config: &Config, inner: C) -> io::Result<Http<C>>
where
    HttpsConnector<C>: Connect + Clone,
{
    let builder = HttpsConnectorBuilder::new();
    let builder = match &config.network.ca_file {
        Some(path) => {
            let roots = base::tls::authorities(path).map_err(io::Error::other)?;
            let tls = rustls::ClientConfig::builder().with_root_certificates(roots);
            builder.with_tls_config(tls.with_no_client_auth())
        }
        None => builder.with_native_roots()?,
    };
    let connector = builder.https_or_http().enable_http1().wrap_connector(inner);
    Ok(legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .build(connector))
}

const IDLE: Duration = Duration::from_secs(30);
