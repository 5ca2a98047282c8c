//! The data that operators see about runs and their calls: the audit log, metrics for Prometheus, traces, and an access
//! log with a line for each request.
//!
//! **Invariant:** text that a client or an upstream chose is bounded and made printable before it becomes a label or a
//! line.

pub mod access_log;
pub mod audit;
pub mod metrics;
pub mod trace;
