//! A response body that an async function writes, one frame after another.
//!
//! The function runs inside the body's own poll, without a task or a channel. The function is dropped with the body
//! when the client disconnects.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

/// A body whose frames a function writes.
pub(super) struct GeneratedBody {
    author: Option<BodyFuture>,
    page: PendingFrame,
    /// True after a frame was returned: the connection must write that frame before it receives another.
    pause: bool,
    length: Option<u64>,
}

/// The writer through which a function hands frames over.
pub(super) struct BodyWriter {
    page: PendingFrame,
}

/// The error that ends an answer early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("broken off, as the script says")]
pub(super) struct BodyAbortedError;

type BodyFuture = Pin<Box<dyn Future<Output = Result<(), BodyAbortedError>> + Send>>;
type PendingFrame = Arc<Mutex<Option<Bytes>>>;

impl GeneratedBody {
    /// Creates a body from the function `write`. A body with a `length` is not chunked.
    pub(super) fn from_writer<F>(length: Option<u64>, write: impl FnOnce(BodyWriter) -> F) -> Self
    where
        F: Future<Output = Result<(), BodyAbortedError>> + Send + 'static,
    {
        let page = PendingFrame::default();
        let author = write(BodyWriter { page: page.clone() });
        Self { author: Some(Box::pin(author)), page, pause: false, length }
    }

    /// Creates a body from complete bytes.
    pub(super) fn from_bytes(bytes: Bytes) -> Self {
        let length = Some(bytes.len() as u64);
        Self { author: None, page: Arc::new(Mutex::new(Some(bytes))), pause: false, length }
    }
}

impl BodyWriter {
    /// Hands a frame over, and returns when the connection asks for the next frame.
    pub(super) async fn send(&self, frame: Bytes) {
        self.send_last(frame);
        // The connection polls the whole body again for the next frame, so that no waker has to be stored.
        poll_fn(|_| if lock_frame(&self.page).is_some() { Poll::Pending } else { Poll::Ready(()) })
            .await;
    }

    /// Hands the last frame over. The connection may not ask for another frame.
    pub(super) fn send_last(&self, frame: Bytes) {
        *lock_frame(&self.page) = Some(frame).filter(|frame| !frame.is_empty());
    }
}

impl hyper::body::Body for GeneratedBody {
    type Data = Bytes;
    type Error = BodyAbortedError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyAbortedError>>> {
        if std::mem::take(&mut self.pause) {
            // hyper writes its buffered data when a body is pending. The waker makes hyper poll again after that.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        // The function runs here. It hands over at most one frame before it waits for the next poll.
        let ended = match &mut self.author {
            Some(author) => author.as_mut().poll(cx),
            None => Poll::Ready(Ok(())),
        };
        if ended.is_ready() {
            // A finished function must not be polled again.
            self.author = None;
        }
        let frame = lock_frame(&self.page).take();
        // A frame that the function wrote before its end is returned before the end.
        if let Some(frame) = frame {
            self.pause = true;
            return Poll::Ready(Some(Ok(Frame::data(frame))));
        }
        // A function that ends with an error breaks the body; without one the body ends in order.
        ended.map(|ended| ended.err().map(Err))
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Locks the frame. The lock is held only for a move, so that a poisoned lock still holds a whole value.
fn lock_frame(page: &Mutex<Option<Bytes>>) -> std::sync::MutexGuard<'_, Option<Bytes>> {
    page.lock().unwrap_or_else(PoisonError::into_inner)
}
