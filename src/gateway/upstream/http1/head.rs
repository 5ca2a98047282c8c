//! The head of a response: the status, the headers that are kept, and the framing of the body.

use std::mem::MaybeUninit;

use http::StatusCode;

use crate::base::header_lines::{HeaderLines, is_field_name};
use crate::gateway::upstream::headers;

/// A parsed response head.
#[derive(Debug)]
pub(in super::super) struct ResponseHead {
    pub(in super::super) status: StatusCode,
    /// The fields that [`headers::kept_header_name`] knows. Other fields are never copied.
    pub(in super::super) fields: HeaderLines,
    pub(super) framing: BodyFraming,
    pub(super) keeps_alive: bool,
}

/// The way in which the end of the body is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyFraming {
    Length(u64),
    Chunked,
    UntilClose,
}

/// Parses a head and returns it with its length in bytes; `None` while the head is incomplete.
///
/// # Errors
/// Returns an error if the head is not HTTP, or if its framing is ambiguous.
pub(super) fn parse_head(bytes: &[u8]) -> Result<Option<(ResponseHead, usize)>, &'static str> {
    // httparse writes the fields that it finds, so the array on the stack is not initialized first.
    let mut fields = [const { MaybeUninit::uninit() }; MAX_HEAD_FIELDS];
    let mut response = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut response,
        bytes,
        &mut fields,
    );
    let length = match parsed {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err("the head has too many fields"),
        Err(_) => return Err("the head cannot be parsed"),
    };
    let status = response.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or("the status is not a number from 100 to 999")?;
    let mut head = ResponseHead {
        status,
        fields: HeaderLines::with_capacity(FIELDS_ROOM_BYTES),
        // The default of HTTP/1.1 without length fields. A length field below replaces it.
        framing: BodyFraming::UntilClose,
        // `version` is the minor version. HTTP/1.0 closes after each response.
        keeps_alive: response.version == Some(1),
    };
    for field in response.headers.iter() {
        head.read_field(field)?;
    }
    // The fields are complete at this point. The status overrides them.
    head.settle_framing();
    Ok(Some((head, length)))
}

impl ResponseHead {
    fn read_field(&mut self, field: &httparse::Header<'_>) -> Result<(), &'static str> {
        let (name, value) = (field.name, field.value);
        if is_field_name(name, "content-length") {
            return self.read_content_length(value);
        }
        if is_field_name(name, "transfer-encoding") {
            return self.read_transfer_encoding(value);
        }
        if is_field_name(name, "connection") {
            self.keeps_alive &= !value.eq_ignore_ascii_case(b"close");
            return Ok(());
        }
        if let Some(name) = headers::kept_header_name(name) {
            self.fields.push(name, value);
        }
        Ok(())
    }

    fn read_content_length(&mut self, value: &[u8]) -> Result<(), &'static str> {
        // `parse` accepts a leading `+`, which is not valid here. Different readings of a length allow response
        // smuggling.
        let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        let length = length.filter(|_| digits).ok_or("content-length is not a number")?;
        // RFC 9112, section 6.3: a response with two different lengths, or with both framings, must not be trusted.
        match self.framing {
            BodyFraming::Length(other) if other != length => Err("content-length is given twice"),
            BodyFraming::Chunked => Err("both content-length and transfer-encoding are given"),
            _ => {
                self.framing = BodyFraming::Length(length);
                Ok(())
            }
        }
    }

    fn read_transfer_encoding(&mut self, value: &[u8]) -> Result<(), &'static str> {
        if self.framing != BodyFraming::UntilClose {
            return Err("the body's length is given twice");
        }
        // The gateway asks for no other coding, so any other value is an error and not a list to decode.
        if !value.eq_ignore_ascii_case(b"chunked") {
            return Err("transfer-encoding is not `chunked`");
        }
        self.framing = BodyFraming::Chunked;
        Ok(())
    }

    /// Applies the rules of the status to the framing.
    fn settle_framing(&mut self) {
        // These two never have a body, even if a length field announces one (RFC 9110, section 6.4.1).
        if matches!(self.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            self.framing = BodyFraming::Length(0);
        }
        // The end of the connection marks the end of such a body.
        self.keeps_alive &= self.framing != BodyFraming::UntilClose;
    }
}

/// The largest head that is accepted, in bytes. LiteLLM sends about 40 fields in 3 KiB; the value is an order of
/// magnitude more.
pub(super) const MAX_HEAD_BYTES: usize = 64 * 1024;
/// The largest number of fields in a head. LiteLLM sends about 40.
const MAX_HEAD_FIELDS: usize = 128;

/// The initial capacity for header lines, in bytes. The kept fields and those that the gateway adds for the client fit
/// in nearly every case, so one allocation is enough.
const FIELDS_ROOM_BYTES: usize = 384;
