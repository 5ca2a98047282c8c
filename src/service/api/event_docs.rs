//! Descriptions of the events of runs for the `OpenAPI` document.
//!
//! The service never creates values of these types: it stores the data of an event as JSON, and sends the stored text.
//! On the wire, `data` is a text, so no response names these schemas: `ServerSentEvent` describes the stream.

#![expect(
    dead_code,
    clippy::large_enum_variant,
    reason = "the types are never used; the description shows what events are made of"
)]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::result_docs::RunResultDoc;

/// One event of a run after its `data` was parsed as JSON. `event` says which type of event it is. A client has to
/// ignore events of types that it does not know.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = RunEvent, discriminator(property_name = "event", mapping(
    ("queued" = "#/components/schemas/QueuedEvent"),
    ("run_started" = "#/components/schemas/RunStartedEvent"),
    ("text_delta" = "#/components/schemas/TextDeltaEvent"),
    ("tool_call" = "#/components/schemas/ToolCallEvent"),
    ("tool_result" = "#/components/schemas/ToolResultEvent"),
    ("approval_requested" = "#/components/schemas/ApprovalRequestedEvent"),
    ("approval_resolved" = "#/components/schemas/ApprovalResolvedEvent"),
    ("standing_approval" = "#/components/schemas/StandingApprovalEvent"),
    ("usage_report" = "#/components/schemas/UsageReportEvent"),
    ("assistant_final" = "#/components/schemas/AssistantFinalEvent"),
    ("error" = "#/components/schemas/RunErrorEvent"),
    ("done" = "#/components/schemas/DoneEvent"),
    ("final" = "#/components/schemas/FinalEvent")
)))]
pub(super) enum RunEventDoc {
    Queued(QueuedEvent),
    RunStarted(RunStartedEvent),
    TextDelta(TextDeltaEvent),
    ToolCall(ToolCallEvent),
    ToolResult(ToolResultEvent),
    ApprovalRequested(ApprovalRequestedEvent),
    ApprovalResolved(ApprovalResolvedEvent),
    StandingApproval(StandingApprovalEvent),
    UsageReport(UsageReportEvent),
    AssistantFinal(AssistantFinalEvent),
    RunError(RunErrorEvent),
    Done(DoneEvent),
    Final(FinalEvent),
}

/// The run waits for a place. The event is repeated when the position has halved.
#[derive(Serialize, ToSchema)]
pub(super) struct QueuedEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: QueuedEventType,
    /// The data of the event.
    data: QueuedData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum QueuedEventType {
    Queued,
}

/// The data of the event `queued`.
#[derive(Serialize, ToSchema)]
pub(super) struct QueuedData {
    /// The id of the run.
    run: String,
    /// The position in the queue: 1 for the run that begins next.
    position: u64,
}

/// The run has a place, and the service creates its sandbox.
#[derive(Serialize, ToSchema)]
pub(super) struct RunStartedEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: RunStartedEventType,
    /// The data of the event.
    data: RunStartedData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum RunStartedEventType {
    RunStarted,
}

/// The data of the event `run_started`.
#[derive(Serialize, ToSchema)]
pub(super) struct RunStartedData {
    /// The id of the run.
    run: String,
    /// The agent, by its `agentId`.
    agent: String,
    /// The model that the agent uses.
    model: Option<String>,
}

/// The agent has written a part of its answer. Only agents that stream events have this event.
#[derive(Serialize, ToSchema)]
pub(super) struct TextDeltaEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: TextDeltaEventType,
    /// The data of the event.
    data: TextDeltaData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TextDeltaEventType {
    TextDelta,
}

/// The data of the event `text_delta`.
#[derive(Serialize, ToSchema)]
pub(super) struct TextDeltaData {
    /// The part of the answer.
    text: String,
}

/// The agent has called a tool of its own. Only agents that stream events have this event.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCallEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: ToolCallEventType,
    /// The data of the event.
    data: ToolCallData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ToolCallEventType {
    ToolCall,
}

/// The data of the event `tool_call`.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCallData {
    /// The id of the call, which its `tool_result` has as well.
    id: String,
    /// The program and its arguments.
    argv: Vec<String>,
}

/// A tool of the agent has ended.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolResultEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: ToolResultEventType,
    /// The data of the event.
    data: ToolResultData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ToolResultEventType {
    ToolResult,
}

/// The data of the event `tool_result`.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolResultData {
    /// The id of the call.
    id: String,
    /// The exit code. Null if the program was not started or was killed.
    exit_code: Option<i64>,
}

/// A call of a tool, or a call beyond the budget, waits for a person. The arguments are in `GET /api/v1/approvals/{id}`.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalRequestedEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: ApprovalRequestedEventType,
    /// The data of the event.
    data: ApprovalRequestedData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ApprovalRequestedEventType {
    ApprovalRequested,
}

/// The data of the event `approval_requested`.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalRequestedData {
    /// The id of the question.
    id: String,
    /// The name of the tool.
    tool: String,
    /// The rule that asks.
    rule: String,
    /// The digest of the call, which an answer has to name.
    digest: String,
    /// The state of the question: `pending`.
    state: String,
    /// The last moment at which the call may begin.
    expires_at: String,
    /// The spent limit, for a question about a budget; absent for one about a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<String>,
}

/// The question about a call of a tool or a budget is answered or closed.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalResolvedEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: ApprovalResolvedEventType,
    /// The data of the event.
    data: ApprovalResolvedData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ApprovalResolvedEventType {
    ApprovalResolved,
}

/// The data of the event `approval_resolved`.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalResolvedData {
    /// The id of the question.
    id: String,
    /// The name of the tool.
    tool: String,
    /// The rule that asks.
    rule: String,
    /// The digest of the call.
    digest: String,
    /// The state of the question: `approved`, `denied`, `expired` or `withdrawn`.
    state: String,
    /// The last moment at which the call may begin.
    expires_at: String,
    /// The spent limit, for a question about a budget; absent for one about a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<String>,
    /// The id of the grant that has answered. Null without an answer.
    by: Option<String>,
}

/// A denied call was proposed to a person, or a standing approval was granted, used, taken back or spent.
#[derive(Serialize, ToSchema)]
pub(super) struct StandingApprovalEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: StandingApprovalEventType,
    /// The data of the event.
    data: StandingApprovalData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum StandingApprovalEventType {
    StandingApproval,
}

/// The data of the event `standing_approval`.
#[derive(Serialize, ToSchema)]
pub(super) struct StandingApprovalData {
    /// The id of the standing approval.
    id: String,
    /// The name of the tool.
    tool: String,
    /// The rules that deny the call, or the rule that has asked.
    rules: Vec<String>,
    /// The digest of the call, which a grant has to name.
    digest: String,
    /// The state: `proposed`, `granted` (also after a use), `spent` or `revoked`.
    state: String,
    /// `run` or `always`.
    scope: String,
    /// The last moment at which a person may grant the proposal, or a call may begin.
    expires_at: String,
    /// The number of calls that have begun.
    used: u32,
    /// The number of calls that may begin.
    max_uses: u32,
    /// The id of the grant that has allowed the call. Null for a proposal.
    by: Option<String>,
}

/// A call to a model or to a tool with a price is settled. This event may follow the answer.
#[derive(Serialize, ToSchema)]
pub(super) struct UsageReportEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: UsageReportEventType,
    /// The data of the event.
    data: UsageReportData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum UsageReportEventType {
    UsageReport,
}

/// The data of the event `usage_report`.
#[derive(Serialize, ToSchema)]
pub(super) struct UsageReportData {
    /// The gateway's id of the call.
    call_id: String,
    /// The model that was called; null for a tool.
    model: Option<String>,
    /// The tool that was called; null for a model.
    tool: Option<String>,
    /// The end of the call: `completed`, or the way in which the call broke off.
    outcome: String,
    /// The HTTP status of the upstream's response.
    status: Option<u16>,
    /// The charged input, in tokens.
    input: u64,
    /// The charged output, in tokens.
    output: u64,
    /// The part of the input that was read from the provider's cache, in tokens.
    cache_read: u64,
    /// The part of the input that was written to the provider's cache, in tokens.
    cache_write: u64,
    /// The part of the output that was reasoning, in tokens.
    reasoning: u64,
    /// The source of the token counts: `provider`, `drained` or `estimated`.
    source: String,
    /// The cost in US dollars, as a decimal text.
    cost_usd: String,
}

/// The agent has ended and has answered. Its work is not on a branch yet.
#[derive(Serialize, ToSchema)]
pub(super) struct AssistantFinalEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: AssistantFinalEventType,
    /// The data of the event.
    data: AssistantFinalData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum AssistantFinalEventType {
    AssistantFinal,
}

/// The data of the event `assistant_final`.
#[derive(Serialize, ToSchema)]
pub(super) struct AssistantFinalData {
    /// The whole answer as text.
    text: String,
    /// The parts of the answer, as the agent has printed them.
    payloads: Vec<Value>,
}

/// The run has failed.
#[derive(Serialize, ToSchema)]
pub(super) struct RunErrorEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: RunErrorEventType,
    /// The data of the event.
    data: RunErrorData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum RunErrorEventType {
    #[serde(rename = "error")]
    RunError,
}

/// The data of the event `error`.
#[derive(Serialize, ToSchema)]
pub(super) struct RunErrorData {
    /// The error code, for programs.
    code: String,
    /// The error message, for people.
    message: String,
}

/// The agent has ended. Each run has exactly one such event.
#[derive(Serialize, ToSchema)]
pub(super) struct DoneEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: DoneEventType,
    /// The data of the event.
    data: DoneData,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum DoneEventType {
    Done,
}

/// The data of the event `done`.
#[derive(Serialize, ToSchema)]
pub(super) struct DoneData {
    /// The exit code of the program. Absent or null if the program was not started or did not end by itself.
    exit_code: Option<i64>,
}

/// The run has ended, and its delivery goes no further for now. This is the last event of every run.
#[derive(Serialize, ToSchema)]
pub(super) struct FinalEvent {
    /// The number of the event.
    #[schema(example = "17")]
    id: String,
    #[schema(inline)]
    event: FinalEventType,
    /// The result of the run.
    data: RunResultDoc,
}

/// The type of the event.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum FinalEventType {
    Final,
}
