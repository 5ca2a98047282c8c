//! A limit on the interim responses (1xx) that a client of hyper skips.
//!
//! hyper skips them in a loop that does not yield, so a server that sends them without end would hold a thread beyond
//! every timeout of the request. The stream of this module reads the heads along, and fails such a connection.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use http::Uri;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tower_service::Service;

/// A connector whose connections have the limit. It wraps the connector with TLS, because it reads plain bytes.
#[derive(Clone, Debug)]
pub struct InterimLimitConnector<C>(C);

/// A connection to a server, with the limit.
#[derive(Debug)]
pub struct InterimLimitStream<T> {
    inner: T,
    scan: InterimScan,
    progress: ConnectionProgress,
}

/// The answers that have come over a connection, for the owner of a request that has failed. The client puts it into the
/// extensions of the connection's metadata.
#[derive(Clone, Debug, Default)]
pub struct ConnectionProgress(Arc<ConnectionCounts>);

#[derive(Debug, Default)]
struct ConnectionCounts {
    answers: AtomicUsize,
    /// True if no byte of an answer to the last request has come.
    is_silent: AtomicBool,
}

/// The position in the heads of the responses to one request.
#[derive(Clone, Copy, Debug, Default)]
struct InterimScan {
    part: HeadPart,
    /// The bytes before the final response.
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum HeadPart {
    /// The number of bytes of [`INTERIM_PREFIX`] that were read.
    StatusLine(usize),
    /// The rest of an interim head. True if the line has no byte so far, so that its end is the head's end.
    InterimRest { is_line_empty: bool },
    /// The final response, which hyper bounds itself.
    Final,
}

impl<C> InterimLimitConnector<C> {
    pub fn new(inner: C) -> Self {
        Self(inner)
    }
}

impl<C> Service<Uri> for InterimLimitConnector<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
{
    type Response = InterimLimitStream<C::Response>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async { Ok(InterimLimitStream::new(connecting.await?)) })
    }
}

impl<T> InterimLimitStream<T> {
    pub fn new(inner: T) -> Self {
        Self { inner, scan: InterimScan::default(), progress: ConnectionProgress::default() }
    }

    /// Begins a new scan if the last response had come, because the written bytes may be the next request. If they are
    /// the rest of a body, the scan reads a part of the response's body, which does not begin like an interim head.
    fn note_write(&mut self) {
        if let HeadPart::Final = self.scan.part {
            self.scan = InterimScan::default();
            self.progress.0.is_silent.store(true, Ordering::Release);
        }
    }

    /// Notes that bytes of an answer have come.
    fn note_read(&self) {
        self.progress.0.is_silent.store(false, Ordering::Release);
        if let HeadPart::Final = self.scan.part {
            self.progress.0.answers.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl<T: Read + Unpin> Read for InterimLimitStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if let HeadPart::Final = self.scan.part {
            return Pin::new(&mut self.inner).poll_read(cx, buffer);
        }
        // hyper's buffer cannot be read here, so the bytes come through one of our own.
        let mut bytes = [MaybeUninit::uninit(); READ_BYTES];
        let size = buffer.remaining().min(READ_BYTES);
        let mut read = ReadBuf::uninit(&mut bytes[..size]);
        ready!(Pin::new(&mut self.inner).poll_read(cx, read.unfilled()))?;
        self.scan.scan_bytes(read.filled())?;
        if !read.filled().is_empty() {
            self.note_read();
        }
        buffer.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl<T: Write + Unpin> Write for InterimLimitStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.note_write();
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.note_write();
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }
}

impl<T: Connection> Connection for InterimLimitStream<T> {
    fn connected(&self) -> Connected {
        self.inner.connected().extra(self.progress.clone())
    }
}

impl ConnectionProgress {
    /// Returns true if the connection has answered earlier requests, and has sent no byte since the last one. So the server
    /// had closed it before the last request came.
    pub fn was_closed_while_idle(&self) -> bool {
        self.0.answers.load(Ordering::Acquire) > 0 && self.0.is_silent.load(Ordering::Acquire)
    }
}

impl InterimScan {
    fn scan_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        for byte in bytes {
            self.part = match self.part {
                // A parser of heads skips empty lines before them.
                HeadPart::StatusLine(0) if matches!(byte, b'\r' | b'\n') => self.part,
                HeadPart::StatusLine(read) => match INTERIM_PREFIX.get(read) {
                    Some(expected) if byte == expected || *expected == b'?' => {
                        HeadPart::StatusLine(read + 1)
                    }
                    None => HeadPart::InterimRest { is_line_empty: false },
                    Some(_) => HeadPart::Final,
                },
                HeadPart::InterimRest { is_line_empty: true } if *byte == b'\n' => {
                    HeadPart::StatusLine(0)
                }
                HeadPart::InterimRest { is_line_empty } => {
                    let is_line_empty = *byte == b'\n' || (is_line_empty && *byte == b'\r');
                    HeadPart::InterimRest { is_line_empty }
                }
                HeadPart::Final => return Ok(()),
            };
            self.bytes += 1;
        }
        if self.bytes > MAX_INTERIM_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many interim responses"));
        }
        Ok(())
    }
}

impl Default for HeadPart {
    fn default() -> Self {
        Self::StatusLine(0)
    }
}

/// The first bytes of an interim response. The question mark is any byte, the minor version.
const INTERIM_PREFIX: &[u8] = b"HTTP/1.? 1";

/// The most bytes of interim responses before the final one, as many as a head may have. Our choice.
const MAX_INTERIM_BYTES: usize = 64 * 1024;

/// The bytes that are read at a time until the final response begins. Our choice.
const READ_BYTES: usize = 8 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interim_heads_are_counted_and_a_final_response_is_not() {
        for interim in [
            "HTTP/1.1 100 Continue\r\n\r\n",
            "\r\n\nHTTP/1.0 199\n\n",
            "HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n",
        ] {
            let flood = interim.repeat(MAX_INTERIM_BYTES / interim.len() + 1);
            for piece_size in [1, 7, 4096] {
                let mut scan = InterimScan::default();
                let mut pieces = flood.as_bytes().chunks(piece_size);
                assert!(pieces.any(|piece| scan.scan_bytes(piece).is_err()), "{interim:?}");
            }
            let mut scan = InterimScan::default();
            let answer = format!("{interim}HTTP/1.1 200 OK\r\n\r\n{flood}");
            assert!(answer.as_bytes().chunks(7).all(|piece| scan.scan_bytes(piece).is_ok()));
        }
    }
}
