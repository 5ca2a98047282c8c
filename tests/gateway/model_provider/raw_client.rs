//! A raw client that exposes the bytes, the framing and the end of the connection.

use std::io;
use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Everything that arrived on a connection until its end.
#[derive(Debug)]
pub(super) struct RawReply {
    /// The status line and the headers, unchanged.
    pub(super) head: String,
    /// The HTTP chunks of the body, or the body as one chunk.
    pub(super) chunks: Vec<Vec<u8>>,
    /// True if the body ended as HTTP requires.
    pub(super) whole: bool,
    /// The bytes at a place where a chunk should have begun.
    pub(super) garbage: Vec<u8>,
    /// The error that ended the connection; `None` after a FIN.
    pub(super) error: Option<io::ErrorKind>,
}

impl RawReply {
    pub(super) fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let headers = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        headers.into_iter().find(|(is, _)| *is == name).map(|(_, value)| value)
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8(self.chunks.concat()).unwrap()
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text()).unwrap()
    }

    /// Returns the data of each event, without `[DONE]`.
    pub(super) fn events(&self) -> Vec<Value> {
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

/// Sends a request on a new connection and reads to the end.
pub(super) async fn post_json(addr: SocketAddr, path: &str, body: &Value) -> RawReply {
    let mut stream = send_json(addr, path, body).await;
    read_reply(&mut stream).await
}

/// Sends a request without reading the answer.
pub(super) async fn send_json(addr: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: fake\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    send_bytes(addr, &(head + &body)).await
}

pub(super) async fn get_path(addr: SocketAddr, path: &str) -> RawReply {
    call_without_body(addr, "GET", path, "").await
}

/// Sends a request without a body; each of the `headers` ends in `\r\n`.
pub(super) async fn call_without_body(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
) -> RawReply {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: fake\r\nconnection: close\r\n");
    let mut stream = send_bytes(addr, &format!("{head}{headers}\r\n")).await;
    read_reply(&mut stream).await
}

pub(super) async fn send_bytes(addr: SocketAddr, bytes: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    stream
}

/// Reads until `mark` has arrived; returns everything up to then, and what arrived with it.
pub(super) async fn read_until(stream: &mut TcpStream, mark: &str) -> String {
    let mut text = String::new();
    let mut buffer = vec![0; 4096];
    while !text.contains(mark) {
        let read = stream.read(&mut buffer).await.unwrap();
        assert!(read > 0, "ended before `{mark}`: {text}");
        text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    text
}

/// Reads to the end of the connection.
pub(super) async fn read_reply(stream: &mut TcpStream) -> RawReply {
    let mut bytes = Vec::new();
    let error = stream.read_to_end(&mut bytes).await.err().map(|error| error.kind());
    let end = bytes.windows(4).position(|end| end == b"\r\n\r\n").map_or(0, |at| at + 4);
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut reply = RawReply { head, chunks: Vec::new(), whole: false, garbage: Vec::new(), error };
    if let Some(length) = reply.header("content-length") {
        reply.whole = length.parse() == Ok(bytes.len() - end);
        reply.chunks.push(bytes[end..].to_vec());
    } else {
        read_chunks(&bytes[end..], &mut reply);
    }
    reply
}

fn read_chunks(mut rest: &[u8], reply: &mut RawReply) {
    while let Some(line) = rest.windows(2).position(|end| end == b"\r\n") {
        let size = std::str::from_utf8(&rest[..line]).ok();
        let Some(size) = size.and_then(|size| usize::from_str_radix(size, 16).ok()) else { break };
        let Some(chunk) = rest.get(line + 2..line + 2 + size) else { break };
        rest = rest.get(line + 4 + size..).unwrap_or_default();
        if size == 0 {
            reply.whole = rest.is_empty();
            return;
        }
        reply.chunks.push(chunk.to_vec());
    }
    reply.garbage = rest.to_vec();
}
