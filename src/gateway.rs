//! The LLM proxy of a run: an HTTP server on the run's unix socket, in front of one model provider.
//!
//! [`process`] composes everything a [`config`] asks for and owns listeners, reloads and shutdown; [`admin`] lets the operator
//! change live runs. [`pipeline`] takes one call from its head to its audit record and sends it with [`upstream`]. [`run`] is what
//! the pipeline knows of the run that calls: its identity, its token and its state.

pub mod admin;
pub mod config;
pub mod pipeline;
pub mod process;
pub mod run;
pub mod upstream;
