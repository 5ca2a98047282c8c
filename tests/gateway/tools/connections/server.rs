//! A server over TLS whose answers a test decides, and which remembers what it was asked.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::support::test_ca::TestCa;

/// A server over TLS with a name, which is usually `localhost`.
pub(crate) struct SecureServer {
    name: &'static str,
    pub(crate) address: SocketAddr,
    pub(crate) ca: TestCa,
    seen: Arc<Mutex<Vec<ConnectedRequest>>>,
}

/// A request that has arrived.
#[derive(Clone, Debug)]
pub(crate) struct ConnectedRequest {
    pub(crate) method: Method,
    /// The path and the query.
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// An answer: each frame is a chunk of its own.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) frames: Vec<Vec<u8>>,
    /// True if the body never ends.
    pub(crate) is_open: bool,
}

type AnswerMaker = Arc<dyn Fn(&ConnectedRequest) -> Answer + Send + Sync>;

impl Answer {
    pub(crate) fn text(text: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, headers: vec![], frames: vec![text.into()], is_open: false }
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

impl SecureServer {
    /// Starts a server that answers `ok`.
    pub(crate) async fn start() -> Self {
        Self::answering(|_| Answer::text("ok")).await
    }

    pub(crate) async fn answering(
        answer: impl Fn(&ConnectedRequest) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::named("localhost", answer).await
    }

    pub(super) async fn named(
        name: &'static str,
        answer: impl Fn(&ConnectedRequest) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let ca = TestCa::new();
        let tls = TlsAcceptor::from(Arc::new(ca.server(name, &["http/1.1"])));
        let seen = Arc::<Mutex<Vec<ConnectedRequest>>>::default();
        let (log, answer): (_, AnswerMaker) = (Arc::clone(&seen), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (tls, log, answer) = (tls.clone(), Arc::clone(&log), Arc::clone(&answer));
                tokio::spawn(async move {
                    let Ok(socket) = tls.accept(socket).await else { return };
                    let service = service_fn(move |request| {
                        answer_request(Arc::clone(&log), Arc::clone(&answer), request)
                    });
                    let _ =
                        http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Self { name, address, ca, seen }
    }

    pub(crate) fn seen(&self) -> Vec<ConnectedRequest> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.authority())
    }

    /// Returns the name and the port.
    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.name, self.address.port())
    }

    /// Returns the table of a connection to this server, without rules and credential.
    pub(crate) fn table(&self, name: &str, more: &str) -> String {
        let (url, ca) = (self.url(), self.ca.file.display());
        format!(
            "[connections.{name}]\nurl = '{url}'\nca_file = '{ca}'\nallow_private_addresses = true\n{more}\n"
        )
    }
}

async fn answer_request(
    log: Arc<Mutex<Vec<ConnectedRequest>>>,
    answer: AnswerMaker,
    request: Request<Incoming>,
) -> hyper::Result<Response<impl hyper::body::Body<Data = Bytes, Error = std::io::Error>>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let target = head.uri.path_and_query().unwrap().to_string();
    let seen = ConnectedRequest { method: head.method, target, headers: head.headers, body };
    let answer = answer(&seen);
    log.lock().unwrap().push(seen);
    let mut response = Response::builder().status(answer.status);
    for (name, value) in &answer.headers {
        response = response.header(name, value);
    }
    let frames = answer.frames.into_iter().map(|frame| Ok(Frame::data(Bytes::from(frame))));
    let (frames, is_open) = (stream::iter(frames), answer.is_open);
    let rest = stream::once(async move {
        if is_open {
            std::future::pending::<()>().await;
        }
        Ok(Frame::data(Bytes::new()))
    });
    let frames = futures_util::StreamExt::chain(frames, rest);
    Ok(response.body(StreamBody::new(Box::pin(frames))).unwrap())
}
