//! cogni-gateway runs untrusted AI agents: each run has one way out of its sandbox, a programmable LLM gateway on a unix socket.
//!
//! Twelve wings, from the top down. A wing imports only wings on lower lines, and wings on one line do not import each other;
//! `tests/cli/tidy.rs` holds the table and checks it. [`manual::architecture`] walks through them with a request, a run, a
//! commit and a chat. The page is `src/manual/architecture.md`; its first table says where a stream is cut at its budget, where a
//! commit is judged, where a container's capabilities are dropped, and who ends a run at its deadline.
//!
//! ```text
//! cli
//! service
//! runner
//! gateway · relay · tools · sandbox
//! telemetry
//! llm · fakes
//! base · guest
//! ```

// Every command of the program, one file each.
pub mod cli;

// The HTTP service around runs: its API, the runs that it executes, what it stores, its grants and its billing.
pub mod service;

// One run from its plan to its result, the catalog of agents, and the pools of warm and long-running sandboxes.
pub mod runner;

// The LLM proxy: the pipeline of a call, the upstream client, a run's identity, the process around them and its settings.
pub mod gateway;

// The way of an agent's commits to a branch and a pull request: git, mirror, quarantine, review, outbox, GitHub.
pub mod relay;

// The tools of a run: their policy, their calls and the programs that run them. They may use the sandbox for their jobs.
pub mod tools;

// The sandbox: one specification, and two drivers that start it (Docker Engine and the embedded one).
pub mod sandbox;

// The programs that run inside a sandbox: the first process and a small agent. They import no other module.
pub mod guest;

// What operators see: the audit log, metrics, traces and the access log.
pub mod telemetry;

// LLM calls without any sockets: protocols, requests, responses, budgets and prices.
pub mod llm;

// Stand-ins for a model provider and for GitHub, for `demo` and the tests.
pub mod fakes;

// General parts that any hyper service could use without a change.
pub mod base;

#[cfg(doc)]
pub mod manual;
