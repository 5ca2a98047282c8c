//! Makes a chat stream report its usage, whatever the client requested.
//!
//! If a run could turn the report off, as `"include_usage": false` does in other gateways, the
//! run's budget could not be enforced. The client receives the extra chunk only if the client
//! requested it.

use std::ops::Range;

use bytes::Bytes;

use super::change::{FieldChangeKind, FieldChangeReason};
use super::field::STREAM_OPTIONS_FIELD;
use super::{BodyPolicyError, LlmCall};
use crate::base::json::JsonType;
use crate::llm::response::UsageChunkMode;

impl LlmCall {
    /// Requests the usage report, unless the client already did. `options` is the index of the
    /// `stream_options` member.
    ///
    /// # Errors
    /// Returns [`BodyPolicyError::InvalidField`] if `stream_options` is not a short object or null.
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
                // The client already requested the chunk, so the chunk stays visible to the client.
                let Some((place, text)) = self.usage_option_edit(object)? else { return Ok(()) };
                self.draft.replace_range(place, text);
            }
            _ => return Err(STREAM_OPTIONS_FIELD.invalid_error()),
        }
        self.mark_usage_hidden(FieldChangeKind::Overwritten);
        Ok(())
    }

    /// Returns the edit within the options in `object`, or `None` if the client already requests
    /// the report.
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
        // An empty object has no member to append to, so the whole object is replaced.
        let Some(last) = document.members.last() else { return put(object, INCLUDE_USAGE_OPTIONS) };
        let end = within(&last.value).end;
        put(end..end, br#","include_usage":true"#)
    }

    fn mark_usage_hidden(&mut self, what: FieldChangeKind) {
        self.usage_chunk = UsageChunkMode::Hide;
        self.record_change(STREAM_OPTIONS_FIELD.name, what, FieldChangeReason::Usage);
    }
}

/// The options object that requests a usage report.
const INCLUDE_USAGE_OPTIONS: &[u8] = br#"{"include_usage":true}"#;
