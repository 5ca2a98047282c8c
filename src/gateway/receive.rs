//! Receives a request's body, checking it as it arrives.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::policy::Config;
use crate::base::json::Invalid;
use crate::body::{Body, Reader};
use crate::protocol::Route;

/// Why a body could not be received.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the request body is larger than the limit of {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the request body did not arrive within {}", humantime::format_duration(*.0))]
    Timeout(Duration),
    #[error("the request body is not acceptable JSON: {0}")]
    Json(#[from] Invalid),
    #[error("the request body broke off")]
    BrokenOff(#[source] hyper::Error),
}

/// The body as the frames it came in, and what stands in it.
pub async fn body(route: Route, body: Incoming, policy: &Config) -> Result<Body, Error> {
    let receiving = receive(route, body, policy);
    let limit = policy.body_timeout;
    tokio::time::timeout(limit, receiving).await.unwrap_or(Err(Error::Timeout(limit)))
}

async fn receive(route: Route, body: Incoming, policy: &Config) -> Result<Body, Error> {
    let mut body = pin!(body);
    let mut reader = Reader::new(route);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(Error::BrokenOff)?.into_data() else { continue };
        take(&mut reader, data, policy)?;
    }
    Ok(reader.finish()?)
}

/// The same for a body that is here already.
///
/// # Errors
/// It is too large, or not acceptable JSON.
pub fn whole(route: Route, body: Bytes, policy: &Config) -> Result<Body, Error> {
    let mut reader = Reader::new(route);
    take(&mut reader, body, policy)?;
    Ok(reader.finish()?)
}

fn take(reader: &mut Reader, data: Bytes, policy: &Config) -> Result<(), Error> {
    if reader.len() + data.len() as u64 > policy.max_body_bytes {
        return Err(Error::TooLarge { limit: policy.max_body_bytes });
    }
    Ok(reader.push(data)?)
}

impl Error {
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "request_too_large",
            Self::Timeout(_) => "request_timeout",
            Self::Json(invalid) => invalid.code(),
            Self::BrokenOff(_) => "client_gone",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Timeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Json(_) | Self::BrokenOff(_) => StatusCode::BAD_REQUEST,
        }
    }
}
