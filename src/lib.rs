//! One way out for untrusted agents: a programmable LLM gateway on a unix socket per run.
//!
//! The rooms, top to bottom: [`cli`] parses words and calls [`app`], which composes what [`config`]
//! says, and [`admin`] lets an operator change; [`api`] is the service's face, [`supervisor`] its runs, which [`auth`]s
//! allow, the [`store`] remembers and [`billing`] charges for; [`runner`] puts a [`sandbox`] at its other end, and a
//! [`delivery`] brings its commits out: the [`relay`], which asks [`git`], to a branch, and a [`github`] to people's eyes. [`gateway`]
//! serves a [`run`], whose [`audit`] log and [`budget`] it shares: it judges a request's [`body`], sends it
//! [`upresponse`], reads the answer's [`response`] as it passes, and lets operators [`observe`]. [`base`] could
//! serve any other program. [`init`] and [`agent`] are programs of their own, which run in the sandbox. A room imports only
//! from rooms below it; `tests/cli/tidy.rs` holds the table and checks it.

pub mod admin;
pub mod agent;
pub mod agents;
pub mod api;
pub mod audit;
pub mod auth;
pub mod base;
pub mod billing;
pub mod budget;
pub mod cli;
pub mod config;
pub mod delivery;
pub mod git;
pub mod github;
pub mod github_server;
pub mod init;
#[cfg(doc)]
pub mod manual;
pub mod model_provider;
pub mod observe;
pub mod pipeline;
pub mod process;
pub mod protocol;
pub mod repo;
pub mod request;
pub mod response;
pub mod run;
pub mod runner;
pub mod runs;
pub mod sandbox;
pub mod store;
pub mod upstream;
