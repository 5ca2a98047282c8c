//! Makes a chat stream report its usage, whatever the client said about it.
//!
//! A run that could turn the report off, as `"include_usage": false` does in other gateways, could
//! not be held to its budget. The client sees the extra chunk only if it had asked for it.

use std::ops::Range;

use bytes::Bytes;

use super::change::{FieldChangeKind, FieldChangeReason};
use super::field::STREAM_OPTIONS_FIELD;
use super::{BodyPolicyError, LlmCall};
use crate::base::json::JsonType;
use crate::llm::response::UsageChunkMode;

impl LlmCall {
    /// Asks for the report, unless the client did so itself. `options` is the member that says so.
    pub(super) fn request_usage_chunk(
        &mut self,
        options: Option<usize>,
    ) -> Result<(), BodyPolicyError> {
        let Some(at) = options else {
            let text = br#","stream_options":{"include_usage":true}"#;
            self.draft.add_member(STREAM_OPTIONS_FIELD.name, Bytes::from_static(text));
            self.mark_usage_hidden(FieldChangeKind::Forced);
            return Ok(());
        };
        let member = &self.draft.members()[at];
        match member.kind {
            JsonType::Null => self.draft.set_value(at, Bytes::from_static(INCLUDE_USAGE_OPTIONS)),
            JsonType::Object => {
                let object = member.value.clone();
                let Some((place, text)) = self.usage_option_edit(object)? else { return Ok(()) };
                self.draft.replace_range(place, text);
            }
            _ => return Err(STREAM_OPTIONS_FIELD.invalid_error()),
        }
        self.mark_usage_hidden(FieldChangeKind::Overwritten);
        Ok(())
    }

    /// The edit within the options that stand in `object`; `None` where the report is asked for.
    fn usage_option_edit(
        &self,
        object: Range<u64>,
    ) -> Result<Option<(Range<u64>, Bytes)>, BodyPolicyError> {
        let put = |range, text| Ok(Some((range, Bytes::from_static(text))));
        let document =
            self.draft.parse_object(&object).ok_or_else(|| STREAM_OPTIONS_FIELD.invalid_error())?;
        let within = |range: &Range<u64>| object.start + range.start..object.start + range.end;
        if let Some(include_usage) = document.find_member("include_usage") {
            let value = within(&include_usage.value);
            return if *self.draft.bytes_in(value.clone()) == *b"true" {
                Ok(None)
            } else {
                put(value, b"true")
            };
        }
        let Some(last) = document.members.last() else { return put(object, INCLUDE_USAGE_OPTIONS) };
        let end = within(&last.value).end;
        put(end..end, br#","include_usage":true"#)
    }

    fn mark_usage_hidden(&mut self, what: FieldChangeKind) {
        self.usage_chunk = UsageChunkMode::Hide;
        self.record_change(STREAM_OPTIONS_FIELD.name, what, FieldChangeReason::Usage);
    }
}

const INCLUDE_USAGE_OPTIONS: &[u8] = br#"{"include_usage":true}"#;
