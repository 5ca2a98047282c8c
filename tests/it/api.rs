//! A2, A3, A4: the service over HTTP, as a process of its own: who may ask, how that is refused, chats and runs.

mod chat;
mod document;
mod operate;
mod refusal;
mod run;

use std::time::{Duration, Instant};

/// Waits until `holds`: a bound, not a measure.
async fn until(holds: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < Duration::from_mins(1), "it never holds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
