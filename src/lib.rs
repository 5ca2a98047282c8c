//! One way out for untrusted agents: a programmable LLM gateway on a unix socket per run.
//!
//! The rooms, top to bottom: [`cli`] parses words and calls [`app`], which composes what [`config`]
//! says, and [`admin`] lets an operator change; [`api`] is the service's face, [`supervisor`] its runs, which [`grant`]s
//! allow, the [`journal`] remembers and [`billing`] charges for; [`runner`] puts a [`sandbox`] at its other end, and a
//! [`delivery`] brings its commits out: the [`relay`], which asks [`git`], to a branch, and a [`forge`] to people's eyes. [`gateway`]
//! serves a [`run`], whose [`audit`] log and [`budget`] it shares: it judges a request's [`body`], sends it
//! [`upstream`], reads the answer's [`stream`] as it passes, and lets operators [`observe`]. [`base`] could
//! serve any other program. [`init`] and [`agent`] are programs of their own, which run in the sandbox. A room imports only
//! from rooms below it; `tests/cli/tidy.rs` holds the table and checks it.

pub mod admin;
pub mod agent;
pub mod api;
pub mod app;
pub mod audit;
pub mod base;
pub mod billing;
pub mod body;
pub mod budget;
pub mod catalog;
pub mod cli;
pub mod config;
pub mod delivery;
pub mod forge;
pub mod gateway;
pub mod git;
pub mod grant;
pub mod init;
pub mod journal;
#[cfg(doc)]
pub mod manual;
pub mod observe;
pub mod protocol;
pub mod provider;
pub mod relay;
pub mod run;
pub mod runner;
pub mod sandbox;
pub mod stand_in;
pub mod stream;
pub mod supervisor;
pub mod upstream;
