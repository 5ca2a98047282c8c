//! Goes through the fields of a body, and does with each what its rule says.

use std::borrow::Cow;

use super::capability::Capability;
use super::change::{Change, What, Why};
use super::field::{self, Field, Forbidden, Rule};
use super::model_name::{MAX_MODEL_BYTES, is_model_name};
use super::{Call, Policy, Refusal, UnknownFields};
use crate::base::json::{Kind, Member};
use crate::budget::Tokens;
use crate::observe::printable::Printable;
use crate::protocol::Route;

/// What the fields of a body say.
#[derive(Default)]
pub(super) struct Asked {
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
pub(super) struct Reading<'a> {
    pub(super) route: Route,
    pub(super) policy: &'a Policy,
    pub(super) call: &'a mut Call,
    pub(super) asked: Asked,
}

impl Reading<'_> {
    pub(super) fn read(mut self) -> Result<Asked, Refusal> {
        for at in 0..self.call.draft.members().len() {
            let member = self.member(at);
            let (key, is_plain) = (member.key, member.is_plain);
            let name = key.as_str();
            match (name.and_then(|name| field::find(self.route, name)), name) {
                (Some(field), name) => {
                    self.take(&field, name.unwrap_or(field.name), at)?;
                    if !is_plain && !matches!(field.rule, Rule::Drop(_)) {
                        self.spell(at, field.name.into());
                    }
                }
                (None, name) => self.take_unknown(at, name, is_plain)?,
            }
        }
        Ok(self.asked)
    }

    fn take(&mut self, field: &Field, name: &str, at: usize) -> Result<(), Refusal> {
        let kind = self.member(at).kind;
        match field.rule {
            Rule::Refuse(why) => return Err(not_allowed(name, why)),
            Rule::Drop(why) => self.drop_field(at, field.name.into(), why),
            Rule::Needs(capability) => self.check_grant(capability, field.name, at)?,
            Rule::Pass(shape) if !shape.has(kind) => return Err(field.invalid()),
            Rule::Pass(_) => (),
            Rule::Beta(_) if kind == Kind::Null => (),
            Rule::Beta(betas) => self.call.places.betas.push((at, field.name, betas)),
            Rule::Model => self.take_model(field, at)?,
            Rule::Stream => {
                let stream = self.flag(field, at)?;
                self.asked.stream = stream.unwrap_or_default();
            }
            Rule::StreamOptions => self.asked.stream_options = Some(at),
            Rule::Store => self.asked.store = Some((at, self.flag(field, at)?)),
            Rule::OutputLimit => self.take_output_limit(field, at)?,
            Rule::Thinking => match kind {
                Kind::Object | Kind::Null => self.call.places.thinking = Some(at),
                _ => return Err(field.invalid()),
            },
            Rule::Options => self.check_options(field, at)?,
            Rule::Nested => self.take_nested(field, at)?,
            Rule::Choices => self.take_choices(field, at)?,
            Rule::Prompts => match kind {
                Kind::String | Kind::Array | Kind::Null => {
                    self.asked.prompts = self.member(at).entries;
                }
                _ => return Err(field.invalid()),
            },
        }
        Ok(())
    }

    fn take_model(&mut self, field: &Field, at: usize) -> Result<(), Refusal> {
        let name: Box<str> = match self.call.draft.peek(at).and_then(plain_text) {
            Some(name) => name.into(),
            None => self.value(field, at)?,
        };
        if !is_model_name(&name) {
            return Err(field.invalid());
        }
        self.asked.model = Some(name);
        self.call.places.model = Some(at);
        Ok(())
    }

    fn take_output_limit(&mut self, field: &Field, at: usize) -> Result<(), Refusal> {
        let limit: Option<u64> = self.value(field, at)?;
        if limit == Some(0) {
            return Err(field.invalid());
        }
        self.asked.output = self.asked.output.max(limit.map(Tokens));
        if let Some(free) = self.call.places.output.iter_mut().find(|place| place.is_none()) {
            *free = Some((at, field.name));
        }
        Ok(())
    }

    fn take_choices(&mut self, field: &Field, at: usize) -> Result<(), Refusal> {
        let choices: Option<u32> = self.value(field, at)?;
        let (choices, limit) = (choices.unwrap_or_default(), self.policy.max_choices);
        if choices > limit {
            return Err(Refusal::TooManyChoices { name: field.name, limit });
        }
        self.asked.choices = self.asked.choices.max(choices);
        Ok(())
    }

    /// A limit in there goes over ours.
    fn check_options(&self, field: &Field, at: usize) -> Result<(), Refusal> {
        let member = self.member(at);
        let is_fine = match member.kind {
            Kind::Null => true,
            Kind::Object => self.call.draft.inside(&member.value).is_some_and(|options| {
                options.members.iter().all(|option| {
                    let name = option.key.as_str().unwrap_or_default().to_ascii_lowercase();
                    !name.is_empty() && name != "num_predict"
                })
            }),
            _ => false,
        };
        if is_fine { Ok(()) } else { Err(field.invalid()) }
    }

    fn check_grant(
        &self,
        capability: Capability,
        field: &'static str,
        at: usize,
    ) -> Result<(), Refusal> {
        let member = self.member(at);
        let asks_for_nothing = match member.kind {
            Kind::Null => true,
            Kind::Bool => *self.call.draft.value(at) == *b"false",
            Kind::Array => member.entries == 0,
            _ => false,
        };
        if asks_for_nothing || self.policy.capabilities.contains(&capability) {
            return Ok(());
        }
        Err(Refusal::CapabilityNotGranted { capability, field, detail: None })
    }

    /// A field that stands in no table. Even where such fields pass, one does not that is another's in
    /// disguise: upstreams exist that take `Model` for `model`.
    fn take_unknown(
        &mut self,
        at: usize,
        name: Option<&str>,
        is_plain: bool,
    ) -> Result<(), Refusal> {
        let small = name.unwrap_or_default().to_ascii_lowercase();
        if let Some(Rule::Refuse(why)) = field::find(self.route, &small).map(|field| field.rule) {
            return Err(not_allowed(name.unwrap_or_default(), why));
        }
        let shown = name.map_or(Cow::Borrowed(LONG_NAME), |name| Printable(name).text());
        match (self.policy.unknown_fields, name) {
            (UnknownFields::Reject, _) => {
                return Err(Refusal::UnknownField { name: shown.into() });
            }
            (UnknownFields::Pass, Some(name)) if may_pass(name) => {
                if !is_plain {
                    self.spell(at, name.to_owned().into());
                }
            }
            _ => {
                let field = shown.into_owned().into();
                self.drop_field(at, field, Why::Unknown);
            }
        }
        Ok(())
    }

    fn drop_field(&mut self, at: usize, field: Cow<'static, str>, why: Why) {
        self.call.draft.drop_member(at);
        self.call.changes.push(Change { field, what: What::Dropped, why });
    }

    /// Writes a key without escapes, so that no reader can see another name than we do. It is made of
    /// letters that need none.
    fn spell(&mut self, at: usize, field: Cow<'static, str>) {
        let member = self.member(at);
        let place = member.start..member.value.start;
        self.call.draft.replace(place, format!("\"{field}\":").into());
        self.call.changes.push(Change { field, what: What::Overwritten, why: Why::Spelling });
    }

    /// `true`, `false` or `null`.
    fn flag(&self, field: &Field, at: usize) -> Result<Option<bool>, Refusal> {
        match self.call.draft.peek(at) {
            Some(b"true") => Ok(Some(true)),
            Some(b"false") => Ok(Some(false)),
            _ => self.value(field, at),
        }
    }

    fn member(&self, at: usize) -> &Member {
        &self.call.draft.members()[at]
    }

    fn value<T>(&self, field: &Field, at: usize) -> Result<T, Refusal>
    where
        T: for<'a> serde::Deserialize<'a>,
    {
        field.value(&self.call.draft, at)
    }
}

/// The inside of a JSON string that is short and needs no unescaping, as names are.
fn plain_text(value: &[u8]) -> Option<&str> {
    let text = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    let is_usual = text.len() <= MAX_MODEL_BYTES && text.iter().all(is_plain);
    str::from_utf8(text).ok().filter(|_| is_usual)
}

fn not_allowed(name: &str, why: Forbidden) -> Refusal {
    Refusal::FieldNotAllowed { name: Printable(name).text().into(), why }
}

/// Whether an unknown name is one that every reader reads alike, and nobody else's.
fn may_pass(name: &str) -> bool {
    let is_ordinary = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    name.bytes().all(is_ordinary) && !name.is_empty() && !field::is_taken(name)
}

/// What a name is called that is too long to be kept.
const LONG_NAME: &str = "a name over 64 bytes";
