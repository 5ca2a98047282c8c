//! What operators see of the calls: series for Prometheus, and a line for each request.
//!
//! **Invariant:** what a client or an upstream chose is bounded and made printable before it gets here
//! into a label or a line.

pub mod access_log;
pub mod metrics;
pub mod printable;
