//! The route of the webhook's signed replies: an answer from a chat or another program of the operator's.
//!
//! **Invariant:** nothing of a reply is read before its signature is valid, and its answer has the rights of one grant.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::{Request, State};
use serde::Deserialize;
use utoipa::ToSchema;

use super::ApiState;
use super::approvals::{
    ApprovalView, DecisionBody, DecisionWord, SpendingLimitsView, no_such_approval,
};
use super::error::{ApiError, ErrorBody};
use super::error_docs::NotFoundResponses;
use super::extract::{JSON_MEDIA_TYPES, read_body};
use crate::base::json;
use crate::base::serde_words::{self, JsonInputError};
use crate::service::auth::{AccessDeniedError, AccessGrant, GrantScope};
use crate::tools::approval::store::ApprovalStore;

/// A signed reply to a message about a question.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ApprovalReply)]
pub(super) struct ReplyBody {
    /// The kind of the reply: `approval.decision`.
    r#type: ReplyType,
    /// The answer.
    data: ReplyData,
}

/// The kind of a reply.
#[derive(Deserialize, ToSchema)]
#[schema(as = ApprovalReplyType)]
enum ReplyType {
    #[serde(rename = "approval.decision")]
    Decision,
}

/// The answer in a reply.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ApprovalReplyData)]
struct ReplyData {
    /// The id of the question.
    approval: String,
    /// The digest of the question, as the message had it.
    digest: String,
    /// The person who answers, by the name in `[tools.approvals.webhook.approvers]`.
    #[schema(example = "U024BE7LH")]
    user: String,
    /// The answer.
    decision: DecisionWord,
    /// The reason, for the agent and for the records: at most 500 bytes.
    reason: Option<String>,
    /// The new values of limits, for a yes to a question about a budget.
    raise: Option<SpendingLimitsView>,
}

/// Take a signed reply to a question
///
/// The request needs no grant: its signature says who sends it. The headers `webhook-id`, `webhook-timestamp` and
/// `webhook-signature` are those of Standard Webhooks, with the key `tools.approvals.webhook.reply_secret`. A reply counts
/// within five minutes and once. Its user must have a grant with the access `approve`, which has not started the run.
#[utoipa::path(
    post,
    path = "/api/v1/approvals/replies",
    tag = "approvals",
    params(
        ("webhook-id" = String, Header, description = "The id of the reply, which counts once."),
        ("webhook-timestamp" = String, Header, description = "The time of the signature, in seconds since 1970."),
        ("webhook-signature" = String, Header, description = "`v1,` and the Base64 of the signature; several are separated by blanks.")
    ),
    request_body = ReplyBody,
    responses(
        (status = 200, description = "The answered question.", body = ApprovalView),
        (status = 400, description = "`invalid_json`: the body is not JSON.", body = ErrorBody),
        (status = 401, description = "`invalid_signature`: the signature, its headers or its time are not valid. `grant_revoked`, `grant_expired`: the user's grant is not valid.", body = ErrorBody),
        (status = 402, description = "`grant_budget_exhausted`: the caps of the grant that has started the run do not leave the money for the raise.", body = ErrorBody),
        (status = 403, description = "`unknown_approver`: the table has no such user. `forbidden`: the user's grant has no access `approve`. `forbidden_own_run`: the user's grant has started the run. `forbidden_agent`, `forbidden_account`: the user's grant does not answer for the run.", body = ErrorBody),
        (status = 408, description = "`request_timeout`: the body did not arrive in time.", body = ErrorBody),
        (status = 409, description = "`reply_replayed`: a reply with this id was received before. `digest_mismatch`, `approval_closed`: as for any answer.", body = ErrorBody),
        (status = 413, description = "`body_too_large`: the body is larger than 64 KiB.", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`: send the body as `application/json`.", body = ErrorBody),
        (status = 422, description = "`invalid_request`: a field of the body is invalid; the message names it.", body = ErrorBody),
        (status = 500, description = "`internal`: the service has failed. Its log has the reason under the `x-request-id` of the answer.", body = ErrorBody),
        (status = 503, description = "`too_many_connections`, `storage_full`: the service is busy, or its disk is full.", body = ErrorBody),
        NotFoundResponses
    ),
    security(())
)]
pub(super) async fn take_reply(
    State(api): State<Arc<ApiState>>,
    request: Request,
) -> Result<Json<ApprovalView>, ApiError> {
    let store = api.run_service.approvals();
    // Without replies, the path answers like one that does not exist.
    let webhook =
        store.as_ref().and_then(ApprovalStore::webhook).filter(|hook| hook.takes_replies());
    let (Some(store), Some(webhook)) = (store, webhook) else { return Err(ApiError::NoSuchPath) };
    let headers = request.headers().clone();
    let bytes = read_body(request, &api, &JSON_MEDIA_TYPES, MAX_REPLY_BYTES).await?;
    let reply = webhook
        .check_reply(&headers, &bytes, SystemTime::now())
        .map_err(|error| ApiError::InvalidSignature(error.to_string()))?;
    let ReplyBody { r#type: ReplyType::Decision, data } = parse_reply(&bytes)?;
    let grant = match webhook.find_approver(&data.user) {
        Some(grant) => api.approving_grant(grant).await?,
        None => return Err(AccessDeniedError::UnknownApprover.into()),
    };
    let ReplyData { approval, digest, decision, reason, raise, .. } = data;
    let row = store.find(&approval).await?.ok_or_else(|| no_such_approval(&approval))?;
    let answer = DecisionBody {
        decision,
        digest,
        reason,
        raise,
        scope: None,
        max_uses: None,
        valid_for: None,
        not_after: None,
    };
    let decided = api.decide(&grant, (&store, row), answer, Some(reply)).await?;
    Ok(Json(decided.into()))
}

fn parse_reply(bytes: &[u8]) -> Result<ReplyBody, ApiError> {
    let body = serde_words::from_slice(bytes).map_err(|error| match error {
        JsonInputError::Data(said) => ApiError::invalid_body(said),
        JsonInputError::Syntax(said) => ApiError::InvalidJson(said),
    })?;
    json::check_document(bytes).map_err(ApiError::invalid_body)?;
    Ok(body)
}

impl ApiState {
    /// Returns the grant of a person who answers, if it is valid and may approve.
    async fn approving_grant(&self, id: &str) -> Result<AccessGrant, ApiError> {
        let grant = self.grants.find_grant(id).await.map_err(|error| {
            tracing::error!(grant = id, %error, "a grant of the webhook's approvers cannot be read");
            ApiError::from(AccessDeniedError::UnknownApprover)
        })?;
        grant.check_valid_at(SystemTime::now())?;
        grant.check_scope(GrantScope::Approve)?;
        Ok(grant)
    }
}

/// The largest body of a reply, in bytes. Our choice.
pub(super) const MAX_REPLY_BYTES: usize = 64 * 1024;
