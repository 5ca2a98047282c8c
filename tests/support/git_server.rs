//! A git server like GitHub's: smart HTTP by git's own `http-backend`, for clients with the token.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Serves the repositories below a directory until it is dropped. The server has its own thread, so that tests without
/// a runtime can use it.
pub(crate) struct GitServer {
    pub(crate) address: SocketAddr,
    state: Arc<GitServerState>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

struct GitServerState {
    root: PathBuf,
    /// The required `Authorization` value; it can change, as a token expires.
    accepted: Mutex<String>,
    /// `METHOD path?query status` of each request.
    seen: Mutex<Vec<String>>,
    /// The number of further answers to pushes that are lost after git has executed the push.
    losing: Mutex<usize>,
    /// True if pushes get a list of refs without end.
    is_listing_on: AtomicBool,
    /// The bytes of that list that were sent.
    listed: AtomicUsize,
}

impl GitServer {
    /// Starts a server that accepts `token` as GitHub does: as the password of `x-access-token`.
    pub(crate) fn start(root: &Path, token: &str) -> Self {
        Self::launch(root, token, None)
    }

    /// Starts a server over TLS, with the certificate's name.
    pub(crate) fn start_tls(root: &Path, token: &str, tls: rustls::ServerConfig) -> Self {
        Self::launch(root, token, Some(TlsAcceptor::from(Arc::new(tls))))
    }

    fn launch(root: &Path, token: &str, tls: Option<TlsAcceptor>) -> Self {
        let state = Arc::new(GitServerState {
            root: root.canonicalize().unwrap(),
            accepted: Mutex::new(basic_auth(token)),
            seen: Mutex::default(),
            losing: Mutex::default(),
            is_listing_on: AtomicBool::default(),
            listed: AtomicUsize::default(),
        });
        let stop = CancellationToken::new();
        let (served, until) = (state.clone(), stop.clone());
        let (sender, address) = std::sync::mpsc::sync_channel(1);
        let thread = thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                until.run_until_cancelled(accept_connections(listener, tls, served)).await;
            });
        });
        Self { address: address.recv().unwrap(), state, stop, thread: Some(thread) }
    }

    /// Returns the URL of the repository in `directory`, below the root.
    pub(crate) fn url(&self, directory: &str) -> String {
        format!("http://{}/{directory}", self.address)
    }

    /// Accepts only this token from now on.
    pub(crate) fn accept(&self, token: &str) {
        *self.state.accepted.lock().unwrap() = basic_auth(token);
    }

    /// Executes the next push and loses its answer.
    pub(crate) fn lose_an_answer(&self) {
        *self.state.losing.lock().unwrap() += 1;
    }

    /// Answers the next pushes with a list of refs without end, and gives up only after [`MAX_LISTED_BYTES`].
    pub(crate) fn list_refs_without_end(&self) {
        self.state.is_listing_on.store(true, Ordering::Relaxed);
    }

    /// Returns the number of bytes that were sent of such lists.
    pub(crate) fn listed_bytes(&self) -> usize {
        self.state.listed.load(Ordering::Relaxed)
    }

    /// Returns `METHOD path?query status` of each request so far.
    pub(crate) fn seen(&self) -> Vec<String> {
        self.state.seen.lock().unwrap().clone()
    }
}

impl Drop for GitServer {
    fn drop(&mut self) {
        self.stop.cancel();
        self.thread.take().unwrap().join().unwrap();
    }
}

async fn accept_connections(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    state: Arc<GitServerState>,
) {
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        let (tls, state) = (tls.clone(), state.clone());
        // A client that disconnects, or does not trust the certificate, is no failure.
        tokio::spawn(async move {
            match tls {
                None => serve(socket, state).await,
                Some(tls) => {
                    if let Ok(socket) = tls.accept(socket).await {
                        serve(socket, state).await;
                    }
                }
            }
        });
    }
}

async fn serve(socket: impl AsyncRead + AsyncWrite + Unpin, state: Arc<GitServerState>) {
    let service = service_fn(move |request| answer_request(state.clone(), request));
    let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
}

async fn answer_request(
    state: Arc<GitServerState>,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, std::io::Error> {
    let is_push_list = request.uri().query() == Some("service=git-receive-pack");
    if is_push_list && state.is_listing_on.load(Ordering::Relaxed) {
        return Ok(endless_ref_list(state));
    }
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let request_line = format!("{} {}", head.method, head.uri);
    let is_push = head.uri.path().ends_with("/git-receive-pack");
    let accepted = state.accepted.lock().unwrap().clone();
    let is_known = head
        .headers
        .get("authorization")
        .is_some_and(|header| header.as_bytes() == accepted.as_bytes());
    let response = if is_known {
        let (state, head) = (state.clone(), Request::from_parts(head, ()));
        tokio::task::spawn_blocking(move || run_backend(&state.root, &head, &body)).await.unwrap()
    } else {
        let asks =
            Response::builder().status(401).header("www-authenticate", "Basic realm=\"git\"");
        asks.body(Full::default()).unwrap()
    };
    state.seen.lock().unwrap().push(format!("{request_line} {}", response.status().as_u16()));
    if is_push && response.status() == StatusCode::OK {
        let mut losing = state.losing.lock().unwrap();
        if *losing > 0 {
            *losing -= 1;
            return Err(std::io::Error::other("the answer is lost"));
        }
    }
    Ok(response.map(BodyExt::boxed_unsync))
}

/// Returns the answer to a push whose list of refs has no end.
fn endless_ref_list(state: Arc<GitServerState>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let mut lines = vec![];
    for number in 1..=20_000 {
        writeln!(lines, "0046{number:040x} refs/heads/many/{number:08}").unwrap();
    }
    let lines = Bytes::from(lines);
    let head = Bytes::from_static(b"001f# service=git-receive-pack\n0000");
    let list = std::iter::once(head).chain(std::iter::repeat(lines));
    let list = list.take_while(move |piece| {
        state.listed.fetch_add(piece.len(), Ordering::Relaxed) < MAX_LISTED_BYTES
    });
    let frames = futures_util::stream::iter(list.map(|piece| Ok(Frame::data(piece))));
    Response::builder()
        .header("content-type", "application/x-git-receive-pack-advertisement")
        .body(StreamBody::new(frames).boxed_unsync())
        .unwrap()
}

/// Passes one request through the CGI program.
fn run_backend(root: &Path, request: &Request<()>, body: &[u8]) -> Response<Full<Bytes>> {
    let header = |name: &str| header_text(request.headers(), name);
    let mut child = Command::new("git")
        .arg("http-backend")
        .env("GIT_PROJECT_ROOT", root)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("REMOTE_USER", "x-access-token")
        .env("REMOTE_ADDR", "127.0.0.1")
        .env("REQUEST_METHOD", request.method().as_str())
        .env("PATH_INFO", request.uri().path())
        .env("QUERY_STRING", request.uri().query().unwrap_or_default())
        .env("CONTENT_TYPE", header("content-type"))
        .env("CONTENT_LENGTH", body.len().to_string())
        .env("HTTP_CONTENT_ENCODING", header("content-encoding"))
        .env("GIT_PROTOCOL", header("git-protocol"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("git is installed");
    let mut input = child.stdin.take().unwrap();
    let output = thread::scope(|scope| {
        scope.spawn(move || drop(input.write_all(body)));
        let mut output = vec![];
        child.stdout.take().unwrap().read_to_end(&mut output).unwrap();
        output
    });
    child.wait().unwrap();
    parse_cgi_output(&output)
}

/// Parses a CGI program's output, whose status is in a header.
fn parse_cgi_output(output: &[u8]) -> Response<Full<Bytes>> {
    let end =
        output.windows(4).position(|four| four == b"\r\n\r\n").expect("the head of a response");
    let head = String::from_utf8_lossy(&output[..end]).into_owned();
    let mut response = Response::builder();
    for (name, value) in head.lines().map(|line| line.split_once(": ").expect("a header")) {
        response = match name {
            "Status" => response.status(&value[..3]),
            _ => response.header(name, value),
        };
    }
    response.body(Bytes::copy_from_slice(&output[end + 4..]).into()).unwrap()
}

fn header_text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
}

fn basic_auth(token: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let credentials = format!("x-access-token:{token}");
    let mut encoded = String::from("Basic ");
    for group in credentials.as_bytes().chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let is_there = digit <= group.len();
            let sextet = (bits >> (18 - 6 * digit) & 63) as usize;
            encoded.push(if is_there { char::from(DIGITS[sextet]) } else { '=' });
        }
    }
    encoded
}

/// The bytes after which a list of refs ends: much more than a push may hold.
const MAX_LISTED_BYTES: usize = 1 << 30;
