//! The scene of the demo about connections: a request with a credential that the agent never sees, one that no rule
//! allows, and an answer that would give the credential away.

use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use http::{Request, Response, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::client::DemoHttpClient;
use super::write_heading;

/// An API that wants a token, at a port of this machine.
pub(super) struct DemoApi {
    listener: TcpListener,
    tls: TlsAcceptor,
    /// The file of its certificate, which the connection trusts.
    certificate: PathBuf,
    /// The file of the token, which the host adds.
    token: PathBuf,
    seen: SeenToken,
}

/// The last `authorization` that the API has received.
#[derive(Clone, Default)]
pub(super) struct SeenToken(Arc<Mutex<String>>);

impl DemoApi {
    pub(super) async fn bind(directory: &Path) -> anyhow::Result<Self> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
        let (certificate, token) = (directory.join("api.pem"), directory.join("api-token"));
        std::fs::write(&certificate, made.cert.pem())?;
        std::fs::write(&token, API_TOKEN)?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let tls = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key.into())?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (tls, seen) = (TlsAcceptor::from(Arc::new(tls)), SeenToken::default());
        Ok(Self { listener, tls, certificate, token, seen })
    }

    /// Returns the table of the connection, as a file of the gateway has it below `[tools]`.
    pub(super) fn table(&self) -> anyhow::Result<String> {
        let (certificate, token) = (self.certificate.display(), self.token.display());
        let port = self.listener.local_addr()?.port();
        Ok(format!(
            "[connections.forge]\nurl = 'https://localhost:{port}'\nallow_private_addresses = true\nca_file = '{certificate}'\ncredential = {{ file = '{token}' }}\nallow = ['GET /repos/acme/*']\n"
        ))
    }

    pub(super) fn seen_token(&self) -> SeenToken {
        self.seen.clone()
    }

    /// Answers one connection after the other until the shutdown: the demo makes one request at a time.
    pub(super) async fn serve(self, stop: CancellationToken) {
        let serve = async {
            while let Ok((stream, _)) = self.listener.accept().await {
                // A connection that fails shows in the narration.
                let _ = self.serve_connection(stream).await;
            }
        };
        stop.run_until_cancelled(serve).await;
    }

    async fn serve_connection(&self, stream: TcpStream) -> anyhow::Result<()> {
        let stream = self.tls.accept(stream).await?;
        let service = service_fn(async |request: Request<Incoming>| {
            let sent = request.headers().get(header::AUTHORIZATION);
            let sent = sent.and_then(|value| value.to_str().ok()).unwrap_or("nothing").to_owned();
            let text = match request.uri().path() {
                ECHO_PATH => format!("you have sent {sent}"),
                _ => "{\"name\":\"site\",\"private\":true}".to_owned(),
            };
            *self.seen.lock() = sent;
            Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from(text))))
        });
        let server =
            http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
        Ok(server.await?)
    }
}

impl SeenToken {
    fn lock(&self) -> std::sync::MutexGuard<'_, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes requests over the connection, and narrates what both sides saw.
pub(super) async fn narrate_connections(
    client: &DemoHttpClient<'_>,
    seen: &SeenToken,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    write_heading(
        out,
        "7. An API behind a connection: the host adds a token that the agent never sees",
    )?;
    let answer = client.get("/connect/forge/repos/acme/site").await?;
    writeln!(out, "  agent saw      {} {}", answer.status, answer.text())?;
    writeln!(out, "  the API saw    authorization: {}", &*seen.lock())?;
    let answer = client.get("/connect/forge/repos/other/site").await?;
    let error = answer.json()["error"].clone();
    let [layer, rule] =
        ["layer", "rule"].map(|name| error[name].as_str().unwrap_or_default().to_owned());
    writeln!(
        out,
        "  another path   {} {} by layer {layer}, rule {rule}",
        answer.status,
        answer.error_code()
    )?;
    let answer = client.get(&format!("/connect/forge{ECHO_PATH}")).await?;
    writeln!(out, "  an echo of it  {} {}", answer.status, answer.error_code())?;
    Ok(())
}

/// The token that the fake API wants.
const API_TOKEN: &str = "api-real-token";

/// The path whose answer repeats the token.
const ECHO_PATH: &str = "/repos/acme/echo";
