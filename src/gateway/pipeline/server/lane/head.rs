//! Heads of requests that can be read in one way only.
//!
//! hyper uses the same parser, and hyper serves every unusual request. So the list of accepted forms
//! can be short.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::Method;

use crate::gateway::pipeline::audience;
use crate::gateway::pipeline::policy::PolicyConfig;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::pipeline::request_head::{JudgedHead, check_length, is_json};
use crate::gateway::upstream::headers::ClientHead;
use crate::llm::protocol::GatewayRoute;

/// The head of a request in the lane, with the positions of the fields that the pipeline reads.
#[derive(Debug)]
pub struct LaneRequest {
    pub route: GatewayRoute,
    /// The length of the body, in bytes.
    pub length: u64,
    text: Bytes,
    query: Option<TextPlace>,
    fields: [Option<(LaneField, TextPlace)>; MAX_KEPT],
}

/// A field that the pipeline reads, beside the fields that the lane checks itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneField {
    Accept,
    AnthropicVersion,
    AnthropicBeta,
    OpenaiBeta,
    RawResponse,
    UserAgent,
}

/// The position of a text in a head: its start and its length.
type TextPlace = (u16, u16);

/// The facts that are collected from the fields of a head.
#[derive(Default)]
struct HeadFields<'a> {
    kept: [Option<(LaneField, &'a [u8])>; MAX_KEPT],
    length: Option<u64>,
    has_type: bool,
    has_connection: bool,
    has_host: bool,
}

/// Splits a head off the front of the received bytes.
///
/// Returns `None` and takes nothing if the head is incomplete, or if two parsers could read it differently.
pub fn parse_head(received: &mut Bytes, max_fields: usize, max_body: u64) -> Option<LaneRequest> {
    if !received.starts_with(b"POST /v1/") {
        return None;
    }
    // 1. Parse with hyper's parser. The array is not initialised, because most heads use few of its
    //    entries.
    let mut fields = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut []);
    let status = httparse::ParserConfig::default().parse_request_with_uninit_headers(
        &mut parsed,
        received,
        &mut fields,
    );
    let Ok(httparse::Status::Complete(length)) = status else { return None };
    // 2. Compare the head byte for byte with its plain form.
    let is_plain = parsed.version == Some(1)
        && length <= MAX_HEAD_BYTES
        && parsed.headers.len() <= max_fields
        && is_printable_head(&received[..length], &parsed);
    if !is_plain {
        return None;
    }
    let (route, query) = parse_target(parsed.path?)?;
    // 3. Check each field. Any doubtful field hands the request to hyper.
    let mut head = HeadFields::default();
    for field in parsed.headers.iter() {
        head.take_field(field.name, field.value)?;
    }
    // 4. Require a body that the policy allows. Otherwise hyper takes the request, and the pipeline answers
    //    with the error.
    let body = head.length.filter(|length| head.has_type && (1..=max_body).contains(length))?;
    // Keep positions instead of slices, because the head's bytes move into the result.
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

/// The lane has made the other checks. Only the policy may have changed, so only the body limit is
/// checked again.
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

/// Returns true if a head is printable ASCII, if each of its lines ends with a carriage return and a
/// line feed, and if nothing stands between the parsed parts.
fn is_printable_head(head: &[u8], parsed: &httparse::Request<'_, '_>) -> bool {
    // The fold has no branch for each byte, so the compiler can compare many bytes at a time.
    let odd_bits = |byte: &u8| byte & 0x80 | u8::from(*byte == b'\t');
    if head.iter().fold(0, |found, byte| found | odd_bits(byte)) != 0 {
        return false;
    }
    let place = |part: &[u8]| part.as_ptr().addr() - head.as_ptr().addr();
    let Some(path) = parsed.path else { return false };
    // `end` is the end of the last part. `between` is the only text that may follow up to the next
    // name.
    let mut end = place(path.as_bytes()) + path.len();
    let mut between: &[u8] = b" HTTP/1.1\r\n";
    for field in parsed.headers.iter() {
        let (name, value) = (place(field.name.as_bytes()), place(field.value));
        let has_value = !field.value.is_empty();
        let is_plain = head.get(end..name) == Some(between)
            && has_value
            && head.get(name + field.name.len()..value) == Some(b": ");
        if !is_plain {
            return false;
        }
        (end, between) = (value + field.value.len(), b"\r\n");
    }
    head.get(end..) == Some(b"\r\n\r\n")
}

/// Returns the route and the query of a target, if the route takes a body and the query has only plain
/// characters.
fn parse_target(target: &str) -> Option<(GatewayRoute, Option<&str>)> {
    let Some((path, query)) = target.split_once('?') else {
        return Some((GatewayRoute::from_request_line(&Method::POST, target)?, None));
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"=&-_.".contains(&byte);
    let is_usual = (1..=MAX_QUERY_BYTES).contains(&query.len()) && query.bytes().all(is_plain);
    is_usual.then_some((GatewayRoute::from_request_line(&Method::POST, path)?, Some(query)))
}

impl<'a> HeadFields<'a> {
    /// Reads one field. Returns `None` if the field is not beyond doubt.
    fn take_field(&mut self, name: &str, value: &'a [u8]) -> Option<()> {
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is("content-length") {
            let length = parse_content_length(value)?;
            // A second length is never plain, even an equal one: two lengths are a means of request smuggling.
            return self.length.replace(length).is_none().then_some(());
        }
        if is("content-type") {
            let is_first = !std::mem::replace(&mut self.has_type, true);
            return (is_first && is_json(value)).then_some(());
        }
        if is("host") {
            return (!std::mem::replace(&mut self.has_host, true)).then_some(());
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

/// Converts a position in a head. [`MAX_HEAD_BYTES`] bounds the position, so the conversion never
/// saturates.
fn to_u16(place: usize) -> u16 {
    u16::try_from(place).unwrap_or(u16::MAX)
}

fn parse_content_length(value: &[u8]) -> Option<u64> {
    // No sign, no blank, no leading zero and no list: forms that another parser might read as another
    // length.
    let is_plain = (1..=MAX_LENGTH_DIGITS).contains(&value.len())
        && value[0] != b'0'
        && value.iter().all(u8::is_ascii_digit);
    is_plain.then(|| value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// Fields that change the framing of the message or the use of the connection. hyper handles such
/// requests.
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

/// The most kept fields of a head: one of each kind, and some further fields of a repeated list.
const MAX_KEPT: usize = 10;

/// The most fields of a head in the lane: as many as any client sends. hyper accepts up to
/// `server.max_headers`.
const MAX_FIELDS: usize = 64;

/// The longest head in the lane, in bytes: the smallest buffer that hyper can have. So hyper would
/// accept the head, too, whatever the settings.
const MAX_HEAD_BYTES: usize = 8 * 1024;

/// The longest query in the lane, in bytes. Our choice.
const MAX_QUERY_BYTES: usize = 256;

/// The most digits of a length. A number of this length cannot overflow its type.
const MAX_LENGTH_DIGITS: usize = 15;
