//! A2, A3, A4: the service over HTTP, as a process of its own: who may ask, how that is refused, chats and runs.

mod billing;
mod chat;
mod client_disconnect;
mod errors;
mod grant_budget;
mod host_paths;
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

use crate::support::process::PATIENCE;
use crate::support::service;

/// A run that anybody could ask for.
fn asked(model: &str) -> Value {
    let mut body = service::ask("hello");
    body["model"] = model.into();
    body
}

/// The same as a chat.
fn chat(model: &str) -> Value {
    let mut body = service::chat("hello");
    body["model"] = model.into();
    body
}

/// What a connection over TCP is answered that a program opens by itself.
async fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// Waits until `holds`.
async fn until(holds: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "it never holds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
