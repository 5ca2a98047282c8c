//! A2, A3, A4: the service over HTTP, as a process of its own: who may ask, how that is refused, chats and runs.

mod browser;
mod chat;
mod document;
mod gone;
mod operate;
mod refusal;
mod run;

use std::time::{Duration, Instant};

use serde_json::Value;

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

/// Waits until `holds`.
async fn until(holds: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "it never holds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
