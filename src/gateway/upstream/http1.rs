//! Our own HTTP/1.1 client: one write for a request, one frame for each read of a response.
//!
//! A read waits for data with no buffer in hand, then borrows the worker's scratch buffer, decodes in
//! place and hands on one contiguous slice. An open stream therefore holds no read buffer at all.

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

/// Calls over plain HTTP/1.1, with the connections of one worker.
pub(super) struct Http1Client {
    config: UpstreamConfig,
    worker: Arc<WorkerConnections>,
}

/// What the calls of one worker share.
#[derive(Debug)]
struct WorkerConnections {
    pool: UpstreamConnectionPool,
    scratch: ScratchBuffer,
    alarms: Arc<TimerPool>,
    /// For requests, between two of them.
    text: Mutex<Vec<u8>>,
}

/// A request on its way: a short one as one text, in a buffer that the worker keeps, a long one in its pieces.
struct RequestBytes<'a> {
    worker: &'a WorkerConnections,
    text: Vec<u8>,
    /// Bytes of the text.
    written: usize,
    pieces: ByteRope,
}

/// The head of a response, the connection it came on, and what came with it.
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

    pub(super) async fn send_call(
        &self,
        call: UpstreamCall,
    ) -> Result<ProviderAnswer, UpstreamError> {
        let deadline = call.deadline;
        let limit = self.config.first_byte_timeout;
        let until = min_deadline(Instant::now() + limit.min(MAX_TIME), deadline);
        let mut alarm = Alarm::new(&self.worker.alarms);
        let answer = {
            let mut answer = pin!(self.round_trip(call));
            poll_fn(|cx| {
                if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                    return Poll::Ready(answer);
                }
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
        let timing = body::BodyTimeouts { idle: self.config.idle_timeout, deadline };
        let body = Http1Body::new((stream, rest), &head, timing, alarm, Arc::clone(&self.worker));
        let body = super::UpstreamBody::Plain(body);
        Ok(ProviderAnswer { status: head.status, fields: head.fields, body })
    }

    async fn round_trip(&self, call: UpstreamCall) -> Result<ResponseStart, UpstreamError> {
        let UpstreamCall { head, body, .. } = call;
        let mut request = RequestBytes::new(&self.worker, &head, body);
        drop(head);
        self.send_on_pooled_or_new(&mut request).await
    }

    /// Sends a request on an idle connection or, where that turns out dead before it took a byte, on a
    /// new one.
    async fn send_on_pooled_or_new(
        &self,
        request: &mut RequestBytes<'_>,
    ) -> Result<ResponseStart, UpstreamError> {
        let whole = request.remaining();
        let mut idle = self.worker.pool.take_connection();
        loop {
            let was_idle = idle.is_some();
            let mut stream = match idle.take() {
                Some(stream) => stream,
                None => self.connect_with_timeout().await?,
            };
            match self.write_and_read_head(&mut stream, request).await {
                Ok((head, rest)) => return Ok(ResponseStart { stream, head, rest }),
                Err(_dead) if was_idle && request.remaining() == whole => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a request and reads the head of its answer, which may come before all is sent.
    async fn write_and_read_head(
        &self,
        stream: &mut TcpStream,
        request: &mut RequestBytes<'_>,
    ) -> Result<(ResponseHead, BytesMut), UpstreamError> {
        let (mut reader, mut writer) = stream.split();
        let mut reading = pin!(self.read_head(&mut reader));
        let (written, early) = tokio::select! {
            biased;
            written = request.write_to(&mut writer) => (Some(written), None),
            early = reading.as_mut() => (None, Some(early)),
        };
        let read = match early {
            Some(early) => early,
            None => reading.await,
        };
        match (read, written) {
            (Ok((mut head, rest)), written) => {
                // A server that has not read the whole request is in no state to be used again.
                head.keeps_alive &= matches!(written, Some(Ok(())));
                Ok((head, rest))
            }
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

    /// The head of the response, and what came with it.
    async fn read_head(
        &self,
        stream: &mut ReadHalf<'_>,
    ) -> Result<(ResponseHead, BytesMut), UpstreamError> {
        let mut seen = BytesMut::new();
        let mut interim = 0;
        loop {
            let parsed = if seen.is_empty() { Ok(None) } else { head::parse_head(&seen) };
            if let Some((head, length)) = parsed.map_err(UpstreamError::Malformed)? {
                seen.advance(length);
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
                let more = read.await.map_err(UpstreamError::Io)?;
                if more.is_empty() {
                    return Err(UpstreamError::Closed);
                }
                if seen.is_empty() { seen = more } else { seen.extend_from_slice(&more) }
            }
        }
    }
}

impl<'a> RequestBytes<'a> {
    fn new(worker: &'a WorkerConnections, head: &UpstreamRequestHead, body: SplicedBytes) -> Self {
        let length = body.len();
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

    /// Bytes that were not written yet.
    fn remaining(&self) -> usize {
        self.text.len() - self.written + self.pieces.remaining()
    }

    /// Writes all of it; what is written is held no longer.
    async fn write_to(&mut self, writer: &mut WriteHalf<'_>) -> io::Result<()> {
        while self.written < self.text.len() {
            let written = writer.write(&self.text[self.written..]).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.written += written;
        }
        self.give_back();
        writer.write_all_buf(&mut self.pieces).await
    }

    fn give_back(&mut self) {
        let mut text = std::mem::take(&mut self.text);
        self.written = 0;
        text.clear();
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

    /// One read; empty at the end. Takes the scratch buffer only once there is something to read.
    fn poll_read(
        &self,
        stream: &mut ReadHalf<'_>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BytesMut>> {
        ready!(stream.as_ref().poll_read_ready(cx))?;
        self.scratch.poll_read_bytes(stream, cx)
    }
}

/// Resolves the name anew and takes the first address that answers.
async fn resolve_and_connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let unknown = |error| io::Error::other(LookupError(error));
    let addresses = tokio::net::lookup_host((host, port)).await.map_err(unknown)?;
    let addresses: Vec<SocketAddr> = addresses.collect();
    if addresses.is_empty() {
        return Err(unknown(io::ErrorKind::NotFound.into()));
    }
    let stream = TcpStream::connect(&addresses[..]).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

pub(super) fn min_deadline(a: Instant, b: Option<Instant>) -> Instant {
    b.map_or(a, |b| a.min(b))
}

/// A body up to this size is copied behind its head: cheaper than a piece each for the system call.
const JOINED_BYTES: u64 = 16 * 1024;

/// The buffer that is kept between two requests has no more room than that.
const KEPT_BYTES: usize = 32 * 1024;

/// `100 Continue` and `103 Early Hints` are skipped, but not for ever.
const MAX_INTERIM_RESPONSES: u8 = 8;
