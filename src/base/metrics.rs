//! Prometheus text, and the small listener that Prometheus scrapes.
//!
//! **Invariant:** the listener answers every client that reaches it, so it is bound where only operators can connect:
//! never on a socket that is mounted into a sandbox.

pub mod discovery;
mod listener;
mod process;

use prometheus::TextEncoder;
use prometheus::proto::MetricFamily;

pub use listener::{HttpPage, serve_pages};
pub use process::ProcessCollector;

/// Renders the families that a registry has gathered as Prometheus text exposition 0.0.4.
pub fn render_text(families: &[MetricFamily]) -> Vec<u8> {
    let text = TextEncoder::new().encode_to_string(families);
    text.expect("a String takes every write, and a registry never gathers an empty family")
        .into_bytes()
}

/// Converts a count to a double, because every Prometheus sample is a double.
#[expect(clippy::cast_precision_loss, reason = "off by less than a part in 2^53")]
pub fn count_as_f64(count: u64) -> f64 {
    count as f64
}
