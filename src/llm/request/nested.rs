//! Checks the fields of `extra_body`. `LiteLLM` and the clients of Gemini's compatible API move
//! these fields to the top level.
//!
//! A field that the gateway must read or scan has to stand at the top level itself. The gateway
//! never looks for one field in two places.

use std::ops::Range;

use bytes::Bytes;

use super::apply_fields::RequestFieldReader;
use super::change::{FieldChange, FieldChangeKind, FieldChangeReason};
use super::error::ForbiddenReason;
use super::field::{self, FieldRule, RequestField, ValueShape};
use super::{BodyPolicyError, UnknownFieldPolicy};
use crate::base::json::{JsonMember, JsonType};
use crate::base::sanitize::SanitizedText;

/// The treatment of one nested member.
enum MemberDisposition {
    Kept,
    Dropped(FieldChangeReason),
}

impl RequestFieldReader<'_> {
    /// Checks the members of the object and of a `google` object within it, and removes the members
    /// that do not pass.
    pub(super) fn take_nested(
        &mut self,
        field: &RequestField,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let (kind, object) = {
            let member = &self.call.draft.members()[at];
            (member.kind, member.value.clone())
        };
        match kind {
            JsonType::Null => return Ok(()),
            JsonType::Object => (),
            _ => return Err(field.invalid_error()),
        }
        // The object is rewritten into `kept` on the way. If every member passes, the copy is
        // discarded and the original bytes are sent.
        let mut kept = Vec::new();
        let is_whole = self.keep(field, &object, true, &mut kept)?;
        if !is_whole {
            self.call.draft.set_value(at, kept.into());
        }
        Ok(())
    }

    /// Writes the members that pass into `kept`. Returns `false` if a member was removed.
    fn keep(
        &mut self,
        field: &RequestField,
        object: &Range<u64>,
        may_nest: bool,
        kept: &mut Vec<u8>,
    ) -> Result<bool, BodyPolicyError> {
        let document = self.call.draft.parse_object(object).ok_or_else(|| field.invalid_error())?;
        let mut is_whole = true;
        kept.push(b'{');
        for member in &document.members {
            // Offsets in `document` count from the object's start; the draft needs offsets in the
            // body.
            let place = object.start + member.value.start..object.start + member.value.end;
            let name = member.key.as_str().unwrap_or_default();
            if !is_written_plainly(name, member) {
                return Err(field.invalid_error());
            }
            // The position before the comma: a removed member is cut off here together with its
            // comma and key.
            let start = kept.len();
            if start > 1 && kept.last() != Some(&b'{') {
                kept.push(b',');
            }
            kept.extend_from_slice(format!("\"{name}\":").as_bytes());
            // Only one level of nesting is followed: within `google`, another `google` is a member
            // like any other.
            if may_nest && name == GOOGLE && member.kind == JsonType::Object {
                is_whole &= self.keep(field, &place, false, kept)?;
                continue;
            }
            let value = self.call.draft.bytes_in(place);
            match self.fate(name, &value)? {
                MemberDisposition::Kept => kept.extend_from_slice(&value),
                MemberDisposition::Dropped(why) => {
                    is_whole = false;
                    kept.truncate(start);
                    let field = format!("{}.{}", field.name, SanitizedText(name).to_text()).into();
                    self.call.changes.push(FieldChange {
                        field,
                        what: FieldChangeKind::Dropped,
                        why,
                    });
                }
            }
        }
        kept.push(b'}');
        Ok(is_whole)
    }

    fn fate(&mut self, name: &str, value: &Bytes) -> Result<MemberDisposition, BodyPolicyError> {
        let shown = || format!("extra_body.{}", SanitizedText(name).to_text()).into();
        let forbidden = |why| BodyPolicyError::FieldNotAllowed { name: shown(), why };
        let Some(field) = field::find_field(self.route, name) else {
            let small = name.to_ascii_lowercase();
            return match (self.policy.unknown_fields, field::is_known_elsewhere(name)) {
                // A known name in another case might be read as that field by an upstream, so the
                // name is refused.
                _ if small != name && field::find_field(self.route, &small).is_some() => {
                    Err(forbidden(ForbiddenReason::Upstream))
                }
                (UnknownFieldPolicy::Reject, _) => {
                    Err(BodyPolicyError::UnknownField { name: shown() })
                }
                (UnknownFieldPolicy::Pass, false) => Ok(MemberDisposition::Kept),
                _ => Ok(MemberDisposition::Dropped(FieldChangeReason::Unknown)),
            };
        };
        match field.rule {
            FieldRule::Refuse(why) => Err(forbidden(why)),
            FieldRule::Drop(why) => Ok(MemberDisposition::Dropped(why)),
            FieldRule::Needs(capability) => {
                let asks_for_nothing = matches!(&**value, b"null" | b"false" | b"[]");
                if asks_for_nothing {
                    return Ok(MemberDisposition::Kept);
                }
                if self.policy.capabilities.contains(&capability) {
                    self.parsed.granted.insert(capability);
                    return Ok(MemberDisposition::Kept);
                }
                Err(BodyPolicyError::CapabilityNotGranted {
                    capability,
                    field: field.name,
                    detail: None,
                })
            }
            // A field of any shape passes, unless the capability scanner reads the field at the top
            // level. All other rules read or check a value, which must not happen in two places.
            FieldRule::Pass(ValueShape::Any) if !LOOKED_INTO.contains(&name) => {
                Ok(MemberDisposition::Kept)
            }
            _ => Err(BodyPolicyError::FieldOnlyAtTopLevel { name: field.name }),
        }
    }
}

/// Returns true if every reader reads the key alike, and the gateway can write the key without
/// escapes.
fn is_written_plainly(name: &str, member: &JsonMember) -> bool {
    let is_ordinary = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    member.is_plain && !name.is_empty() && name.bytes().all(is_ordinary)
}

/// The key under which Gemini's compatible API takes fields that only Google knows.
const GOOGLE: &str = "google";

/// Fields that would pass at the top level because the capability scanner reads their content
/// there. Inside `extra_body` they are refused.
const LOOKED_INTO: [&str; 8] = [
    "audio",
    "cache_control",
    "compaction",
    "context_management",
    "documents",
    "image",
    "prediction",
    "system",
];
