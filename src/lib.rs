//! One way out for untrusted agents: a programmable LLM gateway on a unix socket per run.
//!
//! The rooms, in reading order. A room imports only from rooms further down this list;
//! `tests/it/tidy.rs` holds the table and checks it.

pub mod audit;
pub mod base;
pub mod budget;
pub mod cli;
pub mod gateway;
pub mod provider;
pub mod run;
