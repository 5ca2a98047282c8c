//! The way to the API: straight, or through a proxy that sees nothing of what is said.

use std::io;
use std::time::Duration;

use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use octocrab::OctoBody;

use super::Config;
use crate::base;

/// Always the same one: there is but one host.
#[derive(Clone)]
pub(super) enum Way {
    Straight(Http<HttpConnector>),
    Tunnel(Http<Tunnel<HttpConnector>>),
}

pub(super) type Http<C> = legacy::Client<HttpsConnector<C>, OctoBody>;

impl Way {
    pub(super) fn new(config: &Config) -> io::Result<Self> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(config.connect_timeout));
        Ok(match proxy(config) {
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
}

/// The proxy, unless the API is a host that it is not for. As for git, it carries TLS and nothing else.
fn proxy(config: &Config) -> Option<Intercept> {
    let proxy = config.network.proxy.as_ref()?;
    let matcher = Matcher::builder().https(proxy.url().expose()).no(proxy.except()).build();
    matcher.intercept(&config.url)
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
