//! Goes through the fields of a body, and does with each what its rule says.

use std::borrow::Cow;

use super::capability::ProviderCapability;
use super::change::{FieldChange, FieldChangeKind, FieldChangeReason};
use super::field::{self, FieldRule, ForbiddenReason, RequestField};
use super::model_name::{MAX_MODEL_BYTES, is_model_name};
use super::{BodyPolicy, BodyPolicyError, LlmCall, UnknownFieldPolicy};
use crate::base::json::{JsonMember, JsonType};
use crate::base::sanitize::SanitizedText;
use crate::llm::budget::Tokens;
use crate::llm::protocol::GatewayRoute;

/// What the fields of a body say.
#[derive(Default)]
pub(super) struct ParsedFields {
    pub(super) model: Option<Box<str>>,
    pub(super) stream: bool,
    /// Which member it is.
    pub(super) stream_options: Option<usize>,
    /// Which member it is, and what it says.
    pub(super) store: Option<(usize, Option<bool>)>,
    pub(super) output: Option<Tokens>,
    pub(super) choices: u32,
    pub(super) prompts: u32,
}

/// A call whose fields are being read.
pub(super) struct RequestFieldReader<'a> {
    pub(super) route: GatewayRoute,
    pub(super) policy: &'a BodyPolicy,
    pub(super) call: &'a mut LlmCall,
    pub(super) asked: ParsedFields,
}

impl RequestFieldReader<'_> {
    pub(super) fn apply_fields(mut self) -> Result<ParsedFields, BodyPolicyError> {
        for at in 0..self.call.draft.members().len() {
            let member = self.member_at(at);
            let (key, is_plain) = (member.key, member.is_plain);
            let name = key.as_str();
            match (name.and_then(|name| field::find_field(self.route, name)), name) {
                (Some(field), name) => {
                    self.apply_field(&field, name.unwrap_or(field.name), at)?;
                    if !is_plain && !matches!(field.rule, FieldRule::Drop(_)) {
                        self.normalize_key(at, field.name.into());
                    }
                }
                (None, name) => self.apply_unknown(at, name, is_plain)?,
            }
        }
        Ok(self.asked)
    }

    fn apply_field(
        &mut self,
        field: &RequestField,
        name: &str,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let kind = self.member_at(at).kind;
        match field.rule {
            FieldRule::Refuse(why) => return Err(forbidden_error(name, why)),
            FieldRule::Drop(why) => self.drop_field(at, field.name.into(), why),
            FieldRule::Needs(capability) => self.check_capability(capability, field.name, at)?,
            FieldRule::Pass(shape) if !shape.accepts_type(kind) => {
                return Err(field.invalid_error());
            }
            FieldRule::Pass(_) => (),
            FieldRule::Beta(_) if kind == JsonType::Null => (),
            FieldRule::Beta(betas) => self.call.places.betas.push((at, field.name, betas)),
            FieldRule::Model => self.apply_model(field, at)?,
            FieldRule::Stream => {
                let stream = self.parse_flag(field, at)?;
                self.asked.stream = stream.unwrap_or_default();
            }
            FieldRule::StreamOptions => self.asked.stream_options = Some(at),
            FieldRule::Store => self.asked.store = Some((at, self.parse_flag(field, at)?)),
            FieldRule::OutputLimit => self.apply_output_limit(field, at)?,
            FieldRule::Thinking => match kind {
                JsonType::Object | JsonType::Null => self.call.places.thinking = Some(at),
                _ => return Err(field.invalid_error()),
            },
            FieldRule::Options => self.check_options(field, at)?,
            FieldRule::Nested => self.take_nested(field, at)?,
            FieldRule::Choices => self.apply_choices(field, at)?,
            FieldRule::Prompts => match kind {
                JsonType::String | JsonType::Array | JsonType::Null => {
                    self.asked.prompts = self.member_at(at).entries;
                }
                _ => return Err(field.invalid_error()),
            },
        }
        Ok(())
    }

    fn apply_model(&mut self, field: &RequestField, at: usize) -> Result<(), BodyPolicyError> {
        let name: Box<str> = match self.call.draft.peek_value(at).and_then(plain_text) {
            Some(name) => name.into(),
            None => self.parse_value(field, at)?,
        };
        if !is_model_name(&name) {
            return Err(field.invalid_error());
        }
        self.asked.model = Some(name);
        self.call.places.model = Some(at);
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
        self.asked.output = self.asked.output.max(limit.map(Tokens));
        if let Some(free) = self.call.places.output.iter_mut().find(|place| place.is_none()) {
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
        self.asked.choices = self.asked.choices.max(choices);
        Ok(())
    }

    /// A limit in there goes over ours.
    fn check_options(&self, field: &RequestField, at: usize) -> Result<(), BodyPolicyError> {
        let member = self.member_at(at);
        let is_fine = match member.kind {
            JsonType::Null => true,
            JsonType::Object => {
                self.call.draft.parse_object(&member.value).is_some_and(|options| {
                    options.members.iter().all(|option| {
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
        &self,
        capability: ProviderCapability,
        field: &'static str,
        at: usize,
    ) -> Result<(), BodyPolicyError> {
        let member = self.member_at(at);
        let asks_for_nothing = match member.kind {
            JsonType::Null => true,
            JsonType::Bool => *self.call.draft.member_value(at) == *b"false",
            JsonType::Array => member.entries == 0,
            _ => false,
        };
        if asks_for_nothing || self.policy.capabilities.contains(&capability) {
            return Ok(());
        }
        Err(BodyPolicyError::CapabilityNotGranted { capability, field, detail: None })
    }

    /// A field that stands in no table. Even where such fields pass, one does not that is another's in
    /// disguise: upstreams exist that take `Model` for `model`.
    fn apply_unknown(
        &mut self,
        at: usize,
        name: Option<&str>,
        is_plain: bool,
    ) -> Result<(), BodyPolicyError> {
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
            (UnknownFieldPolicy::Pass, Some(name)) if is_safe_unknown_name(name) => {
                if !is_plain {
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

    /// Writes a key without escapes, so that no reader can see another name than we do. It is made of
    /// letters that need none.
    fn normalize_key(&mut self, at: usize, field: Cow<'static, str>) {
        let member = self.member_at(at);
        let place = member.start..member.value.start;
        self.call.draft.replace_range(place, format!("\"{field}\":").into());
        self.call.changes.push(FieldChange {
            field,
            what: FieldChangeKind::Overwritten,
            why: FieldChangeReason::Spelling,
        });
    }

    /// `true`, `false` or `null`.
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

/// The inside of a JSON string that is short and needs no unescaping, as names are.
fn plain_text(value: &[u8]) -> Option<&str> {
    let text = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    let is_usual = text.len() <= MAX_MODEL_BYTES && text.iter().all(is_plain);
    str::from_utf8(text).ok().filter(|_| is_usual)
}

fn forbidden_error(name: &str, why: ForbiddenReason) -> BodyPolicyError {
    BodyPolicyError::FieldNotAllowed { name: SanitizedText(name).to_text().into(), why }
}

/// Whether an unknown name is one that every reader reads alike, and nobody else's.
fn is_safe_unknown_name(name: &str) -> bool {
    let is_ordinary = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    name.bytes().all(is_ordinary) && !name.is_empty() && !field::is_known_elsewhere(name)
}

/// What a name is called that is too long to be kept.
const OVERLONG_NAME: &str = "a name over 64 bytes";
