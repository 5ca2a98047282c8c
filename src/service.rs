//! The HTTP service around runs: `cogni-gateway serve`.
//!
//! A request arrives at [`api`], which asks [`auth`] for the caller's grant and hands a run to [`runs`]. The
//! [`runner`](crate::runner) executes the run. [`store`] keeps runs, events and answers in SQLite. [`billing`] compares
//! the usage in audit logs with LiteLLM's charges. [`config`] is the `[serve]` table of the configuration file.

pub mod api;
pub mod auth;
pub mod billing;
pub mod config;
pub mod runs;
pub mod store;
