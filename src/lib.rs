//! One way out for untrusted agents: a programmable LLM gateway on a unix socket per run.
//!
//! The rooms, top to bottom: [`cli`] parses words and calls [`app`], which composes what [`config`]
//! says; [`gateway`] serves a [`run`], whose [`audit`] log and [`budget`] it shares; [`base`] could
//! serve any other program. A room imports only from rooms below it; `tests/it/tidy.rs` holds the
//! table and checks it.

pub mod app;
pub mod audit;
pub mod base;
pub mod budget;
pub mod cli;
pub mod config;
pub mod gateway;
#[cfg(doc)]
pub mod manual;
pub mod provider;
pub mod run;
