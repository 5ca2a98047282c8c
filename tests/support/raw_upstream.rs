//! An upstream whose bytes the test sends itself.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Makes a server whose connections the test accepts.
pub(crate) async fn listen_locally() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Reads a whole request including its body; after a disconnect, what arrived before.
pub(crate) async fn read_request(stream: &mut TcpStream) -> String {
    let mut seen = vec![];
    while !is_whole(&seen) && stream.read_buf(&mut seen).await.unwrap_or_default() > 0 {}
    String::from_utf8(seen).unwrap()
}

/// Writes and flushes.
pub(crate) async fn send_text(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
}

fn is_whole(seen: &[u8]) -> bool {
    let text = String::from_utf8_lossy(seen);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    body.len() >= length.map_or(0, |length| length.parse().unwrap())
}

/// A unary answer that leaves the connection open.
pub(crate) const ANSWER: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// The head of a chunked stream of events.
pub(crate) const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
