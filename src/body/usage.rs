//! Makes a chat stream report its usage, whatever the client said about it.
//!
//! A run that could turn the report off, as `"include_usage": false` does in other gateways, could
//! not be held to its budget. The client sees the extra chunk only if it had asked for it.

use std::ops::Range;

use bytes::Bytes;

use super::change::{What, Why};
use super::field::STREAM_OPTIONS;
use super::{Call, Refusal};
use crate::base::json::Kind;
use crate::stream::UsageChunk;

impl Call {
    /// Asks for the report, unless the client did so itself. `options` is the member that says so.
    pub(super) fn report_usage(&mut self, options: Option<usize>) -> Result<(), Refusal> {
        let Some(at) = options else {
            let text = br#","stream_options":{"include_usage":true}"#;
            self.draft.add(STREAM_OPTIONS.name, Bytes::from_static(text));
            self.hide_usage(What::Forced);
            return Ok(());
        };
        let member = &self.draft.members()[at];
        match member.kind {
            Kind::Null => self.draft.set(at, Bytes::from_static(OPTIONS)),
            Kind::Object => {
                let object = member.value.clone();
                let Some((place, text)) = self.report_in(object)? else { return Ok(()) };
                self.draft.replace(place, text);
            }
            _ => return Err(STREAM_OPTIONS.invalid()),
        }
        self.hide_usage(What::Overwritten);
        Ok(())
    }

    /// The edit within the options that stand in `object`; `None` where the report is asked for.
    fn report_in(&self, object: Range<u64>) -> Result<Option<(Range<u64>, Bytes)>, Refusal> {
        let put = |range, text| Ok(Some((range, Bytes::from_static(text))));
        let document = self.draft.inside(&object).ok_or_else(|| STREAM_OPTIONS.invalid())?;
        let within = |range: &Range<u64>| object.start + range.start..object.start + range.end;
        if let Some(include_usage) = document.get("include_usage") {
            let value = within(&include_usage.value);
            return if *self.draft.text(value.clone()) == *b"true" {
                Ok(None)
            } else {
                put(value, b"true")
            };
        }
        let Some(last) = document.members.last() else { return put(object, OPTIONS) };
        let end = within(&last.value).end;
        put(end..end, br#","include_usage":true"#)
    }

    fn hide_usage(&mut self, what: What) {
        self.usage_chunk = UsageChunk::Hide;
        self.note(STREAM_OPTIONS.name, what, Why::Usage);
    }
}

const OPTIONS: &[u8] = br#"{"include_usage":true}"#;
