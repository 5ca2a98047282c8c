//! The costs of calls: charge notices come in, receipts of each run go out.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::{Request, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::ApiState;
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, NotFoundResponses, QueryErrorResponses};
use super::extract::{self, AcceptedMedia, AuthenticatedCaller, PathParam, QueryParams};
use crate::service::auth::GrantScope;
use crate::service::billing::{self, store::IngestError};

/// The costs of a run's calls.
#[derive(Serialize, ToSchema)]
pub(super) struct ReceiptsView {
    /// The sums, and the flags that an operator should look at: `state` is `complete`, `pending` or `overdue`.
    #[schema(value_type = Object)]
    bill: Value,
    /// One for each call that was charged; `source_reference` is `run/attempt/call id`, and there is one of each.
    #[schema(value_type = Vec<Object>)]
    receipts: Vec<Value>,
}

/// The ids of runs with calls that an operator should look at.
#[derive(Serialize, ToSchema)]
pub(super) struct FlaggedRunsPage {
    /// The bill of each; its `flags` say why.
    #[schema(value_type = Vec<Object>)]
    runs: Vec<Value>,
    /// The `cursor` for the runs after these; null where there are none.
    next: Option<String>,
}

/// The page of runs to return.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct FlaggedRunsQuery {
    /// `next` of the page before
    cursor: Option<String>,
    /// The largest number of runs to return
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// The result of a delivery of charge notices.
#[derive(Serialize, ToSchema)]
pub(super) struct IngestReportView {
    /// Calls that have a receipt now, and had none.
    new: u64,
    /// Told before.
    known: u64,
    /// Calls of this deployment that the billing store does not have yet. A call gets its receipt when the store has
    /// the call.
    unknown: u64,
    /// Other than told before; kept and flagged, not charged.
    conflicting: u64,
    /// Failed attempts at no cost of calls that used tokens; kept, and the calls still have no receipts.
    unpaid: u64,
    /// Calls that others have made with the same LiteLLM, other gateways among them; nothing is kept of them.
    foreign: u64,
    /// Items that cannot be used.
    invalid: u64,
    /// The reasons for the first items that were not used.
    complaints: Vec<ItemErrorView>,
}

/// The reason why an item cannot be used.
#[derive(Serialize, ToSchema)]
pub(super) struct ItemErrorView {
    /// The position of the item in the body, counted from 0.
    item: usize,
    message: String,
}

/// Tell what calls have cost, as LiteLLM's generic callback does
///
/// Told again, nothing changes. The body is LiteLLM's `StandardLoggingPayload`: one, an array of them, or one on each
/// line.
#[utoipa::path(
    post,
    path = "/api/internal/billing/ingest",
    tag = "billing",
    request_body(content(
        (Value = "application/json"),
        (String = "application/x-ndjson")
    )),
    responses(
        (status = 200, description = "What became of each item", body = IngestReportView),
        (status = 400, description = "`invalid_json`", body = ErrorBody),
        AuthErrorResponses,
        (status = 408, description = "`request_timeout`: of its body", body = ErrorBody),
        (status = 413, description = "`body_too_large`", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`", body = ErrorBody)
    )
)]
pub(super) async fn ingest_notices(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    request: Request,
) -> Result<Json<IngestReportView>, ApiError> {
    caller.require_scope(GrantScope::Billing)?;
    let _turn = api.reports.acquire_permit(&caller.0.id).await;
    let body = extract::read_body(request, &api, &NOTICE_MEDIA_TYPES, MAX_NOTICES_BYTES).await?;
    // An empty report is more likely a mistake of the sender than a report without items.
    if body.trim_ascii().is_empty() {
        return Err(ApiError::InvalidJson("it is empty".to_owned()));
    }
    let ingested = api.billing.ingest(body).await.map_err(|refused| match refused {
        IngestError::Malformed(malformed) => ApiError::InvalidJson(malformed.to_string()),
        IngestError::Billing(error) => ApiError::internal_error(error),
    })?;
    Ok(Json(ingested.into()))
}

/// Show the costs of a run's calls, and the receipt of each call
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/receipts",
    tag = "billing",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "The run's bill", body = ReceiptsView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn show_receipts(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<ReceiptsView>, ApiError> {
    caller.require_read()?;
    let row = api.requested_run(&caller, &id).await?;
    let bill = api.billing.run_bill(&row.id).await.map_err(ApiError::internal_error)?;
    let receipts = api.billing.receipts_of_run(&row.id).await.map_err(ApiError::internal_error)?;
    let value = |receipt| serde_json::to_value(receipt).map_err(ApiError::internal_error);
    Ok(Json(ReceiptsView {
        bill: serde_json::to_value(bill).map_err(ApiError::internal_error)?,
        receipts: receipts.into_iter().map(value).collect::<Result<_, _>>()?,
    }))
}

/// List runs whose calls have no receipt in time, no price, or two
#[utoipa::path(
    get,
    path = "/api/v1/billing/flagged",
    tag = "billing",
    params(FlaggedRunsQuery),
    responses(
        (status = 200, description = "Of all grants; for admins only", body = FlaggedRunsPage),
        QueryErrorResponses, AuthErrorResponses
    )
)]
pub(super) async fn list_flagged_runs(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    QueryParams(which): QueryParams<FlaggedRunsQuery>,
) -> Result<Json<FlaggedRunsPage>, ApiError> {
    caller.require_scope(GrantScope::Admin)?;
    let limit = which.limit.unwrap_or(50);
    if !(1..=200).contains(&limit) {
        return Err(ApiError::invalid_parameter("`limit` is from 1 to 200"));
    }
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    let books = api.billing.clone();
    // Also for a client that leaves: its turn is over when the read is.
    let found = api.tasks.run_detached(async move {
        let _held = turn;
        books.flagged_runs_after(SystemTime::now(), which.cursor, limit + 1).await
    });
    let mut bills = found.await.map_err(ApiError::internal_error)?;
    let is_all = bills.len() <= limit as usize;
    bills.truncate(limit as usize);
    let next = bills.last().filter(|_| !is_all).map(|bill| bill.run.clone());
    let value = |bill| serde_json::to_value(bill).map_err(ApiError::internal_error);
    Ok(Json(FlaggedRunsPage {
        runs: bills.into_iter().map(value).collect::<Result<_, _>>()?,
        next,
    }))
}

impl From<billing::IngestReport> for IngestReportView {
    fn from(found: billing::IngestReport) -> Self {
        let complaints = found.complaints.into_iter();
        let complaints = complaints
            .map(|complaint| ItemErrorView { item: complaint.item, message: complaint.message });
        Self {
            new: found.new,
            known: found.known,
            unknown: found.unknown,
            conflicting: found.conflicting,
            unpaid: found.unpaid,
            foreign: found.foreign,
            invalid: found.invalid,
            complaints: complaints.collect(),
        }
    }
}

/// LiteLLM sends 512 calls at once, each with what was said in it unless it is told otherwise.
pub(super) const MAX_NOTICES_BYTES: usize = 16 << 20;

/// Lines of JSON are called by either name.
const NOTICE_MEDIA_TYPES: AcceptedMedia = AcceptedMedia {
    kinds: &["application/json", "application/x-ndjson"],
    description: "application/json` or `application/x-ndjson",
};
