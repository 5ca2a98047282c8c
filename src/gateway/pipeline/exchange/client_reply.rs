//! A response on its way to the client: its head, and the body type that all responses share.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Response, StatusCode};
use hyper::body::{Body, Frame, SizeHint};

use super::observed_body::ObservedBody;
use super::provider_response::ResponseBodyError;
use crate::base::header_lines::HeaderLines;
use crate::base::streamed_endpoint::StreamedBody;

/// A response on its way to the client. The server of the connection frames the response.
pub struct ClientReply {
    pub status: StatusCode,
    pub fields: HeaderLines,
    pub body: ResponseBody,
}

/// The body of a response: a text of the gateway itself, the observed body from the upstream, or an answer over a
/// connection.
pub enum ResponseBody {
    Text(Option<Bytes>),
    Observed(ObservedBody),
    /// The body of an answer over a connection.
    Streamed(StreamedBody),
}

impl ClientReply {
    /// Wraps a response of the gateway itself.
    pub fn own(response: Response<impl Into<Bytes>>) -> Self {
        let (head, text) = response.into_parts();
        let fields = HeaderLines::from(&head.headers);
        Self { status: head.status, fields, body: ResponseBody::from_text(text) }
    }

    /// Converts the reply to hyper's response type.
    pub fn into_response(self) -> Response<ResponseBody> {
        let mut response = Response::new(self.body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.fields.into_headers();
        response
    }
}

impl ResponseBody {
    pub fn from_text(text: impl Into<Bytes>) -> Self {
        Self::Text(Some(text.into()).filter(|text| !text.is_empty()))
    }

    /// Polls for the next bytes, like [`UpstreamBody::poll_data`](crate::gateway::upstream::UpstreamBody::poll_data).
    pub fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ResponseBodyError>>> {
        match self {
            Self::Text(text) => Poll::Ready(text.take().map(Ok)),
            Self::Observed(body) => body.poll_data(cx),
            // Bodies over connections have no trailers.
            Self::Streamed(body) => Pin::new(body)
                .poll_frame(cx)
                .map_ok(|frame| frame.into_data().unwrap_or_default())
                .map_err(ResponseBodyError::Endpoint),
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        match self.get_mut() {
            Self::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Observed(body) => Pin::new(body).poll_frame(cx),
            Self::Streamed(body) => {
                Pin::new(body).poll_frame(cx).map_err(ResponseBodyError::Endpoint)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::Observed(body) => body.is_end_stream(),
            Self::Streamed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            Self::Observed(body) => body.size_hint(),
            Self::Streamed(body) => body.size_hint(),
        }
    }
}
