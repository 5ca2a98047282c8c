//! T6: Tests of a connection's server that reads nothing, or closes when it should not.

use std::future::pending;
use std::sync::Arc;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{code_of, start_app};
use crate::support::app::TestApp;
use crate::support::test_ca::TestCa;

/// A listener over TLS at `localhost`, and the table of a connection to it.
pub(super) struct RawServer {
    listener: TcpListener,
    tls: TlsAcceptor,
    pub(super) table: String,
    _ca: TestCa,
}

impl RawServer {
    pub(super) async fn start(more: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let ca = TestCa::new();
        let tls = TlsAcceptor::from(Arc::new(ca.server("localhost", &["http/1.1"])));
        let (port, file) = (listener.local_addr().unwrap().port(), ca.file.display());
        let table = format!(
            "[connections.api]\nurl = 'https://localhost:{port}'\nca_file = '{file}'\nallow_private_addresses = true\nallow = ['* /**']\n{more}\n"
        );
        Self { listener, tls, table, _ca: ca }
    }

    pub(super) async fn accept(&self) -> TlsStream<TcpStream> {
        let (socket, _) = self.listener.accept().await.unwrap();
        self.tls.accept(socket).await.unwrap()
    }
}

/// Reads the head of a request, and returns its first line.
pub(super) async fn read_head(stream: &mut TlsStream<TcpStream>) -> String {
    let mut head = vec![];
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap().lines().next().unwrap().to_owned()
}

async fn answer_ok(stream: &mut TlsStream<TcpStream>) {
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    stream.flush().await.unwrap();
}

/// Sends the head of a request with a body of a gigabyte.
async fn begin_upload(app: &TestApp) -> UnixStream {
    let mut client = app.client().connect().await;
    let head =
        "POST /connect/api/a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    client
}

/// T6: a client that leaves while its upload is blocked is noticed, although nothing is read from it.
#[tokio::test]
async fn a_client_that_leaves_a_blocked_upload_is_noticed() {
    // The server's silence would end the request long after the test.
    let server = RawServer::start("timeout = '1h'").await;
    let app = start_app(&server.table).await;
    let mut client = begin_upload(&app).await;
    let mut stream = server.accept().await;
    assert_eq!(read_head(&mut stream).await, "POST /a HTTP/1.1");
    // The server reads no further, so that every buffer on the way is full at last.
    let chunk = vec![b'x'; 1 << 20];
    let upload = async {
        loop {
            client.write_all(&chunk).await.unwrap();
        }
    };
    let is_stuck = tokio::time::timeout(std::time::Duration::from_secs(1), upload).await.is_err();
    assert!(is_stuck);
    drop(client);
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(settled[0]["outcome"], "client_gone");
    let sent = settled[0]["bytes_out"].as_u64().unwrap();
    assert!(sent > 0 && sent < 1_000_000_000);
    assert_eq!(app.run.ledger.connection_spending()["api"].requests, 1);
    drop(stream);
    app.stop().await;
}

/// T6: a client that leaves while the answer is silent and the upload is blocked is noticed, too.
#[tokio::test]
async fn a_client_that_leaves_a_blocked_upload_behind_an_answer_is_noticed() {
    let server = RawServer::start("timeout = '1h'").await;
    let app = start_app(&server.table).await;
    let mut client = begin_upload(&app).await;
    let mut stream = server.accept().await;
    read_head(&mut stream).await;
    let begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun";
    stream.write_all(begun).await.unwrap();
    stream.flush().await.unwrap();
    let (mut reader, mut writer) = client.split();
    let chunk = vec![b'x'; 1 << 20];
    let upload = async {
        loop {
            if writer.write_all(&chunk).await.is_err() {
                pending::<()>().await;
            }
        }
    };
    let read = async {
        let mut seen = String::new();
        while !seen.ends_with("begun") {
            let mut piece = [0; 1024];
            let count = reader.read(&mut piece).await.unwrap();
            seen += str::from_utf8(&piece[..count]).unwrap();
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    };
    tokio::select! {
        () = upload => unreachable!("it never ends"),
        () = read => {}
    }
    drop(client);
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(
        (&settled[0]["outcome"], &settled[0]["status"]),
        (&json!("client_gone"), &json!(200))
    );
    drop(stream);
    app.stop().await;
}

/// T6: a server that closes an idle connection as the next request comes costs no failure where the request can be sent
/// again; a request that may have changed something is not sent twice.
#[tokio::test]
async fn a_connection_that_was_closed_while_idle_is_replaced() {
    let server = RawServer::start("").await;
    let app = start_app(&server.table).await;
    let (client, get) = (app.client(), async |path: &str| code_of(&app.client().get(path).await));
    // 1. One request is answered; the next one meets the end of the connection, and is sent again on a new one.
    let serve = async {
        let mut first = server.accept().await;
        read_head(&mut first).await;
        answer_ok(&mut first).await;
        assert_eq!(read_head(&mut first).await, "GET /two HTTP/1.1");
        drop(first);
        let mut second = server.accept().await;
        assert_eq!(read_head(&mut second).await, "GET /two HTTP/1.1");
        answer_ok(&mut second).await;
        // 2. A request with a body is not sent again.
        assert_eq!(read_head(&mut second).await, "POST /three HTTP/1.1");
        drop(second);
        // 3. A new connection that fails is a failure.
        let mut third = server.accept().await;
        assert_eq!(read_head(&mut third).await, "GET /four HTTP/1.1");
        drop(third);
        // 4. An answer that has begun is not asked for again.
        let mut fourth = server.accept().await;
        read_head(&mut fourth).await;
        answer_ok(&mut fourth).await;
        assert_eq!(read_head(&mut fourth).await, "GET /six HTTP/1.1");
        fourth.write_all(b"HTTP/1.1 2").await.unwrap();
        fourth.flush().await.unwrap();
    };
    let ask = async {
        let mut codes = vec![get("/connect/api/one").await, get("/connect/api/two").await];
        codes.push(code_of(&client.ask(Method::POST, "/connect/api/three", "x", &[]).await));
        for path in ["/connect/api/four", "/connect/api/five", "/connect/api/six"] {
            codes.push(get(path).await);
        }
        codes
    };
    let (codes, ()) = tokio::join!(ask, serve);
    let failed = "502 upstream_failed";
    assert_eq!(codes, ["200 -", "200 -", failed, failed, "200 -", failed]);
    assert_eq!(app.run.ledger.connection_spending()["api"].requests, 6);
    app.stop().await;
}
