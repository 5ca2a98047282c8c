//! Judges the fields of `extra_body`, which `LiteLLM` and the clients of Gemini's compatible API take out of it and put beside it.
//!
//! What is looked into beside it, and what is read there, has to stand there: nothing is looked for in two places.

use std::ops::Range;

use bytes::Bytes;

use super::change::{Change, What, Why};
use super::field::{self, Field, Forbidden, Rule, Shape};
use super::fields::Reading;
use super::{Refusal, UnknownFields};
use crate::base::json::{Kind, Member};
use crate::observe::printable::Printable;

/// What becomes of one of the members.
enum Fate {
    Stays,
    Goes(Why),
}

impl Reading<'_> {
    /// Judges what stands in the object, and in `google` within it, and takes out what does not pass.
    pub(super) fn take_nested(&mut self, field: &Field, at: usize) -> Result<(), Refusal> {
        let (kind, object) = {
            let member = &self.call.draft.members()[at];
            (member.kind, member.value.clone())
        };
        match kind {
            Kind::Null => return Ok(()),
            Kind::Object => (),
            _ => return Err(field.invalid()),
        }
        let mut kept = Vec::new();
        let is_whole = self.keep(field, &object, true, &mut kept)?;
        if !is_whole {
            self.call.draft.set(at, kept.into());
        }
        Ok(())
    }

    /// Writes the members that pass; `false` where some do not.
    fn keep(
        &mut self,
        field: &Field,
        object: &Range<u64>,
        may_nest: bool,
        kept: &mut Vec<u8>,
    ) -> Result<bool, Refusal> {
        let document = self.call.draft.inside(object).ok_or_else(|| field.invalid())?;
        let mut is_whole = true;
        kept.push(b'{');
        for member in &document.members {
            let place = object.start + member.value.start..object.start + member.value.end;
            let name = member.key.as_str().unwrap_or_default();
            if !is_written_plainly(name, member) {
                return Err(field.invalid());
            }
            let start = kept.len();
            if start > 1 && kept.last() != Some(&b'{') {
                kept.push(b',');
            }
            kept.extend_from_slice(format!("\"{name}\":").as_bytes());
            if may_nest && name == GOOGLE && member.kind == Kind::Object {
                is_whole &= self.keep(field, &place, false, kept)?;
                continue;
            }
            let value = self.call.draft.text(place);
            match self.fate(name, &value)? {
                Fate::Stays => kept.extend_from_slice(&value),
                Fate::Goes(why) => {
                    is_whole = false;
                    kept.truncate(start);
                    let field = format!("{}.{}", field.name, Printable(name).text()).into();
                    self.call.changes.push(Change { field, what: What::Dropped, why });
                }
            }
        }
        kept.push(b'}');
        Ok(is_whole)
    }

    fn fate(&self, name: &str, value: &Bytes) -> Result<Fate, Refusal> {
        let shown = || format!("extra_body.{}", Printable(name).text()).into();
        let forbidden = |why| Refusal::FieldNotAllowed { name: shown(), why };
        let Some(field) = field::find(self.route, name) else {
            let small = name.to_ascii_lowercase();
            return match (self.policy.unknown_fields, field::is_taken(name)) {
                _ if small != name && field::find(self.route, &small).is_some() => {
                    Err(forbidden(Forbidden::Upstream))
                }
                (UnknownFields::Reject, _) => Err(Refusal::UnknownField { name: shown() }),
                (UnknownFields::Pass, false) => Ok(Fate::Stays),
                _ => Ok(Fate::Goes(Why::Unknown)),
            };
        };
        match field.rule {
            Rule::Refuse(why) => Err(forbidden(why)),
            Rule::Drop(why) => Ok(Fate::Goes(why)),
            Rule::Needs(capability) => {
                let asks_for_nothing = matches!(&**value, b"null" | b"false" | b"[]");
                if asks_for_nothing || self.policy.capabilities.contains(&capability) {
                    return Ok(Fate::Stays);
                }
                Err(Refusal::CapabilityNotGranted { capability, field: field.name, detail: None })
            }
            Rule::Pass(Shape::Any) if !LOOKED_INTO.contains(&name) => Ok(Fate::Stays),
            _ => Err(Refusal::FieldElsewhere { name: field.name }),
        }
    }
}

/// A name that every reader reads alike, and that we can write again.
fn is_written_plainly(name: &str, member: &Member) -> bool {
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
