//! The tools of a run: the second data plane on the run's socket, beside the LLM gateway.
//!
//! A call takes this way:
//!
//! - [`endpoint`] receives every request, and gives it to [`exec_endpoint`] or, for clients of MCP, to [`mcp`].
//! - [`exec_request`] parses the request, with the same strict reader as a body for a model.
//! - [`policy`] asks every layer whether the run may make the call. [`argument_schema`] checks the arguments, and
//!   [`rule_facts`] gives them to the operator's conditions.
//! - [`agent_modes`] is the agent's layer: its list, and its switches for groups of tools.
//! - [`taint`] judges the call by the tools that the run has called before.
//! - If a rule says so, [`waiting_call`] lets the call wait for a person, whose answer the store in [`approval`] has.
//! - [`standing_call`] begins a call that a person has allowed before, and proposes one that a rule denies.
//! - [`run_tools`] reserves the budget, records the admission, starts the program, and settles once.
//! - [`call_table`] keeps the calls of a run, so that a client can ask again for a result.
//! - [`connection`] serves the run's other way out: requests to servers with credentials that the host holds.
//! - [`program`] runs a tool: a [built-in](definition) one, such as [`prometheus`], a [`job`] in a sandbox of its own, or
//!   one of a [server](mcp_server).
//!
//! **Invariant:** no tool runs without a durable `tool.admitted` record, and each such record is followed by one
//! `tool.settled` record.
//!
//! **Invariant:** arguments and results are in no record, log or metric, except the argument fields that the operator
//! has listed as evidence. A question to a person holds the arguments until it is closed.

pub mod agent_modes;
pub mod approval;
pub mod argument_schema;
mod aws_credential;
pub mod call_table;
pub mod config;
pub mod connection;
pub mod connection_config;
pub mod credential_source;
pub mod definition;
pub mod endpoint;
pub mod exec_endpoint;
pub mod exec_request;
mod header_secrets;
mod http_connector;
mod interpreter;
pub mod job;
pub mod mcp;
pub mod mcp_server;
mod origin;
pub mod pinned_tool;
pub mod policy;
pub mod program;
mod program_digest;
pub mod program_error;
pub mod prometheus;
pub mod refusal;
pub mod rule_facts;
pub mod run_credentials;
pub mod run_tools;
mod standing_call;
pub mod taint;
pub mod tool_file;
mod waiting_call;
