//! A2, A3, A4: Tests of the service's HTTP API, with the service as a process: grants, refusals, chats and runs.

mod billing;
mod chat;
mod client_disconnect;
mod errors;
mod grant_budget;
mod host_paths;
mod kept_records;
mod openapi;
mod origin_check;
mod reload;
mod request_log;
mod runs;
mod runs_command;
mod server;
mod share_limiter;
mod tenants;

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::process::TEST_TIMEOUT;
use crate::support::service;

/// A run that any grant may request.
fn run_body(model: &str) -> Value {
    let mut body = service::conversation_body("hello");
    body["model"] = model.into();
    body
}

/// Returns the same request as a chat.
fn chat_body(model: &str) -> Value {
    let mut body = service::chat_body("hello");
    body["model"] = model.into();
    body
}

/// Returns the answer to a plain TCP connection.
async fn get_over_tcp(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// Waits until `holds`.
async fn wait_until_async(holds: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < TEST_TIMEOUT, "it never holds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
