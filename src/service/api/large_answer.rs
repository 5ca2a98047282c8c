//! Answers whose size an agent chooses, such as its output. A client that does not read holds the whole answer in memory,
//! so a large one counts as a download of its grant until the client has taken it.

use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;

use super::ApiState;
use super::error::ApiError;
use super::extract::AuthenticatedCaller;
use super::share_limiter::{GrantShareError, GrantShareGuard};

/// Returns the value as JSON.
///
/// # Errors
/// Returns an error if the answer is large, and the grant or all grants together have as many downloads as they may.
pub(super) fn send_json(
    api: &ApiState,
    caller: &AuthenticatedCaller,
    value: &impl Serialize,
) -> Result<Response, ApiError> {
    let text = Bytes::from(serde_json::to_vec(value).map_err(ApiError::internal_error)?);
    let length = text.len();
    let body = if length <= LARGE_ANSWER_BYTES {
        Body::from(text)
    } else {
        let share = acquire_download(api, caller)?;
        // A piece is made when the client has taken the pieces before it, so the share is held until the last one.
        Body::from_stream(stream::unfold((text, share), async |(mut rest, share)| {
            if rest.is_empty() {
                return None;
            }
            let piece = rest.split_to(rest.len().min(LARGE_ANSWER_BYTES));
            Some((Ok::<_, std::convert::Infallible>(piece), (rest, share)))
        }))
    };
    let headers =
        [(CONTENT_TYPE, "application/json".to_owned()), (CONTENT_LENGTH, length.to_string())];
    Ok((headers, body).into_response())
}

/// Counts one more download of a grant.
///
/// # Errors
/// Returns an error if the grant or all grants together have as many downloads as they may.
pub(super) fn acquire_download(
    api: &ApiState,
    caller: &AuthenticatedCaller,
) -> Result<GrantShareGuard, ApiError> {
    api.downloads.acquire_share(&caller.0.id).map_err(|full| match full {
        GrantShareError::GrantLimit(most) => ApiError::TooManyDownloads(most),
        GrantShareError::TotalLimit => {
            ApiError::too_busy("too many downloads of all grants together")
        }
    })
}

/// The largest answer that is no download, in bytes. Our choice: the size of a connection's buffer.
const LARGE_ANSWER_BYTES: usize = 64 << 10;
