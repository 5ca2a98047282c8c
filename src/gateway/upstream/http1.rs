//! The gateway's own HTTP/1.1 client: one write for a request, one frame for each read of a response.
//!
//! A read waits for data without a buffer. When data is there, the read borrows the worker's scratch buffer, decodes in
//! place and hands on one contiguous slice. An open stream that waits therefore holds no read buffer.

mod body;
mod head;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::StatusCode;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::Instant;

use super::headers::UpstreamRequestHead;
use super::outage::LookupError;
use super::pool::UpstreamConnectionPool;
use super::{ProviderAnswer, UpstreamCall, UpstreamConfig, UpstreamError, UpstreamKind};
use crate::base::alarm::{Alarm, TimerPool};
use crate::base::rope::{ByteRope, SplicedBytes};
use crate::base::scratch::ScratchBuffer;
use crate::base::time::MAX_TIME;
pub(super) use body::Http1Body;
use head::ResponseHead;

/// A client for plain HTTP/1.1, with the connections of one worker.
pub(super) struct Http1Client {
    config: UpstreamConfig,
    worker: Arc<WorkerConnections>,
}

/// The state that the calls of one worker share.
#[derive(Debug)]
struct WorkerConnections {
    pool: UpstreamConnectionPool,
    scratch: ScratchBuffer,
    alarms: Arc<TimerPool>,
    /// A buffer for the text of the next request. The buffer is empty and unused between two requests.
    text: Mutex<Vec<u8>>,
}

/// A request that is being sent. A short request is one text in the worker's buffer; a long request is a list of
/// pieces.
struct RequestBytes<'a> {
    worker: &'a WorkerConnections,
    text: Vec<u8>,
    /// The number of bytes of `text` that are written.
    written: usize,
    pieces: ByteRope,
}

/// The head of a response, its connection, and the bytes that arrived behind the head.
struct ResponseStart {
    stream: TcpStream,
    head: ResponseHead,
    rest: BytesMut,
}

impl Http1Client {
    pub(super) fn new(config: UpstreamConfig) -> Self {
        let pool = UpstreamConnectionPool::new(config.pool_idle_timeout);
        let (scratch, alarms, text) = (ScratchBuffer::default(), Arc::default(), Mutex::default());
        Self { config, worker: Arc::new(WorkerConnections { pool, scratch, alarms, text }) }
    }

    pub(super) async fn close_idle_connections(&self) -> Infallible {
        self.worker.pool.close_expired().await
    }

    pub(super) fn kind(&self) -> UpstreamKind {
        self.config.kind
    }

    /// Sends a call and waits for the head of its response.
    ///
    /// The head and a short body are copied into the request's text at once, so the future does not hold them.
    pub(super) fn send_call(
        &self,
        call: UpstreamCall,
    ) -> impl Future<Output = Result<ProviderAnswer, UpstreamError>> {
        let UpstreamCall { head, body, deadline } = call;
        let request = RequestBytes::new(&self.worker, &head, body);
        self.send_request(request, deadline)
    }

    async fn send_request(
        &self,
        mut request: RequestBytes<'_>,
        deadline: Option<Instant>,
    ) -> Result<ProviderAnswer, UpstreamError> {
        let limit = self.config.first_byte_timeout;
        // The earlier of the two limits counts. `MAX_TIME` keeps the sum from overflowing.
        let now = Instant::now();
        let until = min_deadline(now + limit.min(MAX_TIME), deadline);
        let mut alarm = Alarm::new(&self.worker.alarms);
        let answer = {
            let mut answer = pin!(self.send_on_pooled_or_new(&mut request, now));
            // The answer is polled first: an answer that is ready wins over a timer that rang at the same time.
            poll_fn(|cx| {
                if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                    return Poll::Ready(answer);
                }
                // The call is pending, so the alarm wakes this task at the limit. Returning drops the call and its
                // connection.
                ready!(alarm.poll(until, cx));
                let is_deadline = deadline == Some(until);
                Poll::Ready(Err(if is_deadline {
                    UpstreamError::Deadline
                } else {
                    UpstreamError::FirstByteTimeout(limit)
                }))
            })
            .await
        };
        let ResponseStart { stream, head, rest } = answer?;
        // The alarm goes on with the body, so a stream needs one timer for its whole life.
        let timing = body::BodyTimeouts { idle: self.config.idle_timeout, deadline };
        let body = Http1Body::new((stream, rest), &head, timing, alarm, Arc::clone(&self.worker));
        let body = super::UpstreamBody::Plain(Box::new(body));
        Ok(ProviderAnswer { status: head.status, fields: head.fields, body })
    }

    /// Sends a request on an idle connection or on a new one. If an idle connection proves dead before it took a byte
    /// of the request, the client sends the request on a new connection.
    async fn send_on_pooled_or_new(
        &self,
        request: &mut RequestBytes<'_>,
        now: Instant,
    ) -> Result<ResponseStart, UpstreamError> {
        // The number of unwritten bytes is compared below to prove that nothing was delivered.
        let unwritten_bytes = request.remaining();
        // One idle connection at most is tried; `idle` is empty in every later round, so the loop ends.
        let mut idle = self.worker.pool.take_connection(now);
        loop {
            let was_idle = idle.is_some();
            let mut stream = match idle.take() {
                Some(stream) => stream,
                None => self.connect_with_timeout().await?,
            };
            match self.write_and_read_head(&mut stream, request).await {
                Ok((head, rest)) => return Ok(ResponseStart { stream, head, rest }),
                // The server closed the idle connection, and the kernel took no byte. Sending again cannot charge
                // twice.
                Err(_dead) if was_idle && request.remaining() == unwritten_bytes => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a request and reads the head of the response, which may come before the request is fully sent.
    async fn write_and_read_head(
        &self,
        stream: &mut TcpStream,
        request: &mut RequestBytes<'_>,
    ) -> Result<(ResponseHead, BytesMut), UpstreamError> {
        let (mut reader, mut writer) = stream.split();
        // Reading runs beside writing: a server may refuse a long request early and stop reading it.
        let mut reading = pin!(self.read_head(&mut reader));
        let (written, early) = tokio::select! {
            // Writing is polled first. The usual order is the request, then the response.
            biased;
            written = request.write_to(&mut writer) => (Some(written), None),
            early = reading.as_mut() => (None, Some(early)),
        };
        let read = match early {
            Some(early) => early,
            // The request is written, or writing failed. In both cases the server may still have sent a response.
            None => reading.await,
        };
        match (read, written) {
            (Ok((mut head, rest)), written) => {
                // A server that did not read the whole request cannot be used again: the rest would be taken for a new
                // request.
                head.keeps_alive &= matches!(written, Some(Ok(())));
                Ok((head, rest))
            }
            // Both directions failed. The write error is the cause, the read error its consequence.
            (Err(_), Some(Err(write_error))) => Err(UpstreamError::Io(write_error)),
            (Err(read_error), _) => Err(read_error),
        }
    }

    async fn connect_with_timeout(&self) -> Result<TcpStream, UpstreamError> {
        let limit = self.config.connect_timeout;
        let target = &self.config.url;
        match tokio::time::timeout(limit, resolve_and_connect(target.host(), target.port())).await {
            Ok(connected) => connected.map_err(UpstreamError::Connect),
            Err(_elapsed) => Err(UpstreamError::ConnectTimeout(limit)),
        }
    }

    /// Reads the head of the response, and returns the bytes behind the head, too.
    async fn read_head(
        &self,
        stream: &mut ReadHalf<'_>,
    ) -> Result<(ResponseHead, BytesMut), UpstreamError> {
        let mut seen = BytesMut::new();
        let mut interim = 0;
        loop {
            // Bytes behind an interim response are parsed before the next read.
            let parsed = if seen.is_empty() { Ok(None) } else { head::parse_head(&seen) };
            if let Some((head, length)) = parsed.map_err(UpstreamError::Malformed)? {
                seen.advance(length);
                // The client never asks for another protocol, so the bytes that follow would not be HTTP.
                if head.status == StatusCode::SWITCHING_PROTOCOLS {
                    return Err(UpstreamError::Malformed("the protocol was switched, unasked"));
                }
                if !head.status.is_informational() {
                    return Ok((head, seen));
                }
                interim += 1;
                if interim > MAX_INTERIM_RESPONSES {
                    return Err(UpstreamError::Malformed("too many interim responses"));
                }
            } else if seen.len() > head::MAX_HEAD_BYTES {
                return Err(UpstreamError::Malformed("the head is too large"));
            } else {
                let read = poll_fn(|cx| self.worker.poll_read(stream, cx));
                let chunk = read.await.map_err(UpstreamError::Io)?;
                if chunk.is_empty() {
                    return Err(UpstreamError::Closed);
                }
                // The first read is used without a copy. A head in several reads is rare and is joined.
                if seen.is_empty() { seen = chunk } else { seen.extend_from_slice(&chunk) }
            }
        }
    }
}

impl<'a> RequestBytes<'a> {
    fn new(worker: &'a WorkerConnections, head: &UpstreamRequestHead, body: SplicedBytes) -> Self {
        let length = body.len();
        // The buffer is taken, not locked: two requests at once get a buffer each, and the lock is never held over an
        // await.
        let mut text = std::mem::take(&mut *worker.text());
        head.write_http1(length, &mut text);
        if length <= JOINED_BYTES {
            body.append_to(&mut text);
            return Self { worker, text, written: 0, pieces: ByteRope::default() };
        }
        let mut pieces = ByteRope::from(Bytes::from(text));
        for piece in body.into_rope().into_pieces() {
            pieces.push(piece);
        }
        Self { worker, text: Vec::new(), written: 0, pieces }
    }

    /// Returns the number of bytes that are not written yet.
    fn remaining(&self) -> usize {
        self.text.len() - self.written + self.pieces.remaining()
    }

    /// Writes the whole request. Pieces that are written are freed at once.
    async fn write_to(&mut self, writer: &mut WriteHalf<'_>) -> io::Result<()> {
        while self.written < self.text.len() {
            let written = writer.write(&self.text[self.written..]).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.written += written;
        }
        // The text is written, so the next request can use the buffer while this call waits for its response.
        self.give_back();
        writer.write_all_buf(&mut self.pieces).await
    }

    /// Gives the text buffer back to the worker, unless the buffer has grown too large.
    fn give_back(&mut self) {
        let mut text = std::mem::take(&mut self.text);
        self.written = 0;
        text.clear();
        // Capacity 0 means that the buffer was given back before or became the first piece.
        if (1..=KEPT_BYTES).contains(&text.capacity()) {
            *self.worker.text() = text;
        }
    }
}

impl Drop for RequestBytes<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl WorkerConnections {
    fn text(&self) -> MutexGuard<'_, Vec<u8>> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads once; the result is empty at the end of the stream. The scratch buffer is taken only when there is data to
    /// read.
    fn poll_read(
        &self,
        stream: &mut ReadHalf<'_>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BytesMut>> {
        ready!(stream.as_ref().poll_read_ready(cx))?;
        self.scratch.poll_read_bytes(stream, cx)
    }
}

/// Resolves the name again and connects to the first address that accepts the connection.
async fn resolve_and_connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let unknown = |error| io::Error::other(LookupError(error));
    let addresses = tokio::net::lookup_host((host, port)).await.map_err(unknown)?;
    let addresses: Vec<SocketAddr> = addresses.collect();
    if addresses.is_empty() {
        return Err(unknown(io::ErrorKind::NotFound.into()));
    }
    let stream = TcpStream::connect(&addresses[..]).await?;
    // A request is one write, so delaying small packets would only add latency.
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns the earlier of an instant and an optional deadline.
pub(super) fn min_deadline(a: Instant, b: Option<Instant>) -> Instant {
    b.map_or(a, |b| a.min(b))
}

/// The size up to which a body is copied behind its head, in bytes. Up to this size, a copy is cheaper than a piece of
/// its own in the system call.
const JOINED_BYTES: u64 = 16 * 1024;

/// The largest capacity of the buffer that the worker keeps between two requests, in bytes.
const KEPT_BYTES: usize = 32 * 1024;

/// The largest number of interim responses (`100 Continue`, `103 Early Hints`) that a call skips. The value is our
/// choice.
const MAX_INTERIM_RESPONSES: u8 = 8;
