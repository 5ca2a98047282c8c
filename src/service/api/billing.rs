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
use crate::service::billing::{self, ChargeReceipt, RunBill, store::IngestError};

/// The costs of a run's calls: the bill of the run, and the receipts of its calls.
#[derive(Serialize, ToSchema)]
pub(super) struct ReceiptsView {
    /// The counts and sums of the run's calls, and the problems that an operator has to check.
    #[schema(value_type = RunBill)]
    bill: Value,
    /// One receipt for each call that was charged.
    #[schema(value_type = Vec<ChargeReceipt>)]
    receipts: Vec<Value>,
}

/// A page of runs whose bills have problems that an operator has to check.
#[derive(Serialize, ToSchema)]
pub(super) struct FlaggedRunsPage {
    /// The bills of the runs. The `flags` of a bill name its problems.
    #[schema(value_type = Vec<RunBill>)]
    runs: Vec<Value>,
    /// The value of `cursor` for the next page. Null on the last page.
    next: Option<String>,
}

/// The page of runs to return.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct FlaggedRunsQuery {
    /// The value of `next` of the page before. Absent for the first page.
    cursor: Option<String>,
    /// The largest number of runs on the page.
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// The numbers of charge notices of one report, by what the service did with them.
#[derive(Serialize, ToSchema)]
pub(super) struct IngestReportView {
    /// Notices that gave a call its receipt.
    new: u64,
    /// Notices that the service already had. They change nothing.
    known: u64,
    /// Notices of calls of this deployment that the billing store does not have yet. The service keeps such a notice,
    /// and the call gets its receipt when the store has the call.
    unknown: u64,
    /// Notices that contradict an earlier notice of the same call. The service keeps and flags them, and charges nothing.
    conflicting: u64,
    /// Notices of failed attempts that name no cost, for calls that used tokens. The service keeps them, and the calls
    /// still have no receipts.
    unpaid: u64,
    /// Notices of calls that other clients of the same LiteLLM made. The service keeps nothing of them.
    foreign: u64,
    /// Items that are no charge notices, or lack a field.
    invalid: u64,
    /// The reasons for the first of the invalid items.
    complaints: Vec<ItemErrorView>,
}

/// The reason why an item cannot be used.
#[derive(Serialize, ToSchema)]
pub(super) struct ItemErrorView {
    /// The position of the item in the body, counted from 0.
    item: usize,
    /// The reason, for people.
    message: String,
}

/// Report the costs of calls
///
/// LiteLLM's generic callback makes this request after each call. The body holds LiteLLM's `StandardLoggingPayload`: one
/// object, an array of objects, or one object per line. A report may be repeated: repeated notices change nothing. The
/// grant needs the access `billing`.
#[utoipa::path(
    post,
    path = "/api/internal/billing/ingest",
    tag = "billing",
    request_body(content(
        (Value = "application/json"),
        (String = "application/x-ndjson")
    )),
    responses(
        (status = 200, description = "The service has read the report. The answer counts the notices by what the service did with them.", body = IngestReportView),
        (status = 400, description = "`invalid_json`: the body is not JSON, or is empty.", body = ErrorBody),
        AuthErrorResponses,
        (status = 408, description = "`request_timeout`: the body did not arrive in time.", body = ErrorBody),
        (status = 413, description = "`body_too_large`: the body is larger than 16 MiB. Send fewer calls in one report.", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`: send the body as `application/json` or `application/x-ndjson`.", body = ErrorBody)
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

/// Show the costs of a run
///
/// Returns the bill of the run, and a receipt for each call that was charged.
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/receipts",
    tag = "billing",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 200, description = "The bill and the receipts.", body = ReceiptsView),
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

/// List runs with problems in their bills
///
/// A run is listed if a call has no receipt in time, has used tokens and cost nothing, or has two notices that
/// contradict each other. The grant needs the access `admin`.
#[utoipa::path(
    get,
    path = "/api/v1/billing/flagged",
    tag = "billing",
    params(FlaggedRunsQuery),
    responses(
        (status = 200, description = "The bills of such runs, of all grants.", body = FlaggedRunsPage),
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
        return Err(ApiError::invalid_parameter("`limit` is invalid: give a number from 1 to 200"));
    }
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    let books = api.billing.clone();
    // The read continues after the client has left. The permit is released when the read ends.
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

/// The maximum size of a report, in bytes. LiteLLM reports 512 calls at once by default, each with its messages.
pub(super) const MAX_NOTICES_BYTES: usize = 16 << 20;

/// The content types of a report. Clients send lines of JSON under both names.
const NOTICE_MEDIA_TYPES: AcceptedMedia = AcceptedMedia {
    kinds: &["application/json", "application/x-ndjson"],
    description: "application/json` or `application/x-ndjson",
};
