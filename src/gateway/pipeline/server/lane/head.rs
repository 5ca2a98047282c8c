//! Heads of requests that can be read in one way only.
//!
//! hyper uses the same parser, and hyper serves every unusual request. So the list of accepted forms
//! can be short.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::Method;

use crate::base::header_lines::is_field_name;
use crate::gateway::pipeline::policy::PolicyConfig;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::pipeline::request_head::{JudgedHead, check_length, is_json};
use crate::gateway::upstream::headers::{ClientField, ClientHead};
use crate::llm::protocol::GatewayRoute;

/// The head of a request in the lane, with the positions of the fields that the pipeline reads.
#[derive(Debug)]
pub struct LaneRequest {
    pub route: GatewayRoute,
    /// The length of the body, in bytes.
    pub length: u64,
    text: Bytes,
    query: Option<TextPlace>,
    /// The kept fields from the first place on. No place after a free one is used.
    fields: [Option<(ClientField, TextPlace)>; MAX_KEPT],
}

/// The use of a field in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldUse {
    Length,
    Type,
    Host,
    Connection,
    Kept(ClientField),
    /// The field changes the framing of the message or the use of the connection. hyper handles such requests.
    ForHyper,
    /// The field changes nothing, and does not go upstream.
    None,
}

/// The position of a text in a head: its start and its length.
type TextPlace = (u16, u16);

/// The facts that are collected from the fields of a head.
struct HeadFields<'a> {
    /// The bytes from the start of the head on.
    received: &'a [u8],
    kept: [Option<(ClientField, TextPlace)>; MAX_KEPT],
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
    let mut head = HeadFields::new(received);
    for field in parsed.headers.iter() {
        head.take_field(field.name, field.value)?;
    }
    // 4. Require a body that the policy allows. Otherwise hyper takes the request, and the pipeline answers
    //    with the error.
    let body = head.length.filter(|length| head.has_type && (1..=max_body).contains(length))?;
    let query = query.map(|query| head.place(query.as_bytes()));
    let fields = head.kept;
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

    fn values(&self, field: ClientField) -> impl Iterator<Item = &[u8]> {
        let kept = self.fields.iter().map_while(Option::as_ref);
        kept.filter(move |(other, _)| *other == field).map(|(_, place)| self.text(*place))
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
    // `end` is the end of the last part, where the only text up to the next name is a line end.
    let path_end = place(path.as_bytes()) + path.len();
    let Some(rest) = head.get(path_end..) else { return false };
    if !rest.starts_with(VERSION) {
        return false;
    }
    let mut end = path_end + VERSION.len();
    for field in parsed.headers.iter() {
        let (name, value) = (place(field.name.as_bytes()), place(field.value));
        let is_plain = head.get(end..name) == Some(b"\r\n")
            && !field.value.is_empty()
            && head.get(name + field.name.len()..value) == Some(b": ");
        if !is_plain {
            return false;
        }
        end = value + field.value.len();
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
    fn new(received: &'a [u8]) -> Self {
        let (kept, length) = ([None; MAX_KEPT], None);
        Self { received, kept, length, has_type: false, has_connection: false, has_host: false }
    }

    /// Reads one field. Returns `None` if the field is not beyond doubt.
    fn take_field(&mut self, name: &str, value: &[u8]) -> Option<()> {
        match FieldUse::of_name(name) {
            FieldUse::Length => {
                let length = parse_content_length(value)?;
                // A second length is never plain, even an equal one: two lengths are a means of request
                // smuggling.
                self.length.replace(length).is_none().then_some(())
            }
            FieldUse::Type => {
                let is_first = !std::mem::replace(&mut self.has_type, true);
                (is_first && is_json(value)).then_some(())
            }
            FieldUse::Host => (!std::mem::replace(&mut self.has_host, true)).then_some(()),
            FieldUse::Connection => {
                let is_first = !std::mem::replace(&mut self.has_connection, true);
                (is_first && value.eq_ignore_ascii_case(b"keep-alive")).then_some(())
            }
            FieldUse::Kept(field) => self.keep(field, value),
            FieldUse::ForHyper => None,
            FieldUse::None => Some(()),
        }
    }

    fn keep(&mut self, field: ClientField, value: &[u8]) -> Option<()> {
        let may_be_repeated = matches!(field, ClientField::AnthropicBeta | ClientField::OpenaiBeta);
        let mut kept = self.kept.iter().map_while(Option::as_ref);
        let is_there = kept.any(|(other, _)| *other == field);
        if is_there && !may_be_repeated {
            return None;
        }
        let place = self.place(value);
        *self.kept.iter_mut().find(|place| place.is_none())? = Some((field, place));
        Some(())
    }

    /// Returns the position of a text of the head. The result keeps positions instead of slices, because the head's
    /// bytes move into it.
    fn place(&self, text: &[u8]) -> TextPlace {
        let start = text.as_ptr().addr() - self.received.as_ptr().addr();
        (to_u16(start), to_u16(text.len()))
    }
}

impl FieldUse {
    /// Returns the use of a field. The length tells most names apart, so at most a few names are compared.
    fn of_name(name: &str) -> Self {
        let of_length: &[(&str, Self)] = match name.len() {
            2 => &[("te", Self::ForHyper)],
            4 => &[("host", Self::Host)],
            6 => &[("accept", Self::Kept(ClientField::Accept)), ("expect", Self::ForHyper)],
            7 => &[("upgrade", Self::ForHyper), ("trailer", Self::ForHyper)],
            10 => &[
                ("user-agent", Self::Kept(ClientField::UserAgent)),
                ("connection", Self::Connection),
                ("keep-alive", Self::ForHyper),
            ],
            11 => &[("openai-beta", Self::Kept(ClientField::OpenaiBeta))],
            12 => &[("content-type", Self::Type)],
            14 => &[
                ("content-length", Self::Length),
                ("anthropic-beta", Self::Kept(ClientField::AnthropicBeta)),
                ("http2-settings", Self::ForHyper),
            ],
            16 => &[("content-encoding", Self::ForHyper), ("proxy-connection", Self::ForHyper)],
            17 => &[
                ("anthropic-version", Self::Kept(ClientField::AnthropicVersion)),
                ("transfer-encoding", Self::ForHyper),
            ],
            24 => &[("x-stainless-raw-response", Self::Kept(ClientField::RawResponse))],
            _ => &[],
        };
        let found = of_length.iter().find(|(known, _)| is_field_name(name, known));
        found.map_or(Self::None, |(_, found)| *found)
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

/// The text between the path and the first field.
const VERSION: &[u8] = b" HTTP/1.1";

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

#[cfg(test)]
mod tests {
    use super::{ClientField, FieldUse};

    /// Each name is found under its own length, in any case.
    #[test]
    fn every_field_of_the_lane_is_known_by_its_name() {
        let kept = ClientField::ALL.map(|field| (field.name(), FieldUse::Kept(field)));
        let own = [
            ("content-length", FieldUse::Length),
            ("content-type", FieldUse::Type),
            ("host", FieldUse::Host),
            ("connection", FieldUse::Connection),
        ];
        let for_hyper = [
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
        let for_hyper = for_hyper.map(|name| (name, FieldUse::ForHyper));
        for (name, used) in kept.into_iter().chain(own).chain(for_hyper) {
            assert_eq!(FieldUse::of_name(name), used, "{name}");
            assert_eq!(FieldUse::of_name(&name.to_uppercase()), used, "{name}");
            assert_eq!(FieldUse::of_name(&format!("{name}x")), FieldUse::None, "{name}");
            assert_eq!(FieldUse::of_name(&name[1..]), FieldUse::None, "{name}");
        }
    }
}
