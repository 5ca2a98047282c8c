//! The body of a response, read as it arrives.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::body::SizeHint;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::chunked::Decoder;
use super::head::{Framing, Head};
use super::{Error, Worker, earlier};
use crate::base::alarm::Alarm;
use crate::base::time::MAX_TIME;

/// A body on its connection. Dropped before its end, it closes the connection, which cancels the call.
pub struct Body {
    stream: Option<TcpStream>,
    progress: Progress,
    /// Read from the socket but not decoded yet.
    rest: BytesMut,
    timing: Timing,
    last_read: Instant,
    alarm: Alarm,
    worker: Arc<Worker>,
    reusable: bool,
}

/// How long a body may be silent, and when it must be over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) idle: Duration,
    pub(super) deadline: Option<Instant>,
}

#[derive(Debug)]
enum Progress {
    Length(u64),
    Chunked(Decoder),
    UntilClose,
    Complete,
}

impl Body {
    pub(super) fn new(
        (stream, rest): (TcpStream, BytesMut),
        head: &Head,
        timing: Timing,
        alarm: Alarm,
        worker: Arc<Worker>,
    ) -> Self {
        let progress = match head.framing {
            Framing::Length(0) => Progress::Complete,
            Framing::Length(length) => Progress::Length(length),
            Framing::Chunked => Progress::Chunked(Decoder::default()),
            Framing::UntilClose => Progress::UntilClose,
        };
        let (last_read, reusable) = (Instant::now(), head.keeps_alive);
        let stream = Some(stream);
        let mut body = Self { stream, progress, rest, timing, last_read, alarm, worker, reusable };
        if body.is_end_stream() {
            body.finish();
        }
        body
    }

    pub(in super::super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Error>>> {
        loop {
            if !self.rest.is_empty() {
                match self.decode() {
                    Ok(payload) if payload.is_empty() => {}
                    frame => return Poll::Ready(Some(frame)),
                }
            }
            let Some(stream) =
                self.stream.as_mut().filter(|_| !matches!(self.progress, Progress::Complete))
            else {
                return Poll::Ready(None);
            };
            match self.worker.poll_read(&mut stream.split().0, cx) {
                Poll::Ready(Ok(read)) if read.is_empty() => {
                    return Poll::Ready(self.end_of_file().transpose());
                }
                Poll::Ready(Ok(read)) => {
                    self.rest = read;
                    self.last_read = Instant::now();
                }
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Some(Err(self.fail(Error::Io(error)))));
                }
                Poll::Pending => {
                    let error = ready!(self.poll_alarm(cx));
                    return Poll::Ready(Some(Err(self.fail(error))));
                }
            }
        }
    }

    pub(in super::super) fn is_end_stream(&self) -> bool {
        matches!(self.progress, Progress::Complete) && self.rest.is_empty()
    }

    pub(in super::super) fn size_hint(&self) -> SizeHint {
        match self.progress {
            Progress::Length(length) => SizeHint::with_exact(length),
            Progress::Complete => SizeHint::with_exact(0),
            Progress::Chunked(_) | Progress::UntilClose => SizeHint::default(),
        }
    }

    /// The payload in what was read last, as one slice.
    fn decode(&mut self) -> Result<Bytes, Error> {
        let mut read = std::mem::take(&mut self.rest);
        let (payload, complete) = match &mut self.progress {
            Progress::Chunked(decoder) => {
                let result = decoder.decode(&mut read);
                let chunks = result.map_err(|why| self.fail(Error::Malformed(why)))?;
                self.reusable &= chunks.consumed == read.len();
                (chunks.payload, chunks.complete)
            }
            Progress::Length(left) => {
                let payload = read.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                self.reusable &= payload == read.len();
                *left -= payload as u64;
                (payload, *left == 0)
            }
            Progress::UntilClose => (read.len(), false),
            Progress::Complete => (0, true),
        };
        read.truncate(payload);
        if complete {
            self.finish();
        }
        Ok(frame(read))
    }

    fn end_of_file(&mut self) -> Result<Option<Bytes>, Error> {
        self.reusable = false;
        if matches!(self.progress, Progress::UntilClose) {
            self.finish();
            return Ok(None);
        }
        Err(self.fail(Error::Closed))
    }

    /// Ready with the reason when the upstream has been silent for too long.
    fn poll_alarm(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let Timing { idle, deadline } = self.timing;
        let due = earlier(self.last_read + idle.min(MAX_TIME), deadline);
        ready!(self.alarm.poll(due, cx));
        Poll::Ready(if deadline == Some(due) { Error::Deadline } else { Error::IdleTimeout(idle) })
    }

    fn finish(&mut self) {
        self.progress = Progress::Complete;
        if let Some(stream) = self.stream.take().filter(|_| self.reusable && self.rest.is_empty()) {
            self.worker.pool.put(stream);
        }
    }

    fn fail(&mut self, error: Error) -> Error {
        self.stream = None;
        self.progress = Progress::Complete;
        error
    }
}

/// A small frame gets memory of its own size: a slow reader with a queue of them would otherwise hold
/// a whole scratch buffer for each.
fn frame(payload: BytesMut) -> Bytes {
    if payload.len() < COPY_BELOW_BYTES {
        Bytes::copy_from_slice(payload.chunk())
    } else {
        payload.freeze()
    }
}

const COPY_BELOW_BYTES: usize = 4 * 1024;
