//! Receives a request's body, checking it as it arrives.

use std::pin::pin;
use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::json::{Document, Invalid, Limits, Scanner};
use super::request::Policy;
use super::rope::Rope;

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
pub async fn body(body: Incoming, policy: &Policy) -> Result<(Rope, Document), Error> {
    let receiving = receive(body, policy);
    let limit = policy.body_timeout;
    tokio::time::timeout(limit, receiving).await.unwrap_or(Err(Error::Timeout(limit)))
}

async fn receive(body: Incoming, policy: &Policy) -> Result<(Rope, Document), Error> {
    let mut body = pin!(body);
    let mut rope = Rope::default();
    let mut scanner = Scanner::new(Limits::default());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(Error::BrokenOff)?.into_data() else { continue };
        if rope.len() + data.len() as u64 > policy.max_body_bytes {
            return Err(Error::TooLarge { limit: policy.max_body_bytes });
        }
        scanner.feed(&data)?;
        rope.push(data);
    }
    Ok((rope, scanner.finish()?))
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
