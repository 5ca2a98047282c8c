//! HTTP/1.1, as much of it as one question needs: one request on a connection, and the answer read as it comes.

use std::io::ErrorKind::{Interrupted, WouldBlock};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Where the LLM is: `http://localhost:8080/v1` and the like.
///
/// There is no DNS in a sandbox, and nothing to encrypt on the way to the next process: a name is `localhost`, and the
/// scheme is `http`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmEndpoint {
    pub address: SocketAddr,
    /// What stands before the path of a request; without a slash at its end.
    pub prefix: String,
}

impl LlmEndpoint {
    /// Reads a URL.
    ///
    /// # Errors
    /// What can be given instead.
    pub fn parse(url: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{url}` is no place that a sandbox can reach; give one such as `http://localhost:8080/v1`"
            )
        };
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let address = match authority.strip_prefix("localhost") {
            Some("") => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 80))),
            Some(port) => port
                .strip_prefix(':')
                .and_then(|port| port.parse().ok())
                .map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
            None => authority.parse().ok().or_else(|| {
                let address: IpAddr = authority.parse().ok()?;
                Some(SocketAddr::from((address, 80)))
            }),
        };
        let prefix = path.trim_end_matches('/').to_owned();
        Ok(Self { address: address.ok_or_else(wrong)?, prefix })
    }
}

/// A connection, each read of which ends at the deadline at the latest.
#[derive(Debug)]
pub struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

/// The head of an answer, and its body to be read.
#[derive(Debug)]
pub struct HttpResponse<R> {
    pub status: u16,
    /// In lower case, in the order they came.
    headers: Vec<(String, String)>,
    pub body: HttpResponseBody<R>,
}

/// A body, with its framing taken off.
#[derive(Debug)]
pub struct HttpResponseBody<R> {
    source: R,
    framing: HttpBodyFraming,
}

#[derive(Debug)]
enum HttpBodyFraming {
    /// So many bytes are left.
    Length(u64),
    /// So many bytes of the chunk are left; none before a chunk's size.
    Chunked(u64),
    /// Until the connection ends.
    Close,
    Ended,
}

/// Sends a request with a body of JSON, and reads the answer's head.
///
/// # Errors
/// Nobody answers, or not in HTTP.
pub fn post_json(
    base: &LlmEndpoint,
    path: &str,
    body: &str,
    deadline: Instant,
) -> io::Result<HttpResponse<BufReader<DeadlineStream>>> {
    let left = time_left(deadline)?;
    let stream = TcpStream::connect_timeout(&base.address, left.min(CONNECT_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut timed = DeadlineStream { stream, deadline };
    timed.stream.set_write_timeout(Some(left))?;
    let head = format!(
        "POST {}{path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: text/event-stream\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        base.prefix,
        base.address,
        body.len(),
    );
    let sent = timed
        .stream
        .write_all(head.as_bytes())
        .and_then(|()| timed.stream.write_all(body.as_bytes()));
    // Who refuses a body before its end says why, and does not read on.
    match (read_response(BufReader::new(timed)), sent) {
        (Err(_), Err(error)) => Err(error),
        (answer, _) => answer,
    }
}

/// Reads the head of an answer. Interim ones are passed over.
///
/// # Errors
/// The source fails, or what it says is not HTTP/1.
pub fn read_response<R: BufRead>(mut source: R) -> io::Result<HttpResponse<R>> {
    loop {
        let mut room = MAX_HEAD_BYTES;
        let status_line = read_line(&mut source, &mut room)?;
        let status = status_line
            .strip_prefix("HTTP/1.")
            .and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok())
            .ok_or_else(|| invalid_data("the answer is not HTTP/1.1"))?;
        let mut headers = vec![];
        loop {
            let line = read_line(&mut source, &mut room)?;
            if line.is_empty() {
                break;
            }
            let (name, value) =
                line.split_once(':').ok_or_else(|| invalid_data("a header has no colon"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if status >= 200 {
            let framing = HttpBodyFraming::from_headers(status, &headers)?;
            return Ok(HttpResponse {
                status,
                headers,
                body: HttpResponseBody { source, framing },
            });
        }
    }
}

impl<R> HttpResponse<R> {
    /// The first header of a name, which is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|header| header.0 == name).map(|header| &*header.1)
    }
}

impl HttpBodyFraming {
    fn from_headers(status: u16, headers: &[(String, String)]) -> io::Result<Self> {
        let find = |name| headers.iter().find(|header| header.0 == name).map(|header| &*header.1);
        if status == 204 || status == 304 {
            return Ok(Self::Ended);
        }
        if let Some(coding) = find("transfer-encoding") {
            return if coding.eq_ignore_ascii_case("chunked") {
                Ok(Self::Chunked(0))
            } else {
                Err(invalid_data("the answer has a transfer coding that is not `chunked`"))
            };
        }
        match find("content-length").map(str::parse) {
            Some(Ok(length)) => Ok(Self::Length(length)),
            Some(Err(_)) => Err(invalid_data("the answer's length is no number")),
            None => Ok(Self::Close),
        }
    }
}

impl<R: BufRead> HttpResponseBody<R> {
    /// How much may be read before something of the framing comes; nothing at the end.
    fn next_readable(&mut self) -> io::Result<u64> {
        if let HttpBodyFraming::Chunked(left @ 0) = &mut self.framing {
            *left = parse_chunk_size(&read_short_line(&mut self.source)?)?;
            if *left == 0 {
                // Trailers say nothing to us.
                while !read_short_line(&mut self.source)?.is_empty() {}
                self.framing = HttpBodyFraming::Ended;
            }
        }
        Ok(match self.framing {
            HttpBodyFraming::Length(left) | HttpBodyFraming::Chunked(left) => left,
            HttpBodyFraming::Close => u64::MAX,
            HttpBodyFraming::Ended => 0,
        })
    }

    fn consume(&mut self, length: u64) -> io::Result<()> {
        match &mut self.framing {
            HttpBodyFraming::Length(_) | HttpBodyFraming::Chunked(_) if length == 0 => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            HttpBodyFraming::Length(left) => *left -= length,
            HttpBodyFraming::Chunked(left) => {
                *left -= length;
                if *left == 0 && !read_short_line(&mut self.source)?.is_empty() {
                    return Err(invalid_data("a chunk is longer than it says"));
                }
            }
            HttpBodyFraming::Close | HttpBodyFraming::Ended => {}
        }
        Ok(())
    }
}

impl<R: BufRead> Read for HttpResponseBody<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let ready = self.next_readable()?;
        if ready == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let length = self.source.by_ref().take(ready).read(buffer)?;
        self.consume(length as u64)?;
        Ok(length)
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(time_left(self.deadline)?))?;
            match self.stream.read(buffer) {
                // Its time may be over a little too early, and somebody may have stopped us and continued.
                Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => {}
                other => return other,
            }
        }
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A line without its end, which takes from `room` what it is long.
fn read_line(source: &mut impl BufRead, room: &mut u64) -> io::Result<String> {
    let mut line = vec![];
    *room -= source.take(*room).read_until(b'\n', &mut line)? as u64;
    if line.pop() != Some(b'\n') {
        return Err(if *room == 0 {
            invalid_data("a line of the answer's framing is too long")
        } else {
            io::ErrorKind::UnexpectedEof.into()
        });
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    String::from_utf8(line).map_err(invalid_data)
}

/// The line of a chunk's size, the empty one after it, or a trailer.
fn read_short_line(source: &mut impl BufRead) -> io::Result<String> {
    let mut room = MAX_LINE_BYTES;
    read_line(source, &mut room)
}

/// The size of a chunk; what else its line says is passed over.
fn parse_chunk_size(line: &str) -> io::Result<u64> {
    let digits = line.split(';').next().unwrap_or_default().trim();
    u64::from_str_radix(digits, 16).map_err(|_| invalid_data("a chunk's size is no number"))
}

fn invalid_data(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// For a connection to the next process.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// As many bytes as the gateway itself reads of an upstream's head.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// For the size of a chunk, or a trailer.
const MAX_LINE_BYTES: u64 = 4 << 10;
