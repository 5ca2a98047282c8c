//! What handlers are given of a request: who asks, and what for.
//!
//! Each refuses in our own words, so that nobody ever reads one of axum's.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::error::Error;
use super::{Api, MAX_BODY_BYTES};
use crate::base::json;
use crate::base::serde_words::{self, JsonError};
use crate::grant::{Access, Denied, Grant};

/// Who asks. A handler without this answers everybody.
pub(super) struct Caller(pub(super) Arc<Grant>);

/// A body of JSON.
pub(super) struct Body<T>(pub(super) T);

/// What stands in the path.
pub(super) struct At<T>(pub(super) T);

/// The query.
pub(super) struct Asked<T>(pub(super) T);

impl Caller {
    pub(super) fn may(&self, access: Access) -> Result<(), Error> {
        Ok(self.0.allows(access)?)
    }

    /// At runs: at its own, or at everybody's.
    pub(super) fn may_look(&self) -> Result<(), Error> {
        self.may(Access::Read).or_else(|denied| self.may(Access::Admin).map_err(|_| denied))
    }
}

impl FromRequestParts<Arc<Api>> for Caller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Error> {
        let grant = if let Some(anybody) = &api.anybody {
            Arc::clone(anybody)
        } else {
            let token = token(&parts.headers).ok_or(Denied::Missing)?;
            api.grants.check(token).await?
        };
        tracing::Span::current().record("grant", &*grant.id);
        Ok(Self(grant))
    }
}

/// RFC 6750, section 2.1.
fn token(headers: &HeaderMap) -> Option<&str> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (scheme, token) = given.next()?.to_str().ok()?.split_once(' ')?;
    let is_only = given.next().is_none();
    (is_only && scheme.eq_ignore_ascii_case("bearer")).then_some(token.trim_matches(' '))
}

impl<T: DeserializeOwned> FromRequest<Arc<Api>> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Self, Error> {
        let bytes = bytes(request, api, &JSON, MAX_BODY_BYTES).await?;
        let body = serde_words::from_slice(&bytes).map_err(|error| match error {
            JsonError::Data(said) => Error::invalid(said),
            JsonError::Syntax(said) => Error::Json(said),
        })?;
        // Of a key that stands twice in a map, such as `metadata`, serde keeps the last value.
        json::check_document(&bytes).map_err(Error::invalid)?;
        Ok(Self(body))
    }
}

/// What a body may be.
pub(super) struct Media {
    pub(super) kinds: &'static [&'static str],
    /// For whoever sends something else.
    pub(super) said: &'static str,
}

/// A body of one of some kinds, of at most `limit` bytes.
///
/// Without the kinds a page in a browser could send one without asking first: of others it may.
pub(super) async fn bytes(
    request: Request,
    api: &Arc<Api>,
    media: &Media,
    limit: usize,
) -> Result<Bytes, Error> {
    if !media.kinds.iter().any(|kind| is_of(request.headers(), kind)) {
        return Err(Error::MediaType(media.said));
    }
    let bytes = timeout(api.limits.patience, Bytes::from_request(request, api)).await;
    bytes.map_err(|_| Error::TooSlow)?.map_err(|rejection| broken(&rejection, limit))
}

fn is_of(headers: &HeaderMap, kind: &str) -> bool {
    let given = headers.get(CONTENT_TYPE).and_then(|given| given.to_str().ok()).unwrap_or_default();
    given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(kind)
}

fn broken(rejection: &BytesRejection, limit: usize) -> Error {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Error::TooLarge(limit),
        _ => Error::Json("it broke off".to_owned()),
    }
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<Api>> for At<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Error> {
        let path = Path::from_request_parts(parts, api).await;
        path.map(|Path(at)| Self(at)).map_err(|_| Error::parameter("the path is not UTF-8"))
    }
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<Api>> for Asked<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Api>) -> Result<Self, Error> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(asked)| Self(asked)).map_err(|error| {
            // axum's sentence, without its "Failed to deserialize query string".
            let said = error.body_text();
            let said = said.split_once(": ").map_or(&*said, |(_, said)| said);
            let said = said.replace("invalid digit found in string", "give a whole number");
            Error::parameter(format_args!("the query is not understood: {said}"))
        })
    }
}

const JSON: Media = Media { kinds: &["application/json"], said: "application/json" };
