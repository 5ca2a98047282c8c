//! The inputs of handlers: the caller's grant, the path, the query and the body.
//!
//! Each extractor refuses with an error of this API, so that no client reads a text of axum's.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::time::timeout;

use super::error::ApiError;
use super::{ApiState, MAX_REQUEST_BODY_BYTES};
use crate::base::json;
use crate::base::serde_words::{self, JsonInputError};
use crate::service::auth::{AccessDeniedError, AccessGrant, GrantScope};

/// The caller's grant. A handler without this argument answers every client.
pub(super) struct AuthenticatedCaller(pub(super) Arc<AccessGrant>);

/// A body of JSON.
pub(super) struct JsonBody<T>(pub(super) T);

/// The parameters of the path.
pub(super) struct PathParam<T>(pub(super) T);

/// The query.
pub(super) struct QueryParams<T>(pub(super) T);

impl AuthenticatedCaller {
    pub(super) fn require_scope(&self, access: GrantScope) -> Result<(), ApiError> {
        Ok(self.0.check_scope(access)?)
    }

    /// Checks that the caller may read runs: the runs of its own grant, or of all grants.
    pub(super) fn require_read(&self) -> Result<(), ApiError> {
        self.require_scope(GrantScope::Read)
            .or_else(|denied| self.require_scope(GrantScope::Admin).map_err(|_| denied))
    }
}

impl FromRequestParts<Arc<ApiState>> for AuthenticatedCaller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<ApiState>) -> Result<Self, ApiError> {
        let grant = if let Some(grant) = &api.anonymous_grant {
            Arc::clone(grant)
        } else {
            let token = bearer_token(&parts.headers).ok_or(AccessDeniedError::NoToken)?;
            api.grants.check_token(token).await?
        };
        tracing::Span::current().record("grant", &*grant.id);
        Ok(Self(grant))
    }
}

/// Returns the token of the only `Authorization` header, if its scheme is `Bearer` (RFC 6750,
/// section 2.1).
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (scheme, token) = given.next()?.to_str().ok()?.split_once(' ')?;
    let is_only = given.next().is_none();
    (is_only && scheme.eq_ignore_ascii_case("bearer")).then_some(token.trim_matches(' '))
}

impl<T: DeserializeOwned> FromRequest<Arc<ApiState>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Arc<ApiState>) -> Result<Self, ApiError> {
        let bytes = read_body(request, api, &JSON_MEDIA_TYPES, MAX_REQUEST_BODY_BYTES).await?;
        // serde accepts a repeated key in a map such as `metadata`, and keeps the last value; this
        // check refuses it. It comes first, because parsed values take up to a hundred times the memory of their text.
        if let Err(error) = json::check_small_document(&bytes, MAX_BODY_VALUES) {
            // serde names the line of a body that is not JSON.
            let read = serde_json::from_slice::<IgnoredAny>(&bytes);
            return Err(match read {
                Err(syntax) => ApiError::InvalidJson(syntax.to_string()),
                Ok(_) => ApiError::invalid_body(error),
            });
        }
        let body = serde_words::from_slice(&bytes).map_err(|error| match error {
            JsonInputError::Data(said) => ApiError::invalid_body(said),
            JsonInputError::Syntax(said) => ApiError::InvalidJson(said),
        })?;
        Ok(Self(body))
    }
}

/// The content types that a body may have.
pub(super) struct AcceptedMedia {
    pub(super) kinds: &'static [&'static str],
    /// The text for a client that sends another content type.
    pub(super) description: &'static str,
}

/// Reads a body of at most `limit` bytes whose content type is one of `media`.
///
/// A web page may send a body of a simple content type to any server. It may send the types of
/// `media` only after a preflight request, which this service does not allow.
pub(super) async fn read_body(
    request: Request,
    api: &Arc<ApiState>,
    media: &AcceptedMedia,
    limit: usize,
) -> Result<Bytes, ApiError> {
    if !media.kinds.iter().any(|kind| has_media_type(request.headers(), kind)) {
        return Err(ApiError::UnsupportedMediaType(media.description));
    }
    let bytes = timeout(api.limits.timeout, Bytes::from_request(request, api)).await;
    bytes.map_err(|_| ApiError::BodyTimeout)?.map_err(|rejection| body_error(&rejection, limit))
}

fn has_media_type(headers: &HeaderMap, kind: &str) -> bool {
    let given = headers.get(CONTENT_TYPE).and_then(|given| given.to_str().ok()).unwrap_or_default();
    given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(kind)
}

fn body_error(rejection: &BytesRejection, limit: usize) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge(limit),
        _ => ApiError::InvalidJson("it broke off".to_owned()),
    }
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<ApiState>> for PathParam<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<ApiState>) -> Result<Self, ApiError> {
        let path = Path::from_request_parts(parts, api).await;
        path.map(|Path(at)| Self(at))
            .map_err(|_| ApiError::invalid_parameter("the path is not UTF-8"))
    }
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<ApiState>> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<ApiState>) -> Result<Self, ApiError> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(asked)| Self(asked)).map_err(|error| {
            // The message of axum without its beginning, "Failed to deserialize query string".
            let said = error.body_text();
            let said = said.split_once(": ").map_or(&*said, |(_, said)| said);
            let said = said.replace("invalid digit found in string", "give a whole number");
            ApiError::invalid_parameter(format_args!("invalid query: {said}"))
        })
    }
}

pub(super) const JSON_MEDIA_TYPES: AcceptedMedia =
    AcceptedMedia { kinds: &["application/json"], description: "application/json" };

/// The most values in a body. Our choice: thousands of messages of a chat. Parsed, so many values take at most 20 MiB.
const MAX_BODY_VALUES: u32 = 32 * 1024;
