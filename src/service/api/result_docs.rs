//! Descriptions of the results and events of runs for the `OpenAPI` document.
//!
//! The service never creates values of these types: it stores a result and the data of an event as JSON, and sends the
//! stored text. The tests of the service compare real results and events with the description.

#![expect(dead_code, reason = "the description shows what results and events are made of")]

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The result of a run. `status` names the form of the result.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = RunResult, discriminator(property_name = "status", mapping(
    ("succeeded" = "#/components/schemas/SucceededRunResult"),
    ("failed" = "#/components/schemas/FailedRunResult"),
    ("incomplete" = "#/components/schemas/IncompleteRunResult")
)))]
pub(super) enum RunResultDoc {
    Succeeded(SucceededRunResult),
    Failed(FailedRunResult),
    Incomplete(IncompleteRunResult),
}

/// The result of a run whose agent has ended by itself and without an error.
#[derive(Serialize, ToSchema)]
pub(super) struct SucceededRunResult {
    #[schema(inline)]
    status: SucceededStatus,
    /// The id of the run.
    run_id: String,
    /// True in this form.
    ok: bool,
    #[serde(flatten)]
    report: SandboxReport,
}

/// The result of a run that has failed after its sandbox was requested.
#[derive(Serialize, ToSchema)]
pub(super) struct FailedRunResult {
    #[schema(inline)]
    status: FailedStatus,
    /// The id of the run.
    run_id: String,
    /// False in this form.
    ok: bool,
    /// The error code, for programs.
    #[schema(example = "budget_exhausted")]
    error_code: String,
    /// The error message, for people.
    error: Option<String>,
    #[serde(flatten)]
    report: SandboxReport,
}

/// The result of a run that ended before its sandbox was requested, or that another process of the service has ended.
/// The result has no costs; `GET /api/v1/runs/{id}/receipts` returns them.
#[derive(Serialize, ToSchema)]
pub(super) struct IncompleteRunResult {
    #[schema(inline)]
    status: IncompleteStatus,
    /// The id of the run.
    run_id: String,
    /// False in this form.
    ok: bool,
    /// The error code, for programs.
    #[schema(example = "interrupted")]
    error_code: String,
    /// The error message, for people.
    error: String,
    /// The delivery of the work that the run has left. Absent if there is none.
    relay: Option<RunDelivery>,
}

/// The form of the result.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum SucceededStatus {
    Succeeded,
}

/// The form of the result.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum FailedStatus {
    Failed,
}

/// The form of the result.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum IncompleteStatus {
    Incomplete,
}

/// The facts that a run's sandbox and gateway have reported.
#[derive(Serialize, ToSchema)]
pub(super) struct SandboxReport {
    /// The exit code of the program. Null if the program was not started or did not end by itself.
    exit_code: Option<i64>,
    /// The size of the whole standard output, in bytes.
    stdout_bytes: u64,
    /// The size of the whole standard error, in bytes.
    stderr_bytes: u64,
    /// True if the middle of the standard output or standard error is not kept.
    truncated: bool,
    /// The answer of the agent. Absent if there is none.
    agent: Option<AgentAnswer>,
    /// The delivery of the run's commits. Absent if the run had no repository.
    relay: Option<RunDelivery>,
    /// The calls of the run, and their costs.
    usage: RunUsageDoc,
    /// The durations of the run.
    timings: RunTimingsDoc,
    /// The number of events that the service dropped because the run had too many. Absent if it is 0.
    events_dropped: Option<u64>,
}

/// The answer of an agent, as the agent has printed it.
#[derive(Serialize, ToSchema)]
pub(super) struct AgentAnswer {
    /// The parts of the answer. Most agents print objects with `text`.
    payloads: Vec<Value>,
    /// The agent's own metadata.
    #[schema(value_type = Object)]
    meta: Map<String, Value>,
}

/// The delivery of a run's commits as its result reports it. `GET /api/v1/runs/{id}/relay` shows later progress.
#[derive(Serialize, ToSchema)]
pub(super) struct RunDelivery {
    /// The reason why the run has no branch, such as `no_branch_key`. If this field is present, no other field is.
    skipped: Option<String>,
    /// The id of the delivery, for `cogni-gateway relay`.
    id: Option<String>,
    /// The branch that receives the commits.
    #[schema(example = "sandbox/issue-7")]
    branch: Option<String>,
    /// The step that the delivery has reached. Absent if there was nothing to deliver, or the delivery has failed.
    #[schema(example = "done")]
    step: Option<String>,
    /// The verdict of the review: `push`, `review` or `hold`.
    verdict: Option<String>,
    /// The reasons why a person has to look at the work.
    reasons: Option<Vec<String>>,
    /// The commit id that the branch has, or would have, after the delivery.
    head: Option<String>,
    /// True if the branch has the commits.
    is_pushed: Option<bool>,
    /// The URL of the pull request.
    pull_request_url: Option<String>,
    /// The reason why the delivery has gone no further.
    why: Option<String>,
    /// The command line that brings the commits into a clone, if the branch does not have them.
    apply: Option<String>,
    /// The result of publishing the signed statement beside the commit.
    statement: Option<String>,
}

/// The calls of a run, and their costs.
#[derive(Serialize, ToSchema)]
#[schema(as = RunUsage)]
pub(super) struct RunUsageDoc {
    /// The number of turns: calls that made a model generate.
    turns: u64,
    /// The input of all calls, in tokens.
    input: u64,
    /// The output of all calls, in tokens.
    output: u64,
    /// The cost by the gateway's price table, in US dollars, as a decimal text. Absent if it is 0.
    #[schema(example = "0.0096")]
    cost_usd: Option<String>,
    /// The number of calls that the gateway admitted.
    admitted: u64,
    /// The number of calls that the gateway refused.
    refused: u64,
}

/// The durations of a run.
#[derive(Serialize, ToSchema)]
#[schema(as = RunTimings)]
pub(super) struct RunTimingsDoc {
    /// The milliseconds from the request for the sandbox to the start of the program. Absent if the program was not
    /// started.
    start_ms: Option<u64>,
    /// The milliseconds from the beginning of the run until its work was delivered and its sandbox was removed.
    total_ms: u64,
}
