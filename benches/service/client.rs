//! A client of the service that opens one connection per request, which is the most expensive way.

use std::net::SocketAddr;
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

pub(super) struct ServiceClient {
    address: SocketAddr,
}

impl ServiceClient {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self { address }
    }

    /// Returns the status and the body.
    pub(super) async fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> (u16, Value) {
        let mut stream = self.open(method, path, body).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.expect("an answer has a status"), serde_json::from_str(body).unwrap_or_default())
    }

    /// Reads the data of each event until the last.
    pub(super) async fn events(&self, path: &str, mut told: impl FnMut(&Value)) {
        let mut lines = self.open("GET", path, None).await.lines();
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(data) = line.strip_prefix("data:") {
                told(&serde_json::from_str(data).unwrap_or_default());
            }
        }
    }

    async fn open(&self, method: &str, path: &str, body: Option<&Value>) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        BufReader::new(stream)
    }
}

/// Sends SIGTERM.
pub(super) fn terminate_child(child: &Child) -> nix::Result<()> {
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM)
}
