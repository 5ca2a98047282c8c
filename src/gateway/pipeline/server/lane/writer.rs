//! A response on its way to the client: the head, and the body as its frames arrive.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use hyper::body::Body;
use tokio::io::AsyncWrite;

use super::{ClientWatch, LaneServer};
use crate::base::socket::ServerStream;
use crate::gateway::pipeline::exchange::{ClientReply, ResponseBody, ResponseBodyError};
use crate::gateway::upstream::own_small_frame;

/// The writer of one response.
///
/// Everything that is ready at the same time is written at once. While the client does not read, the
/// body is not polled.
pub(super) struct LaneResponseWriter<'a> {
    stream: &'a mut ServerStream,
    watch: &'a mut ClientWatch,
    /// The body, or `None` after its end.
    body: Option<ResponseBody>,
    framing: LaneResponseFraming,
    queue: WriteQueue<'a>,
}

/// The write buffer that the responses of a listener share. A response with nothing to write does not
/// hold the buffer.
#[derive(Debug, Default)]
pub(super) struct OutBuffer(Mutex<Vec<u8>>);

/// The way in which a response marks the end of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneResponseFraming {
    /// The declared length, of which this many bytes remain.
    Length(u64),
    Chunked,
    /// No body; the status alone implies this.
    Nothing,
}

/// The bytes to be written, in the order of the fields.
struct WriteQueue<'a> {
    buffer: &'a OutBuffer,
    joined: Vec<u8>,
    /// A frame that is too large to be copied.
    large: Bytes,
    behind: &'static [u8],
    /// The number of these bytes that are written.
    written: usize,
}

/// The next step of the writer.
enum WriterStep {
    Take(Option<Result<Bytes, ResponseBodyError>>),
    /// The client does not read, so the writer waits for the client alone.
    Flush,
    /// The client has disconnected, or an operator aborted the call.
    ClientGone,
    Failed(io::Error),
}

impl<'a> LaneResponseWriter<'a> {
    /// Takes a response and queues its head. `goes_on` is true if the connection may serve another
    /// call.
    pub(super) fn new(
        stream: &'a mut ServerStream,
        watch: &'a mut ClientWatch,
        answer: ClientReply,
        lane: &'a LaneServer,
        goes_on: bool,
    ) -> Self {
        let ClientReply { status, fields, body } = answer;
        let framing = match (status, body.size_hint().exact()) {
            (StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED, _) => LaneResponseFraming::Nothing,
            (_, Some(length)) => LaneResponseFraming::Length(length),
            (_, None) => LaneResponseFraming::Chunked,
        };
        let mut queue = WriteQueue::new(&lane.out);
        let joined = queue.joined();
        write_head(joined, status, fields.as_bytes(), framing);
        if !goes_on {
            joined.extend_from_slice(b"connection: close\r\n");
        }
        joined.extend_from_slice(b"date: ");
        lane.date.write_date(joined);
        joined.extend_from_slice(b"\r\n\r\n");
        Self { stream, watch, body: Some(body), framing, queue }
    }

    /// Writes the whole response. Returns false if the body failed, an operator aborted the call, or
    /// the client disconnected.
    pub(super) async fn write_response(mut self) -> io::Result<bool> {
        // Each turn takes a frame, or waits for a client that does not read. A body of known length ends
        // with its last byte; a chunked body ends with `Take(None)`.
        while !matches!(self.framing, LaneResponseFraming::Length(0) | LaneResponseFraming::Nothing)
        {
            match poll_fn(|cx| self.poll_step(cx)).await {
                WriterStep::Take(Some(Ok(mut data))) => {
                    if self.queue.is_full() {
                        data = own_small_frame(data);
                        if !self.flush_queue().await? {
                            return Ok(false);
                        }
                    }
                    // A small frame is copied into the queue, so the worker's read buffer is free again.
                    self.queue.push(&mut self.framing, data);
                }
                WriterStep::Take(None) if self.framing == LaneResponseFraming::Chunked => {
                    self.queue.push_last_chunk();
                    break;
                }
                WriterStep::Flush if self.flush_queue().await? => {}
                // The guard above has tried the flush. So this arm means: the body failed or is shorter than
                // declared, an operator aborted the call, or the client disconnected. The framing is broken,
                // so the connection must close.
                WriterStep::Take(_) | WriterStep::Flush | WriterStep::ClientGone => {
                    return Ok(false);
                }
                WriterStep::Failed(error) => return Err(error),
            }
        }
        // Dropping the body settles the call. The call must be settled before the client can see the
        // end of the response.
        self.body = None;
        self.flush_queue().await
    }

    /// Polls for the next step. Like hyper, the writer checks for a disconnect before it polls the
    /// body.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<WriterStep> {
        if self.watch.is_gone(self.stream) {
            return Poll::Ready(WriterStep::ClientGone);
        }
        if let Some(body) = &mut self.body
            && let Poll::Ready(data) = body.poll_data(cx)
        {
            return Poll::Ready(WriterStep::Take(data));
        }
        if self.watch.poll_gone(self.stream, cx).is_ready() {
            return Poll::Ready(WriterStep::ClientGone);
        }
        // The body has nothing more now: write what is queued instead of waiting. The polls above have
        // registered the task for the next event, so nothing is polled again after the write.
        match self.poll_flush(cx) {
            Poll::Ready(Ok(true)) => Poll::Pending,
            Poll::Ready(Ok(false)) => Poll::Ready(WriterStep::ClientGone),
            Poll::Ready(Err(error)) => Poll::Ready(WriterStep::Failed(error)),
            Poll::Pending => Poll::Ready(WriterStep::Flush),
        }
    }

    /// Writes everything that is queued. Returns false if the client disconnected or an operator
    /// aborted the call.
    async fn flush_queue(&mut self) -> io::Result<bool> {
        poll_fn(|cx| self.poll_flush(cx)).await
    }

    /// Polls for [`Self::flush_queue`].
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        while self.queue.written < self.queue.len() {
            match ready!(self.poll_write(cx))? {
                Some(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Some(length) => self.queue.written += length,
                None => return Poll::Ready(Ok(false)),
            }
        }
        if !self.queue.is_empty() {
            self.queue.clear();
        }
        Poll::Ready(Ok(true))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<usize>>> {
        let stream = Pin::new(&mut *self.stream);
        let slices = self.queue.unwritten_slices();
        let wrote = match &slices {
            [only, second, _] if second.is_empty() => stream.poll_write(cx, only),
            _ => stream.poll_write_vectored(cx, &slices),
        };
        if let Poll::Ready(wrote) = wrote {
            return Poll::Ready(wrote.map(Some));
        }
        // The write is blocked. Two events may end the wait: an operator's abort and the client's disconnect.
        // The stream's own timeout closes a client that reads nothing at all.
        if let Some(ResponseBody::Observed(body)) = &mut self.body
            && body.poll_abort(cx).is_ready()
        {
            return Poll::Ready(Ok(None));
        }
        ready!(self.watch.poll_gone(self.stream, cx));
        Poll::Ready(Ok(None))
    }
}

impl OutBuffer {
    /// Frees the buffer until there is something to write again.
    pub(super) fn release(&self) {
        *self.lock() = Vec::new();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> WriteQueue<'a> {
    fn new(buffer: &'a OutBuffer) -> Self {
        Self { buffer, joined: Vec::new(), large: Bytes::new(), behind: b"", written: 0 }
    }

    /// Returns the text that is written next, to append to.
    fn joined(&mut self) -> &mut Vec<u8> {
        // Take the listener's buffer. If another response has the buffer, the lock holds an empty vector, and
        // this response allocates.
        if self.joined.capacity() == 0 {
            self.joined = std::mem::take(&mut *self.buffer.lock());
            self.joined.reserve(HEAD_CAPACITY_BYTES);
        }
        &mut self.joined
    }

    /// Forgets the written bytes and returns the buffer.
    fn clear(&mut self) {
        (self.large, self.behind, self.written) = (Bytes::new(), b"", 0);
        let mut joined = std::mem::take(&mut self.joined);
        joined.clear();
        // Return the buffer only if it is small. A large one is freed, so idle memory stays bounded.
        if (1..=KEPT_BYTES).contains(&joined.capacity()) {
            *self.buffer.lock() = joined;
        }
    }

    fn len(&self) -> usize {
        self.joined.len() + self.large.len() + self.behind.len()
    }

    fn is_empty(&self) -> bool {
        self.joined.is_empty() && self.large.is_empty()
    }

    /// Returns true if the queue must be written before more is added.
    fn is_full(&self) -> bool {
        !self.large.is_empty() || self.joined.len() >= MAX_QUEUED_BYTES
    }

    fn push(&mut self, framing: &mut LaneResponseFraming, mut data: Bytes) {
        let is_chunk = match framing {
            // Never send more than the declared length: the surplus would be read as the next response.
            LaneResponseFraming::Length(left) => {
                data.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= data.len() as u64;
                false
            }
            // An empty chunk would end the body.
            LaneResponseFraming::Chunked if data.is_empty() => return,
            LaneResponseFraming::Chunked => {
                write_chunk_size(self.joined(), data.len());
                true
            }
            LaneResponseFraming::Nothing => return,
        };
        let behind: &[u8] = if is_chunk { b"\r\n" } else { b"" };
        // A large frame is queued last: `is_full` then forces a flush, so nothing is queued behind it
        // out of order.
        if data.len() <= COALESCE_BYTES {
            let joined = self.joined();
            joined.extend_from_slice(&data);
            joined.extend_from_slice(behind);
        } else {
            (self.large, self.behind) = (data, behind);
        }
    }

    /// Queues the last chunk, which ends the body.
    fn push_last_chunk(&mut self) {
        if self.large.is_empty() {
            self.joined().extend_from_slice(b"0\r\n\r\n");
        } else {
            self.behind = b"\r\n0\r\n\r\n";
        }
    }

    /// Returns the queued bytes that are not written yet. Empty parts come last.
    fn unwritten_slices(&self) -> [IoSlice<'_>; 3] {
        let mut skipped = self.written;
        let mut slices = [IoSlice::new(&[]); 3];
        let mut used = 0;
        for part in [&self.joined[..], &self.large, self.behind] {
            let skip = skipped.min(part.len());
            skipped -= skip;
            if skip < part.len() {
                slices[used] = IoSlice::new(&part[skip..]);
                used += 1;
            }
        }
        slices
    }
}

/// Appends the status line and the fields, except the fields that belong to the connection.
fn write_head(out: &mut Vec<u8>, status: StatusCode, fields: &[u8], framing: LaneResponseFraming) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    // Like hyper, the lane sends a reason, because some clients expect one.
    out.extend_from_slice(status.canonical_reason().unwrap_or("<none>").as_bytes());
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(fields);
    match framing {
        LaneResponseFraming::Length(length) => {
            out.extend_from_slice(b"content-length: ");
            out.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        LaneResponseFraming::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        LaneResponseFraming::Nothing => {}
    }
}

/// Appends the size of a chunk in hexadecimal, and a line end.
fn write_chunk_size(out: &mut Vec<u8>, size: usize) {
    let mut digits = [0; 2 * size_of::<usize>()];
    let (mut at, mut left) = (digits.len(), size);
    // The digits are written from the end. The first condition writes one digit even for zero.
    while at == digits.len() || left > 0 {
        at -= 1;
        digits[at] = b"0123456789abcdef"[left & 15];
        left >>= 4;
    }
    out.extend_from_slice(&digits[at..]);
    out.extend_from_slice(b"\r\n");
}

/// The reserved size of the write buffer, in bytes: status, fields and length of nearly every response,
/// and a short body, in one allocation.
const HEAD_CAPACITY_BYTES: usize = 1024;

/// The largest buffer, in bytes, that is kept for the next response.
const KEPT_BYTES: usize = 16 * 1024;

/// The largest frame, in bytes, that is copied. A copy is cheaper than another slice in the system
/// call.
const COALESCE_BYTES: usize = 8 * 1024;

/// The most queued bytes before a write: the amount that hyper buffers by default.
const MAX_QUEUED_BYTES: usize = 64 * 1024;
