//! The head of a request that can be read in one way only.
//!
//! hyper reads heads with the same parser, and is asked about everything that is unusual: a list of the usual is short.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

use crate::gateway::request::is_json;
use crate::protocol::Route;

/// What is read from the fields of a head.
#[derive(Default)]
struct HeadFields {
    /// Those that the pipeline looks at.
    kept: HeaderMap,
    length: Option<u64>,
    has_connection: bool,
}

/// Takes a head off the front of what was received, and returns it with the length of its body. `None`, and nothing is
/// taken, where the head is not whole or not beyond doubt.
///
/// Of the fields only those are kept that the pipeline looks at.
pub fn read(received: &mut Bytes, max_fields: usize, max_body: u64) -> Option<Request<u64>> {
    if !received.starts_with(b"POST /v1/") {
        return None;
    }
    let mut fields = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut []);
    let status = httparse::ParserConfig::default().parse_request_with_uninit_headers(
        &mut parsed,
        received,
        &mut fields,
    );
    let Ok(httparse::Status::Complete(length)) = status else { return None };
    let count = parsed.headers.len();
    let is_plain = parsed.version == Some(1)
        && length <= MAX_HEAD_BYTES
        && count <= max_fields
        && is_text(&received[..length], count + 2);
    if !is_plain {
        return None;
    }
    let uri = read_target(parsed.path?)?;
    let mut head = HeadFields { kept: HeaderMap::with_capacity(6), ..HeadFields::default() };
    for field in parsed.headers.iter() {
        head.take(field.name, field.value)?;
    }
    let body = head.length.filter(|length| (1..=max_body).contains(length))?;
    if !head.kept.contains_key(CONTENT_TYPE) {
        return None;
    }
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    *request.headers_mut() = head.kept;
    received.advance(length);
    Some(request)
}

/// Whether a head is printable ASCII in so many lines, each ended by a carriage return and a line feed.
///
/// The parser has seen that each line has a line feed, and no carriage return elsewhere.
fn is_text(head: &[u8], lines: usize) -> bool {
    let (mut returns, mut feeds, mut others) = (0, 0, 0);
    for byte in head {
        returns += usize::from(*byte == b'\r');
        feeds += usize::from(*byte == b'\n');
        others += usize::from(!(b' '..=b'~').contains(byte));
    }
    returns == lines && feeds == lines && others == 2 * lines
}

/// The target of a route that takes a body, with a query that needs no thought.
fn read_target(target: &str) -> Option<Uri> {
    let (path, query) = target.split_once('?').map_or((target, ""), |(path, query)| (path, query));
    let route = Route::find(&Method::POST, path)?;
    if query.is_empty() {
        return (path.len() == target.len())
            .then(|| Uri::from(PathAndQuery::from_static(route.path())));
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"=&-_.".contains(&byte);
    (query.len() <= MAX_QUERY_BYTES && query.bytes().all(is_plain))
        .then(|| Uri::try_from(target).ok())
        .flatten()
}

impl HeadFields {
    /// `None` for what is not beyond doubt.
    fn take(&mut self, name: &str, value: &[u8]) -> Option<()> {
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is("content-length") {
            let length = read_length(value)?;
            return self.length.replace(length).is_none().then_some(());
        }
        if is("content-type") {
            return if is_json(value) { self.keep_one(CONTENT_TYPE, value) } else { None };
        }
        if is("accept") {
            return self.keep_one(ACCEPT, value);
        }
        if is("anthropic-version") {
            return self.keep_one(HeaderName::from_static("anthropic-version"), value);
        }
        for list in ["anthropic-beta", "openai-beta"] {
            if is(list) {
                self.kept.append(list, HeaderValue::from_bytes(value).ok()?);
                return Some(());
            }
        }
        if is("connection") {
            let is_usual = !self.has_connection && value.eq_ignore_ascii_case(b"keep-alive");
            self.has_connection = true;
            return is_usual.then_some(());
        }
        (!HANDED_OVER.iter().any(|known| is(known))).then_some(())
    }

    /// Keeps a field that may stand there once.
    fn keep_one(&mut self, name: HeaderName, value: &[u8]) -> Option<()> {
        let value = HeaderValue::from_bytes(value).ok()?;
        self.kept.insert(name, value).is_none().then_some(())
    }
}

fn read_length(value: &[u8]) -> Option<u64> {
    let is_plain = (1..=MAX_LENGTH_DIGITS).contains(&value.len())
        && value[0] != b'0'
        && value.iter().all(u8::is_ascii_digit);
    is_plain.then(|| value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// Fields that say how the message or the connection goes on.
const HANDED_OVER: [&str; 8] = [
    "transfer-encoding",
    "expect",
    "upgrade",
    "te",
    "trailer",
    "keep-alive",
    "proxy-connection",
    "http2-settings",
];

/// As many as any client sends; hyper takes up to `server.max_headers`.
const MAX_FIELDS: usize = 64;

/// The least that hyper's buffer can hold: whatever the settings, hyper would take the head, too.
const MAX_HEAD_BYTES: usize = 8 * 1024;

const MAX_QUERY_BYTES: usize = 256;

/// A sum of so many digits is far from the end of its type.
const MAX_LENGTH_DIGITS: usize = 15;
