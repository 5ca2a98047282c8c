//! Tests of a run's socket: which path it may have, and how its connections are served.

mod peer;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use cogni_gateway::base::unix::{SocketPermissions, UnixListenerError, UnixListenerGuard};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::app::TestApp;
use crate::support::client::{ResponseStream, post_request};

/// G1: A crash leaves its socket file behind, and the next process replaces it.
#[test]
fn a_stale_socket_is_replaced() {
    let socket_dir = SocketDir::new();
    drop(UnixListener::bind(socket_dir.socket()).unwrap());
    assert!(socket_dir.socket().exists(), "the file of the dead listener is there");
    let _listener = socket_dir.bind().unwrap();
    UnixStream::connect(socket_dir.socket()).unwrap();
}

/// G1: Two gateways on one path would each get some of the run's calls, so the second is refused.
#[test]
fn a_live_socket_is_refused() {
    let socket_dir = SocketDir::new();
    let _live = UnixListener::bind(socket_dir.socket()).unwrap();
    insta::assert_snapshot!(socket_dir.refusal(), @"`[dir]/llm.sock` is served by a live process; stop it or use another path");
    UnixStream::connect(socket_dir.socket()).unwrap();
}

/// G1: A listener that is too busy to accept counts as live.
#[test]
fn a_live_socket_with_a_full_backlog_is_refused() {
    let socket_dir = SocketDir::new();
    let (_live, _waiting) = overrun_listener(&socket_dir.socket());
    insta::assert_snapshot!(socket_dir.refusal(), @"`[dir]/llm.sock` is served by a live process; stop it or use another path");
}

/// G1: A file that is not a socket belongs to another program, so it is kept.
#[test]
fn a_file_that_is_not_a_socket_is_refused_and_kept() {
    let socket_dir = SocketDir::new();
    fs::write(socket_dir.socket(), "precious").unwrap();
    insta::assert_snapshot!(socket_dir.refusal(), @"`[dir]/llm.sock` exists and is not a socket; remove it or use another path");
    assert_eq!(fs::read_to_string(socket_dir.socket()).unwrap(), "precious");
}

/// G1: The kernel would truncate the path and listen elsewhere, so the path is refused.
#[test]
fn a_path_too_long_is_refused() {
    let long = PathBuf::from(format!("/tmp/{}", "x".repeat(103)));
    let error = UnixListenerGuard::bind_socket(&long, PRIVATE).unwrap_err();
    assert!(matches!(&error, UnixListenerError::PathTooLong { length: 108, .. }));
    insta::with_settings!({filters => [("x{103}", "[103 x]")]}, {
        insta::assert_snapshot!(error, @"`/tmp/[103 x]` is 108 bytes long, the limit for a socket is 107; use a shorter path");
    });
}

/// G1: A path of exactly 107 bytes is served.
#[test]
fn the_longest_path_is_served() {
    let socket_dir = SocketDir::new();
    let name = "x".repeat(107 - socket_dir.0.path().as_os_str().len() - 1);
    let longest = socket_dir.0.path().join(name);
    let _listener = UnixListenerGuard::bind_socket(&longest, PRIVATE).unwrap();
    UnixStream::connect(&longest).unwrap();
}

/// G1: The socket is closed to other users, although the umask of these tests would open it to all.
#[test]
fn only_the_owner_may_connect() {
    let socket_dir = SocketDir::new();
    let _listener = socket_dir.bind().unwrap();
    assert_eq!(fs::metadata(socket_dir.socket()).unwrap().permissions().mode() & 0o777, 0o600);
}

/// G1: The sandbox's user owns the socket if the gateway may change the owner, as root may.
#[test]
fn the_socket_gets_the_configured_owner() {
    let socket_dir = SocketDir::new();
    let permissions = SocketPermissions { mode: 0o660, uid: Some(1001), gid: Some(1002) };
    let _listener = UnixListenerGuard::bind_socket(&socket_dir.socket(), permissions).unwrap();
    let found = fs::metadata(socket_dir.socket()).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o777), (1001, 1002, 0o660));
}

/// G1: An orderly shutdown removes the socket.
#[test]
fn the_socket_is_removed_at_the_end() {
    let socket_dir = SocketDir::new();
    drop(socket_dir.bind().unwrap());
    assert!(!socket_dir.socket().exists());
}

/// G1: A gateway does not remove a socket that another process has put at its path.
#[test]
fn a_socket_of_another_process_is_kept() {
    let socket_dir = SocketDir::new();
    let server = socket_dir.bind().unwrap();
    fs::remove_file(socket_dir.socket()).unwrap();
    let _theirs = UnixListener::bind(socket_dir.socket()).unwrap();
    drop(server);
    UnixStream::connect(socket_dir.socket()).unwrap();
}

/// G1: Two requests in one write are answered in order.
#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let app = TestApp::start().await;
    let first = json!({"model": "fake/text=first", "messages": []}).to_string();
    let second = json!({"model": "fake/text=second", "messages": []}).to_string();
    let request = |body: &str, connection: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let both = request(&first, "keep-alive") + &request(&second, "close");
    let answers = app.client().raw(both.as_bytes()).await;
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 2);
    assert!(answers.find("\"first\"").unwrap() < answers.find("\"second\"").unwrap());
    app.stop().await;
}

/// G1: The server detects the protocol from the first bytes, however they are split.
#[tokio::test]
async fn a_request_may_arrive_byte_by_byte() {
    let app = TestApp::start().await;
    let mut socket = app.client().connect().await;
    // `P` and `PO` could both still become HTTP/2's `PRI`.
    write_bytewise(&mut socket, b"POST /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    app.stop().await;
}

/// G1: The server detects HTTP/2 with prior knowledge, however its preface is split.
#[tokio::test]
async fn an_http2_preface_may_arrive_byte_by_byte() {
    let app = TestApp::start().await;
    let mut socket = app.client().connect().await;
    write_bytewise(&mut socket, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let mut frame = [0; 9];
    socket.read_exact(&mut frame).await.unwrap();
    assert_eq!(frame[3], SETTINGS);
    drop(socket);
    app.stop().await;
}

/// G1: HTTP/2 with prior knowledge carries unary and streamed calls at the same time.
#[tokio::test]
async fn http2_carries_calls_side_by_side() {
    let app = TestApp::start().await;
    let mut connection = app.client().http2().await;
    let mut call = async |model: &str, stream: bool| {
        let body = json!({"model": model, "stream": stream, "messages": []});
        connection
            .send_request(post_request("http://localhost/v1/chat/completions", &body, &[]))
            .await
    };
    let mut held = ResponseStream::from(call("fake/gate=1", true).await.unwrap());
    assert!(held.frame().await.unwrap().unwrap().starts_with(b"data: {"));
    app.upstream.gate.wait_for_waiting(1).await;
    let unary =
        ResponseStream::from(call("fake/text=unary", false).await.unwrap()).finish().await.unwrap();
    assert_eq!(unary.json()["choices"][0]["message"]["content"], "unary");
    app.upstream.gate.allow_answers(1);
    let (rest, in_order) = held.rest().await;
    assert!(in_order && rest.ends_with("data: [DONE]\n\n"));
    app.stop().await;
}

/// G1, G7: Over HTTP/2, a stream that the upstream broke off is reset, not ended.
#[tokio::test]
async fn http2_resets_a_stream_that_the_upstream_broke() {
    let app = TestApp::start().await;
    let mut connection = app.client().http2().await;
    let body = json!({"model": "fake/gate=2;fault=close@2", "stream": true, "messages": []});
    let request = post_request("http://localhost/v1/chat/completions", &body, &[]);
    let mut stream = ResponseStream::from(connection.send_request(request).await.unwrap());
    assert!(stream.frame().await.unwrap().is_some());
    app.upstream.gate.allow_answers(1);
    let (rest, in_order) = stream.rest().await;
    assert!(!in_order && !rest.contains("[DONE]"), "{rest}");
    app.stop().await;
}

/// G14: A connection over the limit is refused with a message and closed; the other connections continue.
#[tokio::test]
async fn a_connection_over_the_limit_is_turned_away() {
    let app = TestApp::with(|config| config.server.max_connections = 1).await;
    let mut first = app.client().connect().await;
    let mut answer = [0; 4096];
    for _ in 0..3 {
        first.write_all(HEALTH).await.unwrap();
        assert!(first.read(&mut answer).await.unwrap() > 0);
        let refusal = app.client().raw(HEALTH).await;
        assert!(refusal.starts_with("HTTP/1.1 503 ") && refusal.contains("retry-after: 1\r\n"));
        assert!(refusal.ends_with("\r\n\r\n{\"error\":\"too_many_connections\"}"), "{refusal}");
    }
    drop(first);
    app.stop().await;
}

/// A directory for a socket.
struct SocketDir(TempDir);

impl SocketDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("llm.sock")
    }

    fn bind(&self) -> Result<UnixListenerGuard, UnixListenerError> {
        UnixListenerGuard::bind_socket(&self.socket(), PRIVATE)
    }

    /// Returns the error that the operator reads if the socket cannot be bound.
    fn refusal(&self) -> String {
        let error = self.bind().unwrap_err().to_string();
        error.replace(self.0.path().to_str().unwrap(), "[dir]")
    }
}

/// Returns a listener that accepts nothing, and enough connections that the next one would wait.
fn overrun_listener(path: &Path) -> (OwnedFd, Vec<OwnedFd>) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let address = SocketAddrUnix::new(path).unwrap();
    let listener = socket();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = vec![];
    loop {
        let client = socket();
        match rustix::net::connect(&client, &address) {
            Ok(()) => waiting.push(client),
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::AGAIN);
                return (listener, waiting);
            }
        }
    }
}

/// Writes each byte by itself, and lets the server read it.
async fn write_bytewise(socket: &mut tokio::net::UnixStream, bytes: &[u8]) {
    for byte in bytes {
        socket.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
}

const PRIVATE: SocketPermissions = SocketPermissions { mode: 0o600, uid: None, gid: None };
const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
/// RFC 9113, section 6.5.
const SETTINGS: u8 = 4;
