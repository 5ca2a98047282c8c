//! An answer on its way to the client: the head, and the body as its frames come.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Response, StatusCode, response};
use hyper::body::{Body, Frame};
use tokio::io::AsyncWrite;

use super::ClientWatch;
use super::date::HttpDate;
use crate::base::socket::Stream;
use crate::gateway::answer::Answer;
use crate::gateway::exchange::Broken;

/// Writes one answer.
///
/// What is ready at the same time is written at once. While the client reads nothing, the body is not polled.
pub(super) struct AnswerWriter<'a> {
    stream: &'a mut Stream,
    watch: &'a mut ClientWatch,
    /// `None` when it has ended.
    body: Option<Answer>,
    framing: AnswerFraming,
    queue: WriteQueue,
}

/// How the end of a body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerFraming {
    /// By its length, of which so much is left.
    Length(u64),
    Chunked,
    /// There is none, and nothing says so but the status.
    Nothing,
}

/// Bytes to be written, in this order.
#[derive(Default)]
struct WriteQueue {
    joined: Vec<u8>,
    /// A frame that is too large to be copied.
    large: Bytes,
    behind: &'static [u8],
}

/// What to do next.
enum WriterStep {
    Take(Option<Result<Frame<Bytes>, Broken>>),
    Flush,
    /// The client has left.
    Leave,
}

impl<'a> AnswerWriter<'a> {
    /// Takes an answer, and queues its head; `goes_on` says whether the connection may have another call.
    pub(super) fn new(
        stream: &'a mut Stream,
        watch: &'a mut ClientWatch,
        answer: Response<Answer>,
        date: &HttpDate,
        goes_on: bool,
    ) -> Self {
        let (head, body) = answer.into_parts();
        let framing = match (head.status, body.size_hint().exact()) {
            (StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED, _) => AnswerFraming::Nothing,
            (_, Some(length)) => AnswerFraming::Length(length),
            (_, None) => AnswerFraming::Chunked,
        };
        let mut joined = Vec::with_capacity(HEAD_ROOM_BYTES);
        write_head(&mut joined, &head, framing);
        if !goes_on {
            joined.extend_from_slice(b"connection: close\r\n");
        }
        joined.extend_from_slice(b"date: ");
        date.write(&mut joined);
        joined.extend_from_slice(b"\r\n\r\n");
        let queue = WriteQueue { joined, ..WriteQueue::default() };
        Self { stream, watch, body: Some(body), framing, queue }
    }

    /// Writes the answer to its end; `false` where it broke off, was cut, or its client has left.
    pub(super) async fn write(mut self) -> io::Result<bool> {
        while !matches!(self.framing, AnswerFraming::Length(0) | AnswerFraming::Nothing) {
            match poll_fn(|cx| self.poll_step(cx)).await {
                WriterStep::Take(Some(Ok(frame))) => {
                    if self.queue.is_full() && !self.flush().await? {
                        return Ok(false);
                    }
                    if let Ok(data) = frame.into_data() {
                        self.queue.push(&mut self.framing, data);
                    }
                }
                WriterStep::Take(None) if self.framing == AnswerFraming::Chunked => {
                    self.queue.end();
                    break;
                }
                WriterStep::Flush if self.flush().await? => {}
                // An answer that is shorter than was told is not whole, and neither is one that broke off.
                WriterStep::Take(_) | WriterStep::Flush | WriterStep::Leave => return Ok(false),
            }
        }
        // What the call has come to is settled before the client can know that it has ended.
        self.body = None;
        self.flush().await
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
    async fn flush(&mut self) -> io::Result<bool> {
        let mut written = 0;
        while written < self.queue.len() {
            match poll_fn(|cx| self.poll_write(written, cx)).await? {
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(length) => written += length,
                None => return Ok(false),
            }
        }
        self.queue = WriteQueue::default();
        Ok(true)
    }

    fn poll_write(
        &mut self,
        written: usize,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Option<usize>>> {
        let stream = Pin::new(&mut *self.stream);
        let slices = self.queue.slices(written);
        let wrote = match &slices {
            [only, second, _] if second.is_empty() => stream.poll_write(cx, only),
            _ => stream.poll_write_vectored(cx, &slices),
        };
        if let Poll::Ready(wrote) = wrote {
            return Poll::Ready(wrote.map(Some));
        }
        if let Some(Answer::Followed(body)) = &mut self.body
            && body.poll_cut(cx).is_ready()
        {
            return Poll::Ready(Ok(None));
        }
        ready!(self.watch.poll_gone(self.stream, cx));
        Poll::Ready(Ok(None))
    }
}

impl WriteQueue {
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

    fn push(&mut self, framing: &mut AnswerFraming, mut data: Bytes) {
        let is_chunk = match framing {
            AnswerFraming::Length(left) => {
                data.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= data.len() as u64;
                false
            }
            AnswerFraming::Chunked if data.is_empty() => return,
            AnswerFraming::Chunked => {
                write_size(&mut self.joined, data.len());
                true
            }
            AnswerFraming::Nothing => return,
        };
        let behind: &[u8] = if is_chunk { b"\r\n" } else { b"" };
        if data.len() <= JOINED_BYTES {
            self.joined.extend_from_slice(&data);
            self.joined.extend_from_slice(behind);
        } else {
            (self.large, self.behind) = (data, behind);
        }
    }

    /// Adds the last chunk.
    fn end(&mut self) {
        if self.large.is_empty() {
            self.joined.extend_from_slice(b"0\r\n\r\n");
        } else {
            self.behind = b"\r\n0\r\n\r\n";
        }
    }

    /// All but the first `written` bytes, the empty parts last.
    fn slices(&self, written: usize) -> [IoSlice<'_>; 3] {
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
fn write_head(out: &mut Vec<u8>, head: &response::Parts, framing: AnswerFraming) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(head.status.as_str().as_bytes());
    out.push(b' ');
    // As hyper has it: some clients expect a reason.
    out.extend_from_slice(head.status.canonical_reason().unwrap_or("<none>").as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in &head.headers {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            out.extend_from_slice(part);
        }
    }
    match framing {
        AnswerFraming::Length(length) => {
            out.extend_from_slice(b"content-length: ");
            out.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        AnswerFraming::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        AnswerFraming::Nothing => {}
    }
}

/// The size of a chunk and its line end.
fn write_size(out: &mut Vec<u8>, size: usize) {
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
const HEAD_ROOM_BYTES: usize = 1024;

/// Frames up to this size are copied behind one another: cheaper than a piece each for the system call.
const JOINED_BYTES: usize = 8 * 1024;

/// As much as hyper holds back by default, before it writes.
const MAX_QUEUED_BYTES: usize = 64 * 1024;
