//! A client of a service over HTTP, on TCP or on its unix socket, with a grant's token.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::UnixStream;

use crate::base;
use crate::base::interim_limit::{InterimLimitConnector, InterimLimitStream};
use crate::base::secret::SecretString;
use crate::base::task_group::TaskGroup;
use crate::gateway::upstream::{UpstreamScheme, UpstreamUrl};

/// The flags for the service's address and the grant's token.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceArgs {
    /// The service: a URL, or `unix:/path`
    #[arg(
        long = "service",
        value_name = "URL",
        env = "COGNI_SERVICE",
        default_value = "http://127.0.0.1:7070"
    )]
    url: String,

    /// File with a grant's token [env: `COGNI_TOKEN` or `COGNI_TOKEN_FILE`]
    #[arg(long, value_name = "PATH")]
    token_file: Option<PathBuf>,

    /// PEM file of authorities to trust instead of the system's
    #[arg(long, value_name = "PATH", env = "COGNI_SERVICE_CA_FILE")]
    ca_file: Option<PathBuf>,
}

/// A client of one service.
pub(in crate::cli) struct ServiceClient {
    address: ServiceAddress,
    token: Option<SecretString>,
    ca_file: Option<PathBuf>,
    tasks: TaskGroup,
}

enum ServiceAddress {
    Tcp(UpstreamUrl),
    Unix(PathBuf),
}

impl ServiceArgs {
    /// Reads the token, and refuses to send it over a network without encryption.
    pub(in crate::cli) fn client(self) -> anyhow::Result<ServiceClient> {
        let address = match self.url.strip_prefix("unix:") {
            Some(path) => ServiceAddress::Unix(path.into()),
            None => ServiceAddress::Tcp(self.url.parse().map_err(|_| {
                anyhow!(
                    "`--service` is `{}`; give a URL such as http://127.0.0.1:7070, or unix:/path",
                    self.url.escape_debug()
                )
            })?),
        };
        let token = token(self.token_file.as_deref(), |name| std::env::var(name).ok())?;
        if let ServiceAddress::Tcp(target) = &address
            && target.scheme() != UpstreamScheme::Https
            && token.is_some()
            && !is_here(target.host())
        {
            bail!(
                "`--service` is `{target}`, which would send the token over a network in the clear; give `https://`"
            );
        }
        Ok(ServiceClient { address, token, ca_file: self.ca_file, tasks: TaskGroup::default() })
    }
}

impl ServiceClient {
    /// Sends a request and reads the answer as JSON.
    pub(in crate::cli) async fn json(&self, method: Method, path: &str) -> anyhow::Result<Value> {
        self.read_json(self.send(method, path).await?).await
    }

    /// Posts JSON and reads the answer as JSON.
    pub(in crate::cli) async fn post_json(
        &self,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<Value> {
        let body = Some(Bytes::from(body.to_string()));
        self.read_json(self.send_body(Method::POST, path, body).await?).await
    }

    /// Puts JSON and reads the answer as JSON.
    pub(in crate::cli) async fn put_json(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let body = Some(Bytes::from(body.to_string()));
        self.read_json(self.send_body(Method::PUT, path, body).await?).await
    }

    async fn read_json(&self, answer: Response<Incoming>) -> anyhow::Result<Value> {
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await;
        let body =
            body.map_err(|error| anyhow!("{}: its answer breaks off: {error}", self.shown()))?;
        serde_json::from_slice(&body.to_bytes()).with_context(|| {
            format!(
                "{}: its answer is not JSON; check that `cogni-gateway serve` listens there",
                self.shown()
            )
        })
    }

    /// Sends a request, and returns the answer if its status is a success.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
    ) -> anyhow::Result<Response<Incoming>> {
        self.send_body(method, path, None).await
    }

    async fn send_body(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> anyhow::Result<Response<Incoming>> {
        let answer = match &self.address {
            ServiceAddress::Tcp(target) => {
                let request = self.request(method, &format!("{target}{path}"), body)?;
                self.send_tcp(target, request).await
            }
            ServiceAddress::Unix(socket) => {
                self.send_unix(socket, self.request(method, path, body)?).await
            }
        };
        // Only the root cause is useful here: the layers above it say that a connection failed.
        let answer = answer.map_err(|error| {
            let why = error.root_cause().to_string();
            anyhow!(
                "{} does not answer: {why}; start it with `cogni-gateway serve`, or name it with `--service`",
                self.shown()
            )
        })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        // The body has the reason in the format of every error of the service.
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await;
        let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let error_body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let message = error_body["error"]["message"].as_str().unwrap_or("no reason given");
        let hint = match status {
            StatusCode::UNAUTHORIZED => {
                "; give a grant's token in `COGNI_TOKEN`, or its file with `--token-file`"
            }
            _ => "",
        };
        bail!("{} answers {}: {message}{hint}", self.shown(), status.as_u16())
    }

    async fn send_tcp(
        &self,
        target: &UpstreamUrl,
        request: Request<Full<Bytes>>,
    ) -> anyhow::Result<Response<Incoming>> {
        let builder = HttpsConnectorBuilder::new();
        let builder = match &self.ca_file {
            Some(path) => {
                let roots = base::tls::load_root_store(path).map_err(io::Error::other)?;
                let config = rustls::ClientConfig::builder().with_root_certificates(roots);
                builder.with_tls_config(config.with_no_client_auth())
            }
            None if target.scheme() == UpstreamScheme::Https => builder.with_native_roots()?,
            // Without TLS the client needs no certificate authorities, and the machine may have none.
            None => {
                let none = rustls::RootCertStore::empty();
                let config = rustls::ClientConfig::builder().with_root_certificates(none);
                builder.with_tls_config(config.with_no_client_auth())
            }
        };
        let connector = builder.https_or_http().enable_http1().build();
        let connector = InterimLimitConnector::new(connector);
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(client.request(request).await?)
    }

    async fn send_unix(
        &self,
        socket: &Path,
        mut request: Request<Full<Bytes>>,
    ) -> anyhow::Result<Response<Incoming>> {
        let stream = UnixStream::connect(socket).await?;
        let (mut sender, connection) =
            http1::handshake(InterimLimitStream::new(TokioIo::new(stream))).await?;
        // An error of the connection also fails the request, which reports it.
        self.tasks.spawn_task(async { drop(connection.await) });
        request.headers_mut().insert(HOST, HeaderValue::from_static("localhost"));
        Ok(sender.send_request(request).await?)
    }

    fn request(
        &self,
        method: Method,
        uri: &str,
        body: Option<Bytes>,
    ) -> anyhow::Result<Request<Full<Bytes>>> {
        let mut request = Request::builder().method(method).uri(uri);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let mut request = request.body(Full::new(body.unwrap_or_default()))?;
        if let Some(token) = &self.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret()))
                .map_err(|_| anyhow!("the token has characters that a token cannot have"))?;
            // A sensitive header is not printed by debug output.
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }

    fn shown(&self) -> String {
        match &self.address {
            ServiceAddress::Tcp(target) => format!("service at `{target}`"),
            ServiceAddress::Unix(path) => format!("service at `unix:{}`", path.display()),
        }
    }
}

/// Reads the token from the file that the flag or `COGNI_TOKEN_FILE` names, or from `COGNI_TOKEN`.
fn token(
    flag: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<SecretString>> {
    let variable = |name: &str| variable(name).filter(|given| !given.is_empty());
    let file = flag.map(Path::to_owned).or_else(|| variable("COGNI_TOKEN_FILE").map(PathBuf::from));
    let text = match file {
        Some(path) => Some(
            fs::read_to_string(&path)
                .with_context(|| format!("the token's file `{}` cannot be read", path.display()))?,
        ),
        None => variable("COGNI_TOKEN"),
    };
    Ok(text.map(|text| SecretString::new(text.trim())))
}

/// Returns true if data for this host never leaves this machine.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The maximum size of an answer that is not a stream. A run's output has at most two megabytes.
const MAX_BYTES: usize = 16 << 20;
