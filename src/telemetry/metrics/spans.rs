//! Counters of the trace exporter.

use prometheus::IntCounter;

/// The counters of exported and lost spans.
#[derive(Clone, Debug)]
pub struct SpanCounters {
    pub exported: IntCounter,
    /// Lost because too many were waiting.
    pub overflowed: IntCounter,
    /// Lost because the collector did not take them.
    pub refused: IntCounter,
}
