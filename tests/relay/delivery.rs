//! Tests of durable delivery, with real git and the GitHub stand-in.

mod concurrent_runs;
mod existing_branch;
mod host_context;
mod killed;
pub(crate) mod outbox;
mod recorded_rules;
mod resume;
mod rules;
pub(crate) mod run_job;
mod statement;
mod statement_note;
mod sweep;
