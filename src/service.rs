//! The HTTP service around runs: `cogni-gateway serve`.
//!
//! A request comes in at [`api`], which asks [`auth`] for the caller's grant and hands a run to [`runs`]. The run executes in
//! the [`runner`](crate::runner); [`store`] keeps runs, events and answers in SQLite, and [`billing`] compares the usage in
//! audit logs with what LiteLLM charges. [`config`] is the `[serve]` table of the configuration file.

pub mod api;
pub mod auth;
pub mod billing;
pub mod config;
pub mod runs;
pub mod store;
