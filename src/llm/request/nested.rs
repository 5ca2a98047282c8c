//! Judges the fields of `extra_body`, which `LiteLLM` and the clients of Gemini's compatible API take out of it and put beside it.
//!
//! What is looked into beside it, and what is read there, has to stand there: nothing is looked for in two places.

use std::ops::Range;

use bytes::Bytes;

use super::apply_fields::RequestFieldReader;
use super::change::{FieldChange, FieldChangeKind, FieldChangeReason};
use super::field::{self, FieldRule, ForbiddenReason, RequestField, ValueShape};
use super::{BodyPolicyError, UnknownFieldPolicy};
use crate::base::json::{JsonMember, JsonType};
use crate::base::sanitize::SanitizedText;

/// What becomes of one of the members.
enum MemberDisposition {
    Stays,
    Goes(FieldChangeReason),
}

impl RequestFieldReader<'_> {
    /// Judges what stands in the object, and in `google` within it, and takes out what does not pass.
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
        let mut kept = Vec::new();
        let is_whole = self.keep(field, &object, true, &mut kept)?;
        if !is_whole {
            self.call.draft.set_value(at, kept.into());
        }
        Ok(())
    }

    /// Writes the members that pass; `false` where some do not.
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
            let place = object.start + member.value.start..object.start + member.value.end;
            let name = member.key.as_str().unwrap_or_default();
            if !is_written_plainly(name, member) {
                return Err(field.invalid_error());
            }
            let start = kept.len();
            if start > 1 && kept.last() != Some(&b'{') {
                kept.push(b',');
            }
            kept.extend_from_slice(format!("\"{name}\":").as_bytes());
            if may_nest && name == GOOGLE && member.kind == JsonType::Object {
                is_whole &= self.keep(field, &place, false, kept)?;
                continue;
            }
            let value = self.call.draft.bytes_in(place);
            match self.fate(name, &value)? {
                MemberDisposition::Stays => kept.extend_from_slice(&value),
                MemberDisposition::Goes(why) => {
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

    fn fate(&self, name: &str, value: &Bytes) -> Result<MemberDisposition, BodyPolicyError> {
        let shown = || format!("extra_body.{}", SanitizedText(name).to_text()).into();
        let forbidden = |why| BodyPolicyError::FieldNotAllowed { name: shown(), why };
        let Some(field) = field::find_field(self.route, name) else {
            let small = name.to_ascii_lowercase();
            return match (self.policy.unknown_fields, field::is_known_elsewhere(name)) {
                _ if small != name && field::find_field(self.route, &small).is_some() => {
                    Err(forbidden(ForbiddenReason::Upstream))
                }
                (UnknownFieldPolicy::Reject, _) => {
                    Err(BodyPolicyError::UnknownField { name: shown() })
                }
                (UnknownFieldPolicy::Pass, false) => Ok(MemberDisposition::Stays),
                _ => Ok(MemberDisposition::Goes(FieldChangeReason::Unknown)),
            };
        };
        match field.rule {
            FieldRule::Refuse(why) => Err(forbidden(why)),
            FieldRule::Drop(why) => Ok(MemberDisposition::Goes(why)),
            FieldRule::Needs(capability) => {
                let asks_for_nothing = matches!(&**value, b"null" | b"false" | b"[]");
                if asks_for_nothing || self.policy.capabilities.contains(&capability) {
                    return Ok(MemberDisposition::Stays);
                }
                Err(BodyPolicyError::CapabilityNotGranted {
                    capability,
                    field: field.name,
                    detail: None,
                })
            }
            FieldRule::Pass(ValueShape::Any) if !LOOKED_INTO.contains(&name) => {
                Ok(MemberDisposition::Stays)
            }
            _ => Err(BodyPolicyError::FieldElsewhere { name: field.name }),
        }
    }
}

/// A name that every reader reads alike, and that we can write again.
fn is_written_plainly(name: &str, member: &JsonMember) -> bool {
    let is_ordinary = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    member.is_plain && !name.is_empty() && name.bytes().all(is_ordinary)
}

/// Under this name Gemini's compatible API takes what only Google knows.
const GOOGLE: &str = "google";

/// What passes beside `extra_body` because all that stands in it is looked at there.
const LOOKED_INTO: [&str; 7] = [
    "cache_control",
    "compaction",
    "context_management",
    "documents",
    "image",
    "prediction",
    "system",
];
