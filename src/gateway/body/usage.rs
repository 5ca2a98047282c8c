//! Makes a chat stream report its usage, whatever the client said about it.
//!
//! A run that could turn the report off, as `"include_usage": false` does in other gateways, could
//! not be held to its budget. The client sees the extra chunk only if it had asked for it.

use std::ops::Range;

use bytes::Bytes;

use super::field::{SHORT, STREAM_OPTIONS};
use super::{Edit, Refusal};
use crate::gateway::json::{Document, Kind, Limits, Member, Scanner};
use crate::gateway::rope::Rope;

/// The edit that asks for the report; `None` where the client did so itself. `end` is where the
/// body's last member ends.
pub(super) fn report(
    options: Option<&Member>,
    end: u64,
    rope: &Rope,
) -> Result<Option<Edit>, Refusal> {
    match options.map(|options| (options, options.kind)) {
        None => Ok(Some(put(end..end, br#","stream_options":{"include_usage":true}"#))),
        Some((options, Kind::Null)) => Ok(Some(put(options.value.clone(), OPTIONS))),
        Some((options, Kind::Object)) => report_in(options.value.clone(), rope),
        Some(_) => Err(STREAM_OPTIONS.invalid()),
    }
}

/// The same within the options that stand in `object`.
fn report_in(object: Range<u64>, rope: &Rope) -> Result<Option<Edit>, Refusal> {
    let document = scan(&object, rope).ok_or_else(|| STREAM_OPTIONS.invalid())?;
    let within = |range: &Range<u64>| object.start + range.start..object.start + range.end;
    if let Some(include_usage) = document.get("include_usage") {
        let value = within(&include_usage.value);
        let is_asked = *rope.slice(value.clone()) == *b"true";
        return Ok((!is_asked).then(|| put(value, b"true")));
    }
    let Some(last) = document.members.last() else { return Ok(Some(put(object, OPTIONS))) };
    let end = within(&last.value).end;
    Ok(Some(put(end..end, br#","include_usage":true"#)))
}

fn scan(object: &Range<u64>, rope: &Rope) -> Option<Document> {
    if object.end - object.start > SHORT {
        return None;
    }
    let mut scanner = Scanner::new(Limits::default());
    scanner.feed(&rope.slice(object.clone())).ok()?;
    scanner.finish().ok()
}

fn put(range: Range<u64>, text: &'static [u8]) -> Edit {
    (range, Bytes::from_static(text))
}

const OPTIONS: &[u8] = br#"{"include_usage":true}"#;
