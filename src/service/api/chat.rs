//! A chat: one request that begins a run and is answered with its events. The chat's body becomes the body of a request
//! for a run.

use std::pin::Pin;
use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::error::ApiError;
use super::error_docs::{CreateRunErrorResponses, RecordsRemovedResponses};
use super::extract::{AuthenticatedCaller, JsonBody};
use super::run_request::{ApiMessage, BudgetBody, CreateRunBody};
use super::{ApiState, events, request_log, runs};
use crate::service::runs::{AcceptedRun, RunService};

/// The request for a chat: a run whose events are the answer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct ChatBody {
    /// The agent to run: an `agentId` of `GET /api/v1/ai/agents`.
    #[schema(example = "sandbox:agent")]
    graph_name: String,
    /// The model that the agent uses. The default is the agent's own.
    model: Option<String>,
    /// The conversation, oldest message first. The last message is the user's.
    #[schema(min_items = 1)]
    messages: Vec<ApiMessage>,
    /// The name of the conversation that the run is a part of. Runs with the same state key may share a workspace.
    state_key: Option<String>,
    /// The key of the branch `sandbox/KEY` that receives the work. Without a branch key, no work is delivered.
    branch_key: Option<String>,
    /// The URL of the repository that the agent works on. The grant has to allow it.
    #[schema(example = "https://github.com/acme/site")]
    repo: Option<String>,
    /// The branch that the work is based on. The default is the repository's default branch.
    base: Option<String>,
    /// True if the service opens a pull request for the work of a successful run.
    #[serde(default)]
    pull_request: bool,
    /// The title of a new pull request. The default comes from the commits.
    #[schema(min_length = 1, max_length = 256)]
    pull_request_title: Option<String>,
    /// True if the pull request does not show the text of this request. By default, the pull request shows the first 2,000
    /// characters of the last message to everyone who may read the repository.
    #[serde(default)]
    hide_request: bool,
    /// The account that pays for the run. The default is the grant's first account.
    account: Option<String>,
    /// The budget of the run. The limits of the agent and of the grant apply in any case.
    #[serde(default)]
    budget: BudgetBody,
    /// Further metadata of the run for LiteLLM's spend logs, at most 4096 bytes as JSON. Keys that the service sets are
    /// refused.
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// What the service does with the run when the client closes the connection.
    #[serde(default)]
    on_disconnect: OnDisconnect,
}

/// The effect of a client's disconnect on the run: `cancel` (the service cancels the run) or `continue` (the run continues,
/// and can be watched again). The default is `cancel`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum OnDisconnect {
    /// The service cancels the run.
    #[default]
    Cancel,
    /// The run continues, and can be watched again.
    Continue,
}

/// Start a run and stream its events
///
/// The answer is the stream of the run's events, from the first to `final`. The header `x-run-id` has the run's id. A
/// repeated request with the same `Idempotency-Key` starts no second run: it streams the events of the first one from
/// the beginning, and does not cancel the run when its client disconnects.
#[utoipa::path(
    post,
    path = "/api/v1/ai/chat",
    tag = "runs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A text of 1 to 255 visible ASCII characters that identifies this request within the grant. Repeat a request whose answer was lost with the same key: the service then starts no second run."),
        ("traceparent" = Option<String>, Header, description = "The caller's span in the format of W3C Trace Context. The run becomes part of its trace. An invalid value is ignored.")
    ),
    request_body = ChatBody,
    responses(
        (status = 200, description = "The events of the run, up to its end. `RunEvent` describes them.", body = events::ServerSentEventDoc, content_type = "text/event-stream",
         headers(("x-run-id" = String, description = "The id of the run."))),
        CreateRunErrorResponses, RecordsRemovedResponses
    )
)]
pub(super) async fn start_chat(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    headers: HeaderMap,
    JsonBody(chat): JsonBody<ChatBody>,
) -> Result<Response, ApiError> {
    // The watcher comes first: a run that the client cannot watch is not begun.
    let watcher = api.acquire_watcher(&caller)?;
    let (tasks, asked) =
        (api.tasks.clone(), (Arc::clone(&api), AuthenticatedCaller(Arc::clone(&caller.0))));
    // The client may disconnect while the run is accepted, so the acceptance has a task of its own.
    let (run_service, run, leaving) =
        tasks.run_detached(begin_run(caller, api, headers, chat)).await?;
    request_log::name_run(&run);
    let followed = run_service.run_store().follow_events(&run, 0);
    // The stream of a client whose grant is revoked ends early, which counts as a disconnect: the guard ends the run,
    // if there is a guard.
    let events = disarm_at_end(Box::pin(followed), leaving);
    let events = events::end_when_revoked(&asked.0, &asked.1, events);
    let mut response = events::event_stream(events, watcher).into_response();
    response.headers_mut().insert(RUN_ID_HEADER, runs::run_id_header(&run));
    Ok(response)
}

/// Starts the run of a chat. Returns the run, and the guard that cancels the run if the client disconnects.
async fn begin_run(
    caller: AuthenticatedCaller,
    api: Arc<ApiState>,
    headers: HeaderMap,
    chat: ChatBody,
) -> Result<(RunService, String, Option<CancelOnDisconnect>), ApiError> {
    let policy = chat.on_disconnect;
    let AcceptedRun { run, is_known } =
        runs::submit_run(&api, &caller, &headers, chat.into()).await?;
    if is_known {
        api.require_records(&run).await?;
    }
    let is_ours_to_end = policy == OnDisconnect::Cancel && !is_known;
    let run_service = api.run_service.clone();
    let leaving = is_ours_to_end
        .then(|| CancelOnDisconnect { run_service: run_service.clone(), run: run.clone() });
    Ok((run_service, run, leaving))
}

/// A guard that cancels a run if the guard is dropped before the run has ended.
struct CancelOnDisconnect {
    run_service: RunService,
    run: String,
}

impl CancelOnDisconnect {
    /// Keeps the guard from cancelling the run, because the client has received the end of the run.
    fn disarm(mut self) {
        self.run.clear();
    }
}

impl Drop for CancelOnDisconnect {
    fn drop(&mut self) {
        if self.run.is_empty() {
            return;
        }
        tracing::info!(run = self.run, "the client of a chat has disconnected");
        self.run_service.cancel_run(&self.run);
    }
}

/// Returns the stream, and disarms the guard at its end.
fn disarm_at_end<S: Stream>(
    events: Pin<Box<S>>,
    leaving: Option<CancelOnDisconnect>,
) -> impl Stream<Item = S::Item> {
    unfold((events, leaving), |(mut events, leaving)| async move {
        if let Some(event) = events.next().await {
            return Some((event, (events, leaving)));
        }
        if let Some(leaving) = leaving {
            leaving.disarm();
        }
        None
    })
}

impl From<ChatBody> for CreateRunBody {
    fn from(chat: ChatBody) -> Self {
        Self {
            agent: chat.graph_name,
            model: chat.model,
            messages: chat.messages,
            account: chat.account,
            state_key: chat.state_key,
            repo: chat.repo,
            base: chat.base,
            branch_key: chat.branch_key,
            work_item: None,
            pull_request: chat.pull_request,
            pull_request_title: chat.pull_request_title,
            hide_request: chat.hide_request,
            budget: chat.budget,
            max_runtime: None,
            metadata: chat.metadata,
        }
    }
}

const RUN_ID_HEADER: &str = "x-run-id";
