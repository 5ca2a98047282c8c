//! A chat: one request that begins a run and is answered with its events.

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

use super::ask::{Budget, Message, NewRun};
use super::error::Error;
use super::extract::{Body, Caller};
use super::refusal::NotBegun;
use super::{Api, events, runs};
use crate::supervisor::{Started, Supervisor};

/// A chat, in the words of those who have always asked so.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Chat {
    /// An agent of `GET /api/v1/ai/agents`, by its `agentId`.
    #[schema(example = "sandbox:agent")]
    graph_name: String,
    /// The model; else the agent's own.
    model: Option<String>,
    /// What was said, the last by the user.
    #[schema(min_items = 1)]
    messages: Vec<Message>,
    /// The conversation that the run is a part of.
    state_key: Option<String>,
    /// Names the branch `sandbox/<key>` that the work goes to. Without it nothing is delivered.
    branch_key: Option<String>,
    /// The repository that it works on, by its URL.
    #[schema(example = "https://github.com/acme/site")]
    repo: Option<String>,
    /// The branch that the work is for; else the repository's default branch.
    base: Option<String>,
    /// Ask for a pull request, too.
    #[serde(default)]
    pull_request: bool,
    /// Who pays; else the grant's first account.
    account: Option<String>,
    /// What the run may spend; what the agent and the grant allow at most holds in any case.
    #[serde(default)]
    budget: Budget,
    /// Stands in LiteLLM's spend logs, beside what stands there anyway.
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// What becomes of the run when its client goes away.
    #[serde(default)]
    on_disconnect: OnDisconnect,
}

/// What becomes of a run when its client goes away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum OnDisconnect {
    /// It is ended.
    #[default]
    Cancel,
    /// It goes on, and can be watched again.
    Continue,
}

/// Begin a run, and watch it
///
/// The run's id is in `x-run-id`. Asked again with the same `Idempotency-Key`, it is the same run, watched from its
/// beginning; it is then not ended when that client goes away.
#[utoipa::path(
    post,
    path = "/api/v1/ai/chat",
    tag = "runs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Of this grant; 1 to 255 visible characters"),
        ("traceparent" = Option<String>, Header, description = "The span that the run is part of; W3C Trace Context")
    ),
    request_body = Chat,
    responses(
        (status = 200, description = "The run's events, to its end", body = events::Watched, content_type = "text/event-stream",
         headers(("x-run-id" = String, description = "The run"))),
        NotBegun
    )
)]
pub(super) async fn chat(
    caller: Caller,
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    Body(chat): Body<Chat>,
) -> Result<Response, Error> {
    // First: what cannot be watched is not begun.
    let watcher = api.watch(&caller)?;
    let (tasks, asked) = (api.tasks.clone(), (Arc::clone(&api), Caller(Arc::clone(&caller.0))));
    // The client may be gone before it is answered.
    let (supervisor, run, leaving) = tasks.carry(begin(caller, api, headers, chat)).await?;
    let followed = supervisor.journal().follow(&run, 0);
    // A client that is sent away has gone away, too: its run ends unless it said otherwise.
    let events = until_end(Box::pin(followed), leaving);
    let events = events::while_granted(&asked.0, &asked.1, events);
    let mut response = events::stream(events, watcher).into_response();
    response.headers_mut().insert(RUN_ID, runs::id_header(&run));
    Ok(response)
}

/// The run, with what ends it when that is dropped too early.
async fn begin(
    caller: Caller,
    api: Arc<Api>,
    headers: HeaderMap,
    chat: Chat,
) -> Result<(Supervisor, String, Option<Leaving>), Error> {
    let policy = chat.on_disconnect;
    let Started { run, is_known } = runs::start(&api, &caller, &headers, chat.into()).await?;
    let is_ours_to_end = policy == OnDisconnect::Cancel && !is_known;
    let supervisor = api.supervisor.clone();
    let leaving =
        is_ours_to_end.then(|| Leaving { supervisor: supervisor.clone(), run: run.clone() });
    Ok((supervisor, run, leaving))
}

/// Ends a run whose client has gone away before its end.
struct Leaving {
    supervisor: Supervisor,
    run: String,
}

impl Leaving {
    /// The end was seen.
    fn stay(mut self) {
        self.run.clear();
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.run.is_empty() {
            return;
        }
        tracing::info!(run = self.run, "the client of a chat has gone away");
        self.supervisor.cancel(&self.run);
    }
}

/// The stream, with somebody who waits for its end.
fn until_end<S: Stream>(
    events: Pin<Box<S>>,
    leaving: Option<Leaving>,
) -> impl Stream<Item = S::Item> {
    unfold((events, leaving), |(mut events, leaving)| async move {
        if let Some(event) = events.next().await {
            return Some((event, (events, leaving)));
        }
        if let Some(leaving) = leaving {
            leaving.stay();
        }
        None
    })
}

impl From<Chat> for NewRun {
    fn from(chat: Chat) -> Self {
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
            budget: chat.budget,
            max_runtime: None,
            metadata: chat.metadata,
        }
    }
}

const RUN_ID: &str = "x-run-id";
