//! Many runs behind one listener, as the program serves them, and clients with tokens.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cogni_gateway::gateway::config::{GatewayConfig, SharedListenerConfig, SharedRunConfig};
use cogni_gateway::gateway::process::{GatewayProcess, RunManager};
use cogni_gateway::gateway::run::token::{RunTokenClaims, RunTokenKeys};
use cogni_gateway::telemetry::audit::verify;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::app::run_config;
use super::client::{ResponseStream, TestResponse, post_request};
use super::model_provider;
use super::test_ca::{CertificateFiles, TestCa};

/// A process with the runs `run-1` and `run-2`.
pub(crate) struct SharedApp {
    pub(crate) upstream: model_provider::RunningProvider,
    pub(crate) address: SocketAddr,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) authority: TestCa,
    pub(crate) runs: RunManager,
    pub(crate) directory: TempDir,
    pub(crate) keys: RunTokenKeys,
    stop: CancellationToken,
    served: JoinHandle<anyhow::Result<()>>,
}

impl SharedApp {
    pub(crate) async fn start() -> Self {
        Self::with(|_, _| ()).await
    }

    /// Starts with a changed configuration.
    pub(crate) async fn with(configure: impl FnOnce(&mut GatewayConfig, &TestCa)) -> Self {
        let upstream = model_provider::start_default().await;
        let (directory, authority) = (tempfile::tempdir().unwrap(), TestCa::new());
        let mut config = shared_config(directory.path(), upstream.addr, &authority);
        configure(&mut config, &authority);
        config.validate().unwrap();
        let app = GatewayProcess::build_process(config).unwrap();
        let (address, metrics) = (app.listen_address().unwrap(), app.metrics_address());
        let (runs, stop) = (app.run_manager().clone(), CancellationToken::new());
        let served = tokio::spawn(app.serve_until_cancelled(stop.clone()));
        let keys = token_keys();
        Self { upstream, address, metrics, authority, runs, directory, keys, stop, served }
    }

    /// Mints a token for a run, valid for an hour.
    pub(crate) fn token(&self, run: &str) -> String {
        self.keys.mint_token(run, Duration::from_hours(1), None, SystemTime::now()).unwrap()
    }

    /// Mints a token that has been valid for a minute, and expires in some seconds.
    pub(crate) fn token_until(&self, run: &str, seconds: i64) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let claims = RunTokenClaims {
            run: run.to_owned(),
            audience: None,
            issued: now - 60,
            expires: now.checked_add_signed(seconds).unwrap(),
        };
        self.keys.sign_claims(&claims, None).unwrap()
    }

    /// Makes one call on a new connection, as an OpenAI client with the API key `key`.
    pub(crate) async fn call(&self, key: &str, path: &str, body: &Value) -> TestResponse {
        self.open(key, path, body).await.finish().await.unwrap()
    }

    /// Returns when the head of the response has arrived.
    pub(crate) async fn open(&self, key: &str, path: &str, body: &Value) -> ResponseStream {
        let authorization = format!("Bearer {key}");
        self.send(post_request(path, body, &[("authorization", &authorization)])).await
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> ResponseStream {
        self.http1().await.send_request(request).await.unwrap().into()
    }

    pub(crate) async fn http1(&self) -> http1::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(self.tls(None, &["http/1.1"]).await.unwrap());
        let (sender, connection) = http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    pub(crate) async fn http2(&self) -> http2::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(Box::new(self.tls(None, &["h2"]).await.unwrap()));
        let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// Opens a TLS connection, with a client certificate if files are given.
    pub(crate) async fn tls(
        &self,
        own: Option<&CertificateFiles>,
        protocols: &[&str],
    ) -> std::io::Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>> {
        let config = Arc::new(self.authority.client(own, protocols));
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(config).connect(name, stream).await
    }

    pub(crate) fn audit_log(&self, run: &str) -> PathBuf {
        self.directory.path().join("audit").join(format!("{run}.jsonl"))
    }

    pub(crate) fn access_log(&self) -> PathBuf {
        self.directory.path().join("access.log")
    }

    /// Returns a run's records, without buffered ones.
    pub(crate) fn records(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.audit_log(run)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the metrics that Prometheus scrapes.
    pub(crate) async fn scrape(&self) -> String {
        let mut stream = TcpStream::connect(self.metrics.unwrap()).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    /// Shuts down in order, and checks that the audit log of every run proves itself.
    pub(crate) async fn stop(self) -> TempDir {
        self.stop.cancel();
        self.served.await.unwrap().unwrap();
        for log in std::fs::read_dir(self.directory.path().join("audit")).unwrap() {
            let report = verify::verify_file(&log.unwrap().path(), None).unwrap();
            assert!(report.finished && report.open == 0, "{report:?}");
        }
        self.directory
    }
}

/// Two runs with files in `directory`.
pub(crate) fn shared_config(
    directory: &Path,
    upstream: SocketAddr,
    authority: &TestCa,
) -> GatewayConfig {
    let audit_dir = directory.join("audit");
    std::fs::create_dir(&audit_dir).unwrap();
    let token_keys_file = directory.join("keys");
    std::fs::write(&token_keys_file, KEYS).unwrap();
    let files = authority.files("127.0.0.1");
    let mut config = run_config(directory, upstream);
    config.identity = GatewayConfig::default().identity;
    config.audit.path = None;
    config.shared = Some(SharedListenerConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        tls_cert_file: Some(files.certificate),
        tls_key_file: Some(files.key),
        token_keys_file,
        audit_dir: Some(audit_dir),
        runs: vec![run_spec("run-1", "acct-1"), run_spec("run-2", "acct-2")],
        ..SharedListenerConfig::default()
    });
    config
}

pub(crate) fn run_spec(run: &str, account: &str) -> SharedRunConfig {
    serde_json::from_value(json!({"run_id": run, "account": account})).unwrap()
}

pub(crate) fn token_keys() -> RunTokenKeys {
    RunTokenKeys::parse_keys(KEYS).unwrap()
}

pub(crate) const KEYS: &str =
    "k1 = 1111111111111111111111111111111111111111111111111111111111111111\n";
