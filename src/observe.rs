//! What operators see of the runs and their calls: series for Prometheus, a line for each request, and traces.
//!
//! **Invariant:** what a client or an upstream chose is bounded and made printable before it gets here
//! into a label or a line.

pub mod access_log;
pub mod metrics;
pub mod sanitize;
pub mod trace;
