//! Walks through the top-level fields of a body and applies each field's rule.

use std::borrow::Cow;
use std::sync::Arc;

use super::capability::{CapabilitySet, ProviderCapability};
use super::change::{FieldChange, FieldChangeKind, FieldChangeReason};
use super::error::ForbiddenReason;
use super::field::{self, FieldRule, RequestField};
use super::model_name::{MAX_MODEL_BYTES, ModelNameFacts};
use super::{BodyPolicy, BodyPolicyError, LlmCall, UnknownFieldPolicy};
use crate::base::json::{JsonMember, JsonType};
use crate::base::sanitize::SanitizedText;
use crate::llm::budget::Tokens;
use crate::llm::protocol::GatewayRoute;

/// The values of a body's fields that admission needs.
#[derive(Default)]
pub(super) struct ParsedFields {
    pub(super) model: Option<(Arc<str>, ModelNameFacts)>,
    pub(super) stream: bool,
    /// The index of the member.
    pub(super) stream_options: Option<usize>,
    /// The index of the member, and its value.
    pub(super) store: Option<(usize, Option<bool>)>,
    pub(super) output: Option<Tokens>,
    pub(super) predicted: Tokens,
    pub(super) choices: u32,
    pub(super) prompts: u32,
    /// The granted capabilities that fields of the body use.
    pub(super) granted: CapabilitySet,
}

/// A reader that applies the rules to the fields of a call.
pub(super) struct RequestFieldReader<'a> {
    pub(super) route: GatewayRoute,
    pub(super) policy: &'a BodyPolicy,
    pub(super) call: &'a mut LlmCall,
    pub(super) parsed: ParsedFields,
}

impl RequestFieldReader<'_> {
    /// Applies the rule of each field, in the order of the body.
    ///
    /// # Errors
    /// Returns the error of the first field that causes a refusal.
    pub(super) fn apply_fields(mut self) -> Result<ParsedFields, BodyPolicyError> {
        // Members are addressed by index: rules edit the draft, so no borrow of a member can live
        // across a rule.
        for at in 0..self.call.draft.members().len() {
            let key = self.member_at(at).key.as_bytes();
            // Nearly every field stands in a table. Only another key is copied, and read as a text.
            match key.and_then(|key| field::find_listed_field(self.route, key)) {
                Some(field) => self.apply_known(&field, field.name, at)?,
                None => self.apply_unlisted(at)?,
            }
        }
        Ok(self.parsed)
    }

    fn apply_unlisted(&mut self, at: usize) -> Result<(), BodyPolicyError> {
        let key = self.member_at(at).key;
        let name = key.as_str();
        match name.and_then(|name| field::find_field(self.route, name)) {
            Some(field) => self.apply_known(&field, name.unwrap_or(field.name), at),
            None => self.apply_unknown(at, name),
        }
    }

    fn apply_known(
        &mut self,
        field: &RequestField,
        name: &str,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        self.apply_field(field, name, at)?;
        // A known key written with escapes is rewritten plainly, so that the upstream reads the same
        // name. A dropped member needs no rewriting.
        if !self.member_at(at).is_plain && !matches!(field.rule, FieldRule::Drop(_)) {
            self.normalize_key(at, field.name.into());
        }
        Ok(())
    }

    fn apply_field(
        &mut self,
        field: &RequestField,
        name: &str,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let kind = self.member_at(at).kind;
        match field.rule {
            // Security decisions come first; the remaining rules read a value or check its shape.
            FieldRule::Refuse(why) => return Err(forbidden_error(name, why)),
            FieldRule::Drop(why) => self.drop_field(at, field.name.into(), why),
            FieldRule::Needs(capability) => self.check_capability(capability, field.name, at)?,
            FieldRule::Pass(shape) if !shape.accepts_type(kind) => {
                return Err(field.invalid_error());
            }
            FieldRule::Pass(_) => (),
            // A null value requests nothing, so the field needs no beta and predicts no output.
            FieldRule::Beta(_) | FieldRule::Prediction if kind == JsonType::Null => (),
            FieldRule::Beta(betas) => self.call.editable.betas.push((at, field.name, betas)),
            FieldRule::Model => self.apply_model(field, at)?,
            FieldRule::Stream => {
                let stream = self.parse_flag(field, at)?;
                self.parsed.stream = stream.unwrap_or_default();
            }
            FieldRule::StreamOptions => self.parsed.stream_options = Some(at),
            FieldRule::Store => self.parsed.store = Some((at, self.parse_flag(field, at)?)),
            FieldRule::OutputLimit => self.apply_output_limit(field, at)?,
            FieldRule::Thinking => match kind {
                JsonType::Object | JsonType::Null => self.call.editable.thinking = Some(at),
                _ => return Err(field.invalid_error()),
            },
            // No text has more tokens than bytes.
            FieldRule::Prediction => {
                let value = &self.member_at(at).value;
                self.parsed.predicted = Tokens(value.end - value.start);
            }
            FieldRule::Options => self.check_options(field, at)?,
            FieldRule::Nested => self.take_nested(field, at)?,
            FieldRule::Choices => self.apply_choices(field, at)?,
            FieldRule::Prompts => match kind {
                JsonType::String | JsonType::Array | JsonType::Null => {
                    self.parsed.prompts = self.member_at(at).entries;
                }
                _ => return Err(field.invalid_error()),
            },
        }
        Ok(())
    }

    fn apply_model(&mut self, field: &RequestField, at: usize) -> Result<(), BodyPolicyError> {
        // The usual case is a short name without escapes. It is read in place; only the rest pays
        // for a copy and a JSON parser.
        let (name, facts) = match self.call.draft.peek_value(at).and_then(plain_text) {
            Some(name) => ModelNameFacts::of_name(name),
            None => ModelNameFacts::of_name(&self.parse_value::<Box<str>>(field, at)?),
        };
        if !facts.is_valid {
            return Err(field.invalid_error());
        }
        self.parsed.model = Some((name, facts));
        self.call.editable.model = Some(at);
        Ok(())
    }

    fn apply_output_limit(
        &mut self,
        field: &RequestField,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let limit: Option<u64> = self.parse_value(field, at)?;
        if limit == Some(0) {
            return Err(field.invalid_error());
        }
        self.parsed.output = self.parsed.output.max(limit.map(Tokens));
        // No route has more than two fields that limit the output, so a free entry exists unless a
        // name is repeated, which the scanner refuses.
        if let Some(free) = self.call.editable.output.iter_mut().find(|place| place.is_none()) {
            *free = Some((at, field.name));
        }
        Ok(())
    }

    fn apply_choices(&mut self, field: &RequestField, at: usize) -> Result<(), BodyPolicyError> {
        let choices: Option<u32> = self.parse_value(field, at)?;
        let (choices, limit) = (choices.unwrap_or_default(), self.policy.max_choices);
        if choices > limit {
            return Err(BodyPolicyError::TooManyChoices { name: field.name, limit });
        }
        self.parsed.choices = self.parsed.choices.max(choices);
        Ok(())
    }

    /// Refuses Ollama options that limit the output. Such a limit would override the limit that the
    /// gateway sets.
    fn check_options(&self, field: &RequestField, at: usize) -> Result<(), BodyPolicyError> {
        let member = self.member_at(at);
        let is_fine = match member.kind {
            JsonType::Null => true,
            JsonType::Object => {
                self.call.draft.parse_object(&member.value).is_some_and(|options| {
                    options.members.iter().all(|option| {
                        // A name that is unreadable or too long could hide `num_predict`, so such a
                        // name is refused too.
                        let name = option.key.as_str().unwrap_or_default().to_ascii_lowercase();
                        !name.is_empty() && name != "num_predict"
                    })
                })
            }
            _ => false,
        };
        if is_fine { Ok(()) } else { Err(field.invalid_error()) }
    }

    fn check_capability(
        &mut self,
        capability: ProviderCapability,
        field: &'static str,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let member = self.member_at(at);
        // A value that requests nothing needs no grant: clients send such defaults.
        let asks_for_nothing = match member.kind {
            JsonType::Null => true,
            JsonType::Bool => *self.call.draft.member_value(at) == *b"false",
            JsonType::Array => member.entries == 0,
            _ => false,
        };
        if asks_for_nothing {
            return Ok(());
        }
        if self.policy.capabilities.contains(&capability) {
            self.parsed.granted.insert(capability);
            return Ok(());
        }
        Err(BodyPolicyError::CapabilityNotGranted { capability, field, detail: None })
    }

    /// Treats a field that stands in no table. Even if the policy passes unknown fields, a known
    /// field's name in another case does not pass: some upstreams take `Model` for `model`.
    fn apply_unknown(&mut self, at: usize, name: Option<&str>) -> Result<(), BodyPolicyError> {
        // A forbidden name in another case is refused, as the forbidden name itself would be.
        let small = name.unwrap_or_default().to_ascii_lowercase();
        if let Some(FieldRule::Refuse(why)) =
            field::find_field(self.route, &small).map(|field| field.rule)
        {
            return Err(forbidden_error(name.unwrap_or_default(), why));
        }
        let shown = name.map_or(Cow::Borrowed(OVERLONG_NAME), |name| SanitizedText(name).to_text());
        match (self.policy.unknown_fields, name) {
            (UnknownFieldPolicy::Reject, _) => {
                return Err(BodyPolicyError::UnknownField { name: shown.into() });
            }
            // The name passes only if it is known on no route, in any case.
            (UnknownFieldPolicy::Pass, Some(name)) if is_safe_unknown_name(name) => {
                if !self.member_at(at).is_plain {
                    self.normalize_key(at, name.to_owned().into());
                }
            }
            _ => {
                let field = shown.into_owned().into();
                self.drop_field(at, field, FieldChangeReason::Unknown);
            }
        }
        Ok(())
    }

    fn drop_field(&mut self, at: usize, field: Cow<'static, str>, why: FieldChangeReason) {
        self.call.draft.drop_member(at);
        self.call.changes.push(FieldChange { field, what: FieldChangeKind::Dropped, why });
    }

    /// Rewrites a key without escapes, so that every reader sees the name that the gateway read.
    /// Each letter of the name needs no escape.
    fn normalize_key(&mut self, at: usize, field: Cow<'static, str>) {
        let member = self.member_at(at);
        // The range covers the key, the colon and any blanks before the value.
        let place = member.start..member.value.start;
        self.call.draft.replace_range(place, format!("\"{field}\":").into());
        self.call.changes.push(FieldChange {
            field,
            what: FieldChangeKind::Overwritten,
            why: FieldChangeReason::EscapedName,
        });
    }

    /// Parses `true`, `false` or `null`.
    fn parse_flag(&self, field: &RequestField, at: usize) -> Result<Option<bool>, BodyPolicyError> {
        match self.call.draft.peek_value(at) {
            Some(b"true") => Ok(Some(true)),
            Some(b"false") => Ok(Some(false)),
            _ => self.parse_value(field, at),
        }
    }

    fn member_at(&self, at: usize) -> &JsonMember {
        &self.call.draft.members()[at]
    }

    fn parse_value<T>(&self, field: &RequestField, at: usize) -> Result<T, BodyPolicyError>
    where
        T: for<'a> serde::Deserialize<'a>,
    {
        field.parse_value(&self.call.draft, at)
    }
}

/// Returns the inside of a JSON string that is short, ASCII and without escapes, as model names
/// are.
fn plain_text(value: &[u8]) -> Option<&str> {
    let text = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    let is_usual = text.len() <= MAX_MODEL_BYTES && text.iter().all(is_plain);
    str::from_utf8(text).ok().filter(|_| is_usual)
}

fn forbidden_error(name: &str, why: ForbiddenReason) -> BodyPolicyError {
    BodyPolicyError::FieldNotAllowed { name: SanitizedText(name).to_text().into(), why }
}

/// Returns true if every reader reads an unknown name alike, and no route knows a field of this
/// name.
fn is_safe_unknown_name(name: &str) -> bool {
    let is_ordinary = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    name.bytes().all(is_ordinary) && !name.is_empty() && !field::is_known_elsewhere(name)
}

/// The replacement in messages for a name that is too long to store.
const OVERLONG_NAME: &str = "a name over 64 bytes";
