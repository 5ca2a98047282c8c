//! A minimal HTTP/1.1 client: one request per connection, and the answer read as it arrives.

use std::io::ErrorKind::{Interrupted, WouldBlock};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The LLM's address, such as `http://localhost:8080/v1`.
///
/// A sandbox has no DNS, and the traffic to the next process needs no encryption. So the only host name is `localhost`,
/// and the only scheme is `http`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmEndpoint {
    pub address: SocketAddr,
    /// The path before the path of each request, without a slash at its end.
    pub prefix: String,
}

impl LlmEndpoint {
    /// Parses a URL.
    ///
    /// # Errors
    /// Returns a message with an example of a valid URL.
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
            // An address without a port gets port 80.
            None => authority.parse().ok().or_else(|| {
                let address: IpAddr = authority.parse().ok()?;
                Some(SocketAddr::from((address, 80)))
            }),
        };
        let prefix = path.trim_end_matches('/').to_owned();
        Ok(Self { address: address.ok_or_else(wrong)?, prefix })
    }
}

/// A connection whose reads all end by the deadline.
#[derive(Debug)]
pub struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

/// The head of an answer, and the reader of its body.
#[derive(Debug)]
pub struct HttpResponse<R> {
    pub status: u16,
    /// The headers in order of arrival, with names in lower case.
    headers: Vec<(String, String)>,
    pub body: HttpResponseBody<R>,
}

/// The reader of a body. It removes the framing.
#[derive(Debug)]
pub struct HttpResponseBody<R> {
    source: R,
    framing: HttpBodyFraming,
}

#[derive(Debug)]
enum HttpBodyFraming {
    /// The number of remaining bytes.
    Length(u64),
    /// The number of remaining bytes of the current chunk. Zero means that a chunk's size is next.
    Chunked(u64),
    /// The body lasts until the connection ends.
    Close,
    Ended,
}

/// Sends a request with a JSON body, and reads the head of the answer.
///
/// # Errors
/// Returns an error if the connection fails, the deadline passes, or the answer is not HTTP.
pub fn post_json(
    base: &LlmEndpoint,
    path: &str,
    body: &str,
    deadline: Instant,
) -> io::Result<HttpResponse<BufReader<DeadlineStream>>> {
    let head = format!(
        "POST {}{path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: text/event-stream\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        base.prefix,
        base.address,
        body.len(),
    );
    exchange(base, (&head, body), deadline)
}

/// Sends a request without a body, and reads the head of the answer.
///
/// # Errors
/// Returns an error if the connection fails, the deadline passes, or the answer is not HTTP.
pub fn get(
    base: &LlmEndpoint,
    path: &str,
    deadline: Instant,
) -> io::Result<HttpResponse<BufReader<DeadlineStream>>> {
    let (prefix, address) = (&base.prefix, base.address);
    let head = format!(
        "GET {prefix}{path} HTTP/1.1\r\nhost: {address}\r\naccept: application/json\r\nconnection: close\r\n\r\n"
    );
    exchange(base, (&head, ""), deadline)
}

/// Sends a head and a body over a connection of its own, and reads the head of the answer.
fn exchange(
    base: &LlmEndpoint,
    (head, body): (&str, &str),
    deadline: Instant,
) -> io::Result<HttpResponse<BufReader<DeadlineStream>>> {
    let left = time_left(deadline)?;
    let stream = TcpStream::connect_timeout(&base.address, left.min(CONNECT_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut timed = DeadlineStream { stream, deadline };
    timed.stream.set_write_timeout(Some(left))?;
    // An error of the write is kept until the answer was read.
    let sent = timed
        .stream
        .write_all(head.as_bytes())
        .and_then(|()| timed.stream.write_all(body.as_bytes()));
    // A server that refuses a body early sends its reason and stops reading, which fails the write. The answer is then
    // the better error.
    match (read_response(BufReader::new(timed)), sent) {
        (Err(_), Err(error)) => Err(error),
        (answer, _) => answer,
    }
}

/// Reads the head of an answer, and skips interim answers (1xx).
///
/// # Errors
/// Returns an error if the source fails or the answer is not HTTP/1.
pub fn read_response<R: BufRead>(mut source: R) -> io::Result<HttpResponse<R>> {
    loop {
        // One budget for all lines of the head bounds the memory, however many headers there are.
        let mut budget = MAX_HEAD_BYTES;
        let status_line = read_line(&mut source, &mut budget)?;
        let status = status_line
            .strip_prefix("HTTP/1.")
            .and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok())
            .ok_or_else(|| invalid_data("the answer is not HTTP/1.1"))?;
        let mut headers = vec![];
        loop {
            let line = read_line(&mut source, &mut budget)?;
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
    /// Returns the first header with this name. `name` is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|header| header.0 == name).map(|header| &*header.1)
    }
}

impl HttpBodyFraming {
    fn from_headers(status: u16, headers: &[(String, String)]) -> io::Result<Self> {
        let find = |name| headers.iter().find(|header| header.0 == name).map(|header| &*header.1);
        // The order is that of RFC 9112, section 6.3: status, transfer coding, length, and the connection's end last.
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
            Some(Err(_)) => Err(invalid_data("the answer's `content-length` is not a number")),
            None => Ok(Self::Close),
        }
    }
}

impl<R: BufRead> HttpResponseBody<R> {
    /// Returns the number of bytes that can be read before the next framing. Zero means the end of the body.
    fn next_readable(&mut self) -> io::Result<u64> {
        if let HttpBodyFraming::Chunked(left @ 0) = &mut self.framing {
            *left = parse_chunk_size(&read_short_line(&mut self.source)?)?;
            if *left == 0 {
                // Trailers are not used.
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

    /// Counts `length` bytes as read. Zero bytes are a premature end, unless the connection's end is the body's end.
    fn consume(&mut self, length: u64) -> io::Result<()> {
        match &mut self.framing {
            HttpBodyFraming::Length(_) | HttpBodyFraming::Chunked(_) if length == 0 => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            HttpBodyFraming::Length(left) => *left -= length,
            HttpBodyFraming::Chunked(left) => {
                *left -= length;
                // An empty line follows each chunk.
                if *left == 0 && !read_short_line(&mut self.source)?.is_empty() {
                    return Err(invalid_data("a chunk is longer than its size"));
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
                // The socket's timer may fire slightly early (`WouldBlock`), and a stop and continue of this process
                // interrupts the read. The loop then checks the deadline again.
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

/// Reads a line without its line end, and subtracts its length from `budget`.
fn read_line(source: &mut impl BufRead, budget: &mut u64) -> io::Result<String> {
    let mut line = vec![];
    *budget -= source.take(*budget).read_until(b'\n', &mut line)? as u64;
    // No line feed: either the budget or the stream has ended.
    if line.pop() != Some(b'\n') {
        return Err(if *budget == 0 {
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

/// Reads a short line: a chunk's size, the empty line after a chunk, or a trailer.
fn read_short_line(source: &mut impl BufRead) -> io::Result<String> {
    let mut budget = MAX_LINE_BYTES;
    read_line(source, &mut budget)
}

/// Parses the size of a chunk. Chunk extensions are ignored.
fn parse_chunk_size(line: &str) -> io::Result<u64> {
    let digits = line.split(';').next().unwrap_or_default().trim();
    u64::from_str_radix(digits, 16).map_err(|_| invalid_data("a chunk's size is not a number"))
}

fn invalid_data(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The timeout of a connection to the listener in the same sandbox. Our choice.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum size of an answer's head: the gateway's own limit for an upstream's head.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// The maximum size of a chunk's size line or of a trailer. Our choice.
const MAX_LINE_BYTES: u64 = 4 << 10;
