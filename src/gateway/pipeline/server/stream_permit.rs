//! The bound of the HTTP/2 streams that are open at one time. Every answer takes memory until its client has taken it,
//! also one to a request that costs nothing and is no call.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, TryAcquireError};

use super::ConnectionError;

/// An answer's body on an HTTP/2 stream, with the permit of the stream.
pub(super) struct StreamBody<B> {
    inner: B,
    _permit: OwnedSemaphorePermit,
}

/// Answers a request whose permit is held until the answer has passed.
///
/// # Errors
/// Returns an error if there is no permit, which resets the stream.
pub(super) async fn answer_stream<F, B, E>(
    held: Result<(OwnedSemaphorePermit, F), TryAcquireError>,
) -> Result<Response<StreamBody<B>>, ConnectionError>
where
    F: Future<Output = Result<Response<B>, E>>,
    E: Into<ConnectionError>,
{
    let (permit, answered) = held?;
    let response = answered.await.map_err(Into::into)?;
    Ok(response.map(|inner| StreamBody { inner, _permit: permit }))
}

impl<B: Body<Data = Bytes> + Unpin> Body for StreamBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The most open HTTP/2 streams of a run's socket, for each worker. Our choice: four times the requests in flight that a run
/// may have unless the configuration says otherwise. A stream that no client takes holds about 6 KiB.
pub(super) const MAX_RUN_STREAMS: usize = 4096;

/// The most open HTTP/2 streams of a shared listener, of all runs and workers together. Our choice: four for each
/// connection that a worker may have.
pub const MAX_SHARED_STREAMS: usize = 16 * 1024;
