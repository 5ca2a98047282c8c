//! An answer on its way to the client: the head, and the body as its frames come.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Body, Frame};
use tokio::io::AsyncWrite;

use super::{ClientWatch, LaneServer};
use crate::base::socket::ServerStream;
use crate::gateway::pipeline::exchange::ResponseBodyError;
use crate::gateway::pipeline::local_response::{ClientReply, ResponseBody};

/// Writes one answer.
///
/// What is ready at the same time is written at once. While the client reads nothing, the body is not polled.
pub(super) struct LaneResponseWriter<'a> {
    stream: &'a mut ServerStream,
    watch: &'a mut ClientWatch,
    /// `None` when it has ended.
    body: Option<ResponseBody>,
    framing: LaneResponseFraming,
    queue: WriteQueue<'a>,
}

/// The buffer that answers are written from: the answers of a listener share it, and who has nothing to write holds none.
#[derive(Debug, Default)]
pub(super) struct OutBuffer(Mutex<Vec<u8>>);

/// How the end of a body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneResponseFraming {
    /// By its length, of which so much is left.
    Length(u64),
    Chunked,
    /// There is none, and nothing says so but the status.
    Nothing,
}

/// Bytes to be written, in this order.
struct WriteQueue<'a> {
    buffer: &'a OutBuffer,
    joined: Vec<u8>,
    /// A frame that is too large to be copied.
    large: Bytes,
    behind: &'static [u8],
}

/// What to do next.
enum WriterStep {
    Take(Option<Result<Frame<Bytes>, ResponseBodyError>>),
    Flush,
    /// The client has left.
    Leave,
}

impl<'a> LaneResponseWriter<'a> {
    /// Takes an answer, and queues its head; `goes_on` says whether the connection may have another call.
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

    /// Writes the answer to its end; `false` where it broke off, was cut, or its client has left.
    pub(super) async fn write_response(mut self) -> io::Result<bool> {
        while !matches!(self.framing, LaneResponseFraming::Length(0) | LaneResponseFraming::Nothing)
        {
            match poll_fn(|cx| self.poll_step(cx)).await {
                WriterStep::Take(Some(Ok(frame))) => {
                    if self.queue.is_full() && !self.flush_queue().await? {
                        return Ok(false);
                    }
                    if let Ok(data) = frame.into_data() {
                        self.queue.push(&mut self.framing, data);
                    }
                }
                WriterStep::Take(None) if self.framing == LaneResponseFraming::Chunked => {
                    self.queue.push_last_chunk();
                    break;
                }
                WriterStep::Flush if self.flush_queue().await? => {}
                // An answer that is shorter than was told is not whole, and neither is one that broke off.
                WriterStep::Take(_) | WriterStep::Flush | WriterStep::Leave => return Ok(false),
            }
        }
        // What the call has come to is settled before the client can know that it has ended.
        self.body = None;
        self.flush_queue().await
    }

    /// A client that has left is seen before what the upstream says meanwhile, as hyper has it.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<WriterStep> {
        if self.watch.poll_gone(self.stream, cx).is_ready() {
            return Poll::Ready(WriterStep::Leave);
        }
        if let Some(body) = &mut self.body
            && let Poll::Ready(frame) = Pin::new(body).poll_frame(cx)
        {
            return Poll::Ready(WriterStep::Take(frame));
        }
        if self.queue.is_empty() { Poll::Pending } else { Poll::Ready(WriterStep::Flush) }
    }

    /// Writes all that is queued; `false` where the client has left or an operator has cut the call.
    async fn flush_queue(&mut self) -> io::Result<bool> {
        let mut written = 0;
        while written < self.queue.len() {
            match poll_fn(|cx| self.poll_write(written, cx)).await? {
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(length) => written += length,
                None => return Ok(false),
            }
        }
        self.queue.clear();
        Ok(true)
    }

    fn poll_write(
        &mut self,
        written: usize,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Option<usize>>> {
        let stream = Pin::new(&mut *self.stream);
        let slices = self.queue.unwritten_slices(written);
        let wrote = match &slices {
            [only, second, _] if second.is_empty() => stream.poll_write(cx, only),
            _ => stream.poll_write_vectored(cx, &slices),
        };
        if let Poll::Ready(wrote) = wrote {
            return Poll::Ready(wrote.map(Some));
        }
        if let Some(ResponseBody::Followed(body)) = &mut self.body
            && body.poll_abort(cx).is_ready()
        {
            return Poll::Ready(Ok(None));
        }
        ready!(self.watch.poll_gone(self.stream, cx));
        Poll::Ready(Ok(None))
    }
}

impl OutBuffer {
    /// Gives the buffer back, until there is something to write again.
    pub(super) fn release(&self) {
        *self.lock() = Vec::new();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> WriteQueue<'a> {
    fn new(buffer: &'a OutBuffer) -> Self {
        Self { buffer, joined: Vec::new(), large: Bytes::new(), behind: b"" }
    }

    /// What is written next, to be added to.
    fn joined(&mut self) -> &mut Vec<u8> {
        if self.joined.capacity() == 0 {
            self.joined = std::mem::take(&mut *self.buffer.lock());
            self.joined.reserve(HEAD_CAPACITY_BYTES);
        }
        &mut self.joined
    }

    /// Forgets what was written, and gives the buffer back.
    fn clear(&mut self) {
        (self.large, self.behind) = (Bytes::new(), b"");
        let mut joined = std::mem::take(&mut self.joined);
        joined.clear();
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

    /// Whether it has to be written before there is more.
    fn is_full(&self) -> bool {
        !self.large.is_empty() || self.joined.len() >= MAX_QUEUED_BYTES
    }

    fn push(&mut self, framing: &mut LaneResponseFraming, mut data: Bytes) {
        let is_chunk = match framing {
            LaneResponseFraming::Length(left) => {
                data.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= data.len() as u64;
                false
            }
            LaneResponseFraming::Chunked if data.is_empty() => return,
            LaneResponseFraming::Chunked => {
                write_chunk_size(self.joined(), data.len());
                true
            }
            LaneResponseFraming::Nothing => return,
        };
        let behind: &[u8] = if is_chunk { b"\r\n" } else { b"" };
        if data.len() <= COALESCE_BYTES {
            let joined = self.joined();
            joined.extend_from_slice(&data);
            joined.extend_from_slice(behind);
        } else {
            (self.large, self.behind) = (data, behind);
        }
    }

    /// Adds the last chunk.
    fn push_last_chunk(&mut self) {
        if self.large.is_empty() {
            self.joined().extend_from_slice(b"0\r\n\r\n");
        } else {
            self.behind = b"\r\n0\r\n\r\n";
        }
    }

    /// All but the first `written` bytes, the empty parts last.
    fn unwritten_slices(&self, written: usize) -> [IoSlice<'_>; 3] {
        let mut skipped = written;
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

/// Status line and fields, but for those that are the connection's.
fn write_head(out: &mut Vec<u8>, status: StatusCode, fields: &[u8], framing: LaneResponseFraming) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    // As hyper has it: some clients expect a reason.
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

/// The size of a chunk and its line end.
fn write_chunk_size(out: &mut Vec<u8>, size: usize) {
    let mut digits = [0; 2 * size_of::<usize>()];
    let (mut at, mut left) = (digits.len(), size);
    while at == digits.len() || left > 0 {
        at -= 1;
        digits[at] = b"0123456789abcdef"[left & 15];
        left >>= 4;
    }
    out.extend_from_slice(&digits[at..]);
    out.extend_from_slice(b"\r\n");
}

/// Status, fields and length of nearly every answer, and a short body, in one allocation.
const HEAD_CAPACITY_BYTES: usize = 1024;

/// The buffer that is kept from answer to answer has no more room than that.
const KEPT_BYTES: usize = 16 * 1024;

/// Frames up to this size are copied behind one another: cheaper than a piece each for the system call.
const COALESCE_BYTES: usize = 8 * 1024;

/// As much as hyper holds back by default, before it writes.
const MAX_QUEUED_BYTES: usize = 64 * 1024;
