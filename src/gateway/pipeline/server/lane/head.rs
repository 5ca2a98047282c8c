//! The head of a request that can be read in one way only.
//!
//! hyper reads heads with the same parser, and is asked about everything that is unusual: a list of the usual is short.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::Method;

use crate::gateway::pipeline::audience;
use crate::gateway::pipeline::policy::PolicyConfig;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::pipeline::request_head::{JudgedHead, check_length, is_json};
use crate::gateway::upstream::headers::ClientHead;
use crate::llm::protocol::GatewayRoute;

/// The head of a request in the lane: of its fields, where those stand that the pipeline looks at.
#[derive(Debug)]
pub struct LaneRequest {
    pub route: GatewayRoute,
    /// Bytes of the body.
    pub length: u64,
    text: Bytes,
    query: Option<TextPlace>,
    fields: [Option<(LaneField, TextPlace)>; MAX_KEPT],
}

/// A field that the pipeline looks at, beside those that the lane has judged itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneField {
    Accept,
    AnthropicVersion,
    AnthropicBeta,
    OpenaiBeta,
    RawResponse,
    UserAgent,
}

/// Where a text stands in a head: where it begins, and its length.
type TextPlace = (u16, u16);

/// What is read from the fields of a head.
#[derive(Default)]
struct HeadFields<'a> {
    kept: [Option<(LaneField, &'a [u8])>; MAX_KEPT],
    length: Option<u64>,
    has_type: bool,
    has_connection: bool,
}

/// Takes a head off the front of what was received. `None`, and nothing is taken, where the head is not whole or not
/// beyond doubt.
pub fn parse_head(received: &mut Bytes, max_fields: usize, max_body: u64) -> Option<LaneRequest> {
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
    let is_plain = parsed.version == Some(1)
        && length <= MAX_HEAD_BYTES
        && parsed.headers.len() <= max_fields
        && is_printable_head(&received[..length], &parsed);
    if !is_plain {
        return None;
    }
    let (route, query) = parse_target(parsed.path?)?;
    let mut head = HeadFields::default();
    for field in parsed.headers.iter() {
        head.take_field(field.name, field.value)?;
    }
    let body = head.length.filter(|length| head.has_type && (1..=max_body).contains(length))?;
    let place = |text: &[u8]| {
        let start = text.as_ptr().addr() - received.as_ptr().addr();
        (to_u16(start), to_u16(text.len()))
    };
    let query = query.map(|query| place(query.as_bytes()));
    let fields = head.kept.map(|kept| kept.map(|(field, value)| (field, place(value))));
    Some(LaneRequest { route, length: body, text: received.split_to(length), query, fields })
}

impl LaneRequest {
    fn text(&self, (start, length): TextPlace) -> &[u8] {
        &self.text[usize::from(start)..][..usize::from(length)]
    }
}

impl ClientHead for LaneRequest {
    fn path(&self) -> &str {
        self.route.path()
    }

    fn query(&self) -> Option<&str> {
        str::from_utf8(self.text(self.query?)).ok()
    }

    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let kept = self.fields.iter().flatten();
        kept.filter(move |(field, _)| field.name() == name).map(|(_, place)| self.text(*place))
    }
}

/// The lane has seen before what is checked here; only the policy may be another by now.
impl JudgedHead for LaneRequest {
    fn route(&self) -> Result<GatewayRoute, CallRejection> {
        Ok(self.route)
    }

    fn check(&self, policy: &PolicyConfig) -> Result<(), CallRejection> {
        check_length(self.length, policy)
    }
}

impl LaneField {
    fn name(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::AnthropicVersion => "anthropic-version",
            Self::AnthropicBeta => "anthropic-beta",
            Self::OpenaiBeta => "openai-beta",
            Self::RawResponse => audience::RAW_RESPONSE,
            Self::UserAgent => "user-agent",
        }
    }

    fn may_be_repeated(self) -> bool {
        matches!(self, Self::AnthropicBeta | Self::OpenaiBeta)
    }
}

/// Whether a head is printable ASCII, each line of it ended by a carriage return and a line feed, and nothing else stands
/// between the parts that were parsed.
fn is_printable_head(head: &[u8], parsed: &httparse::Request<'_, '_>) -> bool {
    let place = |part: &[u8]| part.as_ptr().addr() - head.as_ptr().addr();
    let Some(path) = parsed.path else { return false };
    let mut end = place(path.as_bytes()) + path.len();
    let mut between: &[u8] = b" HTTP/1.1\r\n";
    for field in parsed.headers.iter() {
        let (name, value) = (place(field.name.as_bytes()), place(field.value));
        let has_value = !field.value.is_empty();
        let is_plain = head.get(end..name) == Some(between)
            && has_value
            && head.get(name + field.name.len()..value) == Some(b": ")
            && field.value.is_ascii()
            && !field.value.contains(&b'\t');
        if !is_plain {
            return false;
        }
        (end, between) = (value + field.value.len(), b"\r\n");
    }
    path.is_ascii() && head.get(end..) == Some(b"\r\n\r\n")
}

/// The target of a route that takes a body, with a query that needs no thought.
fn parse_target(target: &str) -> Option<(GatewayRoute, Option<&str>)> {
    let Some((path, query)) = target.split_once('?') else {
        return Some((GatewayRoute::from_request_line(&Method::POST, target)?, None));
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"=&-_.".contains(&byte);
    let is_usual = (1..=MAX_QUERY_BYTES).contains(&query.len()) && query.bytes().all(is_plain);
    is_usual.then_some((GatewayRoute::from_request_line(&Method::POST, path)?, Some(query)))
}

impl<'a> HeadFields<'a> {
    /// `None` for what is not beyond doubt.
    fn take_field(&mut self, name: &str, value: &'a [u8]) -> Option<()> {
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is("content-length") {
            let length = parse_content_length(value)?;
            return self.length.replace(length).is_none().then_some(());
        }
        if is("content-type") {
            let is_first = !std::mem::replace(&mut self.has_type, true);
            return (is_first && is_json(value)).then_some(());
        }
        if is("connection") {
            let is_usual = !self.has_connection && value.eq_ignore_ascii_case(b"keep-alive");
            self.has_connection = true;
            return is_usual.then_some(());
        }
        if let Some(field) = KEPT.into_iter().find(|field| is(field.name())) {
            return self.keep(field, value);
        }
        (!FIELDS_FOR_HYPER.iter().any(|known| is(known))).then_some(())
    }

    fn keep(&mut self, field: LaneField, value: &'a [u8]) -> Option<()> {
        let is_there = self.kept.iter().flatten().any(|(other, _)| *other == field);
        if is_there && !field.may_be_repeated() {
            return None;
        }
        *self.kept.iter_mut().find(|place| place.is_none())? = Some((field, value));
        Some(())
    }
}

/// A place in a head, which is short.
fn to_u16(place: usize) -> u16 {
    u16::try_from(place).unwrap_or(u16::MAX)
}

fn parse_content_length(value: &[u8]) -> Option<u64> {
    let is_plain = (1..=MAX_LENGTH_DIGITS).contains(&value.len())
        && value[0] != b'0'
        && value.iter().all(u8::is_ascii_digit);
    is_plain.then(|| value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// Fields that say how the message or the connection goes on.
const FIELDS_FOR_HYPER: [&str; 9] = [
    "content-encoding",
    "transfer-encoding",
    "expect",
    "upgrade",
    "te",
    "trailer",
    "keep-alive",
    "proxy-connection",
    "http2-settings",
];

const KEPT: [LaneField; 6] = [
    LaneField::Accept,
    LaneField::AnthropicVersion,
    LaneField::AnthropicBeta,
    LaneField::OpenaiBeta,
    LaneField::RawResponse,
    LaneField::UserAgent,
];

/// One of each, and a list in several fields.
const MAX_KEPT: usize = 10;

/// As many as any client sends; hyper takes up to `server.max_headers`.
const MAX_FIELDS: usize = 64;

/// The least that hyper's buffer can hold: whatever the settings, hyper would take the head, too.
const MAX_HEAD_BYTES: usize = 8 * 1024;

const MAX_QUERY_BYTES: usize = 256;

/// A sum of so many digits is far from the end of its type.
const MAX_LENGTH_DIGITS: usize = 15;
