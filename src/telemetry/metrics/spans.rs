//! Counters of the trace exporter.

use prometheus::IntCounter;

/// The counters of exported and lost spans.
#[derive(Clone, Debug)]
pub struct SpanCounters {
    pub exported: IntCounter,
    /// Spans that were lost because too many were waiting.
    pub overflowed: IntCounter,
    /// Spans that were lost because the collector did not take them.
    pub refused: IntCounter,
}
