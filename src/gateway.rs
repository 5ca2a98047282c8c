//! The LLM proxy of a run: an HTTP server on the run's unix socket, in front of one model provider.
//!
//! - [`config`] reads the operator's configuration.
//! - [`process`] creates the parts that the configuration names, and owns listeners, reloads and shutdown.
//! - [`admin`] lets the operator change live runs.
//! - [`pipeline`] takes one call from its head to its audit record, and sends the call with [`upstream`].
//! - [`run`] holds the calling run's identity, token and state.

pub mod admin;
pub mod config;
pub mod pipeline;
pub mod process;
pub mod run;
pub mod upstream;
