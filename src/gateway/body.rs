//! Admission of a request's body: what its fields mean to us, and what we change in them.
//!
//! [`admit`] is pure and does not look at the payload. The scanner has said where each top-level
//! field stands; the few that mean something here are short, and an edit replaces their bytes where
//! they are. A field that stands in no table passes untouched.

mod field;
mod usage;

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;

use self::field::{Field, Rule};
use super::json::{Document, Kind, Member};
use super::protocol::Route;
use super::rope::Rope;
use super::stream::UsageChunk;
use crate::budget::Tokens;

/// Which models a run may use, and by which names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// The models a request may name; empty allows any.
    pub models: Vec<String>,
    /// What the upstream calls a model, by the name in the request. Other names go up as they are.
    pub aliases: BTreeMap<String, String>,
}

/// A call as it goes upstream, and what the rest of the pipeline has to know of it.
#[derive(Debug)]
pub struct Call {
    pub rope: Rope,
    /// By the upstream's name; `None` where a route takes no body.
    pub model: Option<Box<str>>,
    pub stream: bool,
    /// What becomes of the usage chunk that a chat stream is made to end with.
    pub usage_chunk: UsageChunk,
    /// The most tokens that one answer may have; `None` where the client set no limit.
    pub requested_output: Option<Tokens>,
    /// How many answers the model writes for it.
    pub choices: u32,
    /// See [`estimate`].
    pub input_estimate: Tokens,
}

/// Why a body is not sent on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("`model` is missing; say which model is meant")]
    NoModel,
    #[error("`{name}` must be {expected}")]
    InvalidField { name: &'static str, expected: &'static str },
    #[error(
        "model `{}` is not allowed for this run; use one of `{}`",
        model.escape_debug(),
        allowed.join("`, `")
    )]
    ModelNotAllowed { model: Box<str>, allowed: Vec<String> },
}

/// Judges the body of a POST, and makes the changes that have to be made.
///
/// `document` is what a [`Scanner`](super::json::Scanner) said of the bytes in `rope`.
///
/// # Errors
/// A field that we have to understand is missing or is not what it has to be.
pub fn admit(
    route: Route,
    policy: &Policy,
    rope: Rope,
    document: &Document,
) -> Result<Call, Refusal> {
    let asked = Asked::read(route, document, &rope)?;
    let (model, rename) = model(policy, &asked)?;
    let report = if asked.stream && field::reports_usage_if_asked(route) {
        usage::report(asked.stream_options, asked.end, &rope)?
    } else {
        None
    };
    Ok(Call {
        input_estimate: estimate(rope.len()),
        model: Some(model),
        stream: asked.stream,
        usage_chunk: if report.is_some() { UsageChunk::Hide } else { UsageChunk::Show },
        requested_output: asked.output,
        choices: asked.choices.max(1).saturating_mul(asked.prompts.max(1)),
        rope: edit(rope, rename.into_iter().chain(report).collect()),
    })
}

/// Tokens in a request of so many bytes: one for every three, rounded up.
///
/// Providers speak of 4 characters of English to a token (OpenAI) and of 3.5 (Anthropic); code and
/// most other languages are near 3 bytes, escapes and the JSON around the text only add. Encoded
/// images count far too much. It is an estimate, not a bound: random letters reach two bytes to a
/// token. What the provider reports replaces it when the call is settled.
pub fn estimate(bytes: u64) -> Tokens {
    Tokens(bytes.div_ceil(BYTES_PER_TOKEN))
}

/// Bytes to be replaced, and by what.
type Edit = (Range<u64>, Bytes);

/// What the fields of a body say.
#[derive(Default)]
struct Asked<'a> {
    model: Option<(Box<str>, Range<u64>)>,
    stream: bool,
    stream_options: Option<&'a Member>,
    output: Option<Tokens>,
    choices: u32,
    prompts: u32,
    /// Where the last member ends, and one more could be put.
    end: u64,
}

impl<'a> Asked<'a> {
    fn read(route: Route, document: &'a Document, rope: &Rope) -> Result<Self, Refusal> {
        let mut asked = Self::default();
        for member in &document.members {
            asked.end = member.value.end;
            if let Some(field) = member.key.as_str().and_then(|key| field::find(route, key)) {
                asked.take(field, member, rope)?;
            }
        }
        Ok(asked)
    }

    fn take(&mut self, field: &Field, member: &'a Member, rope: &Rope) -> Result<(), Refusal> {
        match field.rule {
            Rule::Model => {
                let name: Box<str> = field.value(member, rope)?;
                if name.is_empty() || name.len() > MODEL_LENGTH {
                    return Err(field.invalid());
                }
                self.model = Some((name, member.value.clone()));
            }
            Rule::Stream => {
                let stream: Option<bool> = field.value(member, rope)?;
                self.stream = stream.unwrap_or_default();
            }
            Rule::StreamOptions => self.stream_options = Some(member),
            Rule::OutputLimit => {
                let limit: Option<u64> = field.value(member, rope)?;
                self.output = self.output.max(limit.map(Tokens));
            }
            Rule::Choices => {
                let choices: Option<u32> = field.value(member, rope)?;
                self.choices = self.choices.max(choices.unwrap_or_default());
            }
            Rule::Prompts => match member.kind {
                Kind::String | Kind::Array | Kind::Null => self.prompts = member.entries,
                _ => return Err(field.invalid()),
            },
        }
        Ok(())
    }
}

/// The model by its upstream name, if the run may use it, and the edit that renames it.
fn model(policy: &Policy, asked: &Asked<'_>) -> Result<(Box<str>, Option<Edit>), Refusal> {
    let Some((model, place)) = &asked.model else { return Err(Refusal::NoModel) };
    if !policy.models.is_empty() && !policy.models.iter().any(|allowed| **allowed == **model) {
        let allowed = policy.models.clone();
        return Err(Refusal::ModelNotAllowed { model: model.clone(), allowed });
    }
    let Some(name) = policy.aliases.get(&**model) else { return Ok((model.clone(), None)) };
    let text = serde_json::Value::from(name.as_str()).to_string();
    Ok((name.as_str().into(), Some((place.clone(), text.into()))))
}

fn edit(rope: Rope, mut edits: Vec<Edit>) -> Rope {
    if edits.is_empty() {
        return rope;
    }
    edits.sort_unstable_by_key(|(range, _)| range.start);
    rope.splice(edits)
}

impl Call {
    /// The most tokens that all answers together may have; `None` where the client set no limit.
    pub fn output(&self) -> Option<Tokens> {
        self.requested_output.map(|limit| Tokens(limit.0.saturating_mul(self.choices.into())))
    }
}

impl Refusal {
    /// The stable code that clients, metrics and the audit see.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoModel => "model_required",
            Self::InvalidField { .. } => "invalid_field",
            Self::ModelNotAllowed { .. } => "model_not_allowed",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoModel | Self::InvalidField { .. } => StatusCode::BAD_REQUEST,
            Self::ModelNotAllowed { .. } => StatusCode::FORBIDDEN,
        }
    }

    /// The field that is at fault; OpenAI's error shape has a place for it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::NoModel | Self::ModelNotAllowed { .. } => "model",
            Self::InvalidField { name, .. } => name,
        }
    }
}

/// For a route that takes no body.
impl Default for Call {
    fn default() -> Self {
        Self {
            rope: Rope::default(),
            model: None,
            stream: false,
            usage_chunk: UsageChunk::Show,
            requested_output: None,
            choices: 1,
            input_estimate: Tokens::ZERO,
        }
    }
}

/// See [`estimate`].
const BYTES_PER_TOKEN: u64 = 3;

/// Longest name of a model, in bytes. Ours: the longest in use, ARNs, are under 150.
const MODEL_LENGTH: usize = 256;
