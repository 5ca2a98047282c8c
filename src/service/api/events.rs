//! The events of a run as server-sent events. A watcher can resume after a lost connection.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, KeepAliveStream, Sse};
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::ApiState;
use super::error::{ApiError, ErrorBody};
use super::error_docs::{
    AuthErrorResponses, NotFoundResponses, QueryErrorResponses, RecordsRemovedResponses,
};
use super::extract::{AuthenticatedCaller, PathParam, QueryParams};
use super::share_limiter::GrantShareGuard;
use crate::base::db;
use crate::service::auth;
use crate::service::store::RunEvent;

/// The event after which to begin.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// The `id` of an event: only later events are sent. The default is `0`: all events.
    after: Option<u64>,
}

/// One event of a stream (`text/event-stream`) as a client receives it: three texts. `RunEvent` describes the same event
/// after `data` was parsed as JSON.
#[derive(ToSchema)]
#[schema(as = ServerSentEvent)]
#[expect(dead_code, reason = "events are written as lines")]
pub(super) struct ServerSentEventDoc {
    /// The number of the event. To resume a stream, send the last number as `Last-Event-ID`.
    #[schema(example = "17")]
    id: String,
    /// The type of the event: `event` of `RunEvent`.
    #[schema(example = "text_delta")]
    event: String,
    /// The data of the event: a JSON object as text, on one line.
    #[schema(example = "{\"text\":\"Hello\"}")]
    data: String,
}

/// Stream the events of a run
///
/// The stream has the earlier events of the run, and then each new event up to `final`. A stream that ends without
/// `final` was cut: request the rest with `Last-Event-ID`. Comment lines keep a quiet connection open.
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/events",
    tag = "runs",
    params(
        ("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it."),
        EventsQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "The `id` of the last event that the client has. It means the same as `after`, and takes precedence. Browsers send it when they reconnect.")
    ),
    responses(
        (status = 200, description = "The events of the run, up to its end. `RunEvent` describes them.", body = ServerSentEventDoc, content_type = "text/event-stream"),
        (status = 429, description = "`too_many_watchers`: the grant already watches as many runs at the same time as it may. Repeat the request when a stream has ended.", body = ErrorBody),
        QueryErrorResponses, AuthErrorResponses, NotFoundResponses, RecordsRemovedResponses
    )
)]
pub(super) async fn watch_run(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
    QueryParams(from): QueryParams<EventsQuery>,
    headers: HeaderMap,
) -> Result<Sse<KeepAliveStream<impl Stream<Item = SseItem> + use<>>>, ApiError> {
    caller.require_read()?;
    let row = api.requested_run(&caller, &id).await?;
    api.require_records(&row.id).await?;
    let last = check_number("Last-Event-ID", last_event_id(&headers)?)?;
    let after = check_number("after", from.after)?;
    let watcher = api.acquire_watcher(&caller)?;
    let after = last.or(after).unwrap_or_default();
    let events = api.run_service.run_store().follow_events(&row.id, after);
    Ok(event_stream(end_when_revoked(&api, &caller, events), watcher))
}

/// The next item for a watcher. An error closes the connection, so that the watcher connects again.
pub(super) type SseItem = Result<sse::Event, db::DatabaseError>;

/// A run's events as a body, which has a watcher until it is dropped.
pub(super) fn event_stream<S>(
    events: S,
    watcher: GrantShareGuard,
) -> Sse<KeepAliveStream<impl Stream<Item = SseItem> + use<S>>>
where
    S: Stream<Item = Result<RunEvent, db::DatabaseError>> + Send + 'static,
{
    let told = events.map(move |event| {
        let _watching = &watcher;
        event.map(|event| to_sse_event(&event)).inspect_err(log_database_error)
    });
    Sse::new(told).keep_alive(KeepAlive::new().interval(HEARTBEAT_INTERVAL))
}

/// Ends a stream at the first event after its grant was revoked or has expired.
pub(super) fn end_when_revoked<S: Stream>(
    api: &Arc<ApiState>,
    caller: &AuthenticatedCaller,
    events: S,
) -> impl Stream<Item = S::Item> + use<S> {
    let (api, grant) = (Arc::clone(api), caller.0.id.clone());
    events.take_while(move |_| {
        let (api, grant) = (Arc::clone(&api), grant.clone());
        async move {
            match api.grants.check_id(&grant).await {
                Err(auth::GrantStoreError::Denied(_)) => {
                    tracing::info!(grant, "closed an event stream: its grant is no longer valid");
                    false
                }
                // If the grant cannot be read now, it is checked at the next event.
                Ok(()) | Err(_) => true,
            }
        }
    })
}

fn to_sse_event(event: &RunEvent) -> sse::Event {
    let RunEvent { seq, kind, data, .. } = event;
    sse::Event::default().id(seq.to_string()).event(kind.as_str()).data(&**data)
}

fn log_database_error(error: &db::DatabaseError) {
    tracing::error!(%error, "a run's events cannot be read");
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(given) = headers.get("last-event-id") else { return Ok(None) };
    let number = given.to_str().ok().and_then(|given| given.parse().ok());
    let number = number.ok_or_else(|| {
        ApiError::invalid_parameter("`Last-Event-ID` is invalid: give the number of an event")
    })?;
    Ok(Some(number))
}

/// Checks that a run may have an event with a number. `name` is the place of the number in the request.
fn check_number(name: &str, given: Option<u64>) -> Result<Option<u64>, ApiError> {
    if given.is_some_and(|number| i64::try_from(number).is_err()) {
        let why = format_args!("`{name}` is invalid: the run has no event with this number");
        return Err(ApiError::invalid_parameter(why));
    }
    Ok(given)
}

/// The interval of heartbeats, so that no proxy closes the connection of a quiet run. Our choice.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
