//! The head of a response: status, the headers worth keeping, and how the body is framed.

use std::mem::MaybeUninit;

use http::StatusCode;

use crate::base::header_lines::HeaderLines;
use crate::gateway::upstream::headers;

/// What the head says.
#[derive(Debug)]
pub(super) struct ResponseHead {
    pub(super) status: StatusCode,
    /// Only what [`headers::kept_header_name`]; the rest is never copied.
    pub(super) fields: HeaderLines,
    pub(super) framing: BodyFraming,
    pub(super) keeps_alive: bool,
}

/// How the end of the body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyFraming {
    Length(u64),
    Chunked,
    UntilClose,
}

/// Parses a head and says how many bytes it took; `None` while it is incomplete.
///
/// # Errors
/// What makes it not HTTP, or its framing ambiguous.
pub(super) fn parse_head(bytes: &[u8]) -> Result<Option<(ResponseHead, usize)>, &'static str> {
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
        framing: BodyFraming::UntilClose,
        keeps_alive: response.version == Some(1),
    };
    for field in response.headers.iter() {
        head.read_field(field)?;
    }
    head.settle_framing();
    Ok(Some((head, length)))
}

impl ResponseHead {
    fn read_field(&mut self, field: &httparse::Header<'_>) -> Result<(), &'static str> {
        let (name, value) = (field.name, field.value);
        if name.eq_ignore_ascii_case("content-length") {
            return self.read_content_length(value);
        }
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return self.read_transfer_encoding(value);
        }
        if name.eq_ignore_ascii_case("connection") {
            self.keeps_alive &= !value.eq_ignore_ascii_case(b"close");
            return Ok(());
        }
        if let Some(name) = headers::kept_header_name(name) {
            self.fields.push(name, value);
        }
        Ok(())
    }

    fn read_content_length(&mut self, value: &[u8]) -> Result<(), &'static str> {
        let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        let length = length.filter(|_| digits).ok_or("content-length is not a number")?;
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
        if !value.eq_ignore_ascii_case(b"chunked") {
            return Err("transfer-encoding is not `chunked`");
        }
        self.framing = BodyFraming::Chunked;
        Ok(())
    }

    fn settle_framing(&mut self) {
        if matches!(self.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            self.framing = BodyFraming::Length(0);
        }
        self.keeps_alive &= self.framing != BodyFraming::UntilClose;
    }
}

/// LiteLLM sends about 40 fields in 3 KiB; this is an order of magnitude more.
pub(super) const MAX_HEAD_BYTES: usize = 64 * 1024;
const MAX_HEAD_FIELDS: usize = 128;

/// What is kept, and what we add for the client, in one allocation in nearly every case.
const FIELDS_ROOM_BYTES: usize = 384;
