//! Tests of the whole service: requests of a grant's holder, executed in sandboxes of the embedded driver, with a fake
//! provider and a GitHub stand-in (A1–A5, B1, B4, R5, R7, S1).

mod agent_policy;
mod agent_rules;
mod approval_replies;
mod approvals;
mod approver_reach;
mod audit_proof;
mod budget_questions;
mod chat;
mod database_failure;
mod early_end;
mod events;
mod full_disk;
mod killed;
mod many_runs;
mod mcp_commands;
mod queue;
mod recovery;
mod retention_clock;
mod standing_approvals;
mod tool_files;
mod upgrade;

use crate::support::service::{ServiceSetup, conversation_body};
