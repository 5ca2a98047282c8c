//! Admission of a request's body: what its fields mean to us, and what we change in them.
//!
//! A [`BodyReader`] scans a body as it arrives, and notes where each top-level field stands and which hosted
//! capabilities its parts and tools need. [`admit_body`] then goes by the tables in [`field`]: a field passes,
//! is dropped, is overwritten, or has the request refused; it is pure and does not look at the payload.
//! What goes up is what was understood: strict JSON whose keys were all read, none of them twice, with
//! the names that we know or let pass, spelled without escapes. Of that, only what changes is written
//! anew; the rest are the very bytes that were checked.
//!
//! A [`LlmCall`] can still be changed until it is sent: later stages rename its model or limit its output,
//! and [`LlmCall::into_body`] makes all changes at once.

mod apply_fields;
mod capability;
mod capability_scanner;
mod change;
mod editor;
mod embedder;
mod error;
pub mod field;
mod hosted;
mod media;
mod model_name;
mod nested;
mod output_limit;
mod reader;
mod stream_usage;

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use self::apply_fields::{ParsedFields, RequestFieldReader};
use self::capability_scanner::{BodyFindings, RequiredCapability};
use self::editor::BodyEditor;
use self::embedder::embeds_text_only;
use crate::base::rope::{ByteRope, SplicedBytes};
use crate::base::sanitize::SanitizedText;
use crate::llm::budget::Tokens;
use crate::llm::protocol::GatewayRoute;
use crate::llm::response::UsageChunkMode;

pub use self::capability::{CapabilitySet, ProviderCapability};
pub use self::change::{FieldChange, FieldChangeKind, FieldChangeReason};
pub use self::error::BodyPolicyError;
pub use self::model_name::{MODEL_NAME_RULE, capability_of_model, is_model_name};
pub use self::reader::{BodyReader, ScannedBody};

/// What a run's bodies may ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BodyPolicy {
    /// The models a request may name; empty allows any.
    pub models: Vec<String>,
    /// What the upstream calls a model, by the name in the request. Other names go up as they are.
    pub aliases: BTreeMap<String, String>,
    /// What becomes of fields that are not known here.
    pub unknown_fields: UnknownFieldPolicy,
    /// What the run may have done outside the sandbox.
    pub capabilities: CapabilitySet,
    /// The most answers that one call may ask for.
    pub max_choices: u32,
}

/// What becomes of fields that are not known here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownFieldPolicy {
    /// The request is refused.
    Reject,
    /// They are left out, and counted.
    #[default]
    Drop,
    /// They go up.
    Pass,
}

/// A call as it goes upstream, and what the rest of the pipeline has to know of it.
#[derive(Debug)]
pub struct LlmCall {
    /// By the upstream's name; `None` where a route takes no body.
    pub model: Option<Box<str>>,
    pub stream: bool,
    /// What becomes of the usage chunk that a chat stream is made to end with.
    pub usage_chunk: UsageChunkMode,
    /// The most tokens that one answer may have; `None` where the client set no limit.
    pub requested_output: Option<Tokens>,
    /// How many answers the model writes for it.
    pub choices: u32,
    /// How often the model reads and writes for it: twice where it shortens the conversation first.
    pub passes: u32,
    /// See [`estimate_tokens`].
    pub input_estimate: Tokens,
    /// What is changed in the body, and why.
    pub changes: Vec<FieldChange>,
    route: Option<GatewayRoute>,
    draft: BodyEditor,
    places: EditableMembers,
}

/// Which members of the body later stages may have to change.
#[derive(Clone, Debug, Default)]
struct EditableMembers {
    model: Option<usize>,
    /// With their names.
    output: [Option<(usize, &'static str)>; 2],
    thinking: Option<usize>,
    /// With their names, and how a beta begins that they need. Nothing is allocated where there is none.
    betas: Vec<(usize, &'static str, &'static [&'static str])>,
}

/// Judges the body of a POST, and makes the changes that have to be made.
///
/// # Errors
/// The body asks for what the run may not have, or says what we have to understand in a way that we do not.
pub fn admit_body(policy: &BodyPolicy, body: ScannedBody) -> Result<LlmCall, BodyPolicyError> {
    let ScannedBody { route, rope, document, found } = body;
    let bytes = rope.len();
    let mut call = LlmCall {
        route: Some(route),
        draft: BodyEditor::new(rope, document),
        ..LlmCall::default()
    };
    let asked = ParsedFields::default();
    let asked = RequestFieldReader { route, policy, call: &mut call, asked }.apply_fields()?;
    let found = resolve_embedded_media(found, policy, asked.model.as_deref());
    if let Some(at) = found.modest_search
        && !policy.capabilities.contains(&ProviderCapability::WebSearch)
    {
        call.drop_search_without_reach(at)?;
    }
    check_capabilities(policy, &found.needs)?;
    check_cache_lifetime(&found)?;
    call.stream = asked.stream;
    call.requested_output = asked.output;
    call.choices = asked.choices.max(1).saturating_mul(asked.prompts.max(1));
    call.passes = if found.is_compacted { 2 } else { 1 };
    call.select_model(policy, asked.model)?;
    call.input_estimate = estimate_input(bytes, &found, call.model.as_deref().unwrap_or_default());
    if !policy.capabilities.contains(&ProviderCapability::StoredState) {
        call.disable_provider_storage(route, asked.store);
    }
    if call.stream && field::reports_usage_if_asked(route) {
        call.request_usage_chunk(asked.stream_options)?;
    }
    Ok(call)
}

/// Tokens in a request of so many bytes: one for every three, rounded up.
///
/// Providers speak of 4 characters of English to a token (OpenAI) and of 3.5 (Anthropic); code and
/// most other languages are near 3 bytes, escapes and the JSON around the text only add. It is an estimate, not a bound: random letters reach two bytes to a
/// token. What the provider reports replaces it when the call is settled.
pub fn estimate_tokens(bytes: u64) -> Tokens {
    Tokens(bytes.div_ceil(ESTIMATED_BYTES_PER_TOKEN))
}

/// Whether addresses that are to be embedded are fetched depends on the model: LiteLLM hands them on as text.
fn resolve_embedded_media(
    mut found: BodyFindings,
    policy: &BodyPolicy,
    asked: Option<&str>,
) -> BodyFindings {
    let asked = asked.unwrap_or_default();
    let upstream = policy.aliases.get(asked).map_or(asked, String::as_str);
    if found.embedded_addresses > 0 && !embeds_text_only(asked, upstream) {
        found.count_embedded_as_fetched();
    }
    found
}

/// What a request is taken for, with its media, the numbers of tokens in it, and a second reading.
fn estimate_input(bytes: u64, found: &BodyFindings, model: &str) -> Tokens {
    // Two bytes of it are counted with the length.
    let numbers = found.numbers.div_ceil(ESTIMATED_BYTES_PER_TOKEN);
    let once = estimate_tokens(bytes) + Tokens(found.media.count_tokens(model)) + Tokens(numbers);
    if found.is_compacted { once + once } else { once }
}

fn check_capabilities(
    policy: &BodyPolicy,
    needs: &[RequiredCapability],
) -> Result<(), BodyPolicyError> {
    let has = |capability| policy.capabilities.contains(&capability);
    let denied = needs.iter().find(|need| !has(need.capability));
    let Some(RequiredCapability { capability, field, detail }) = denied else { return Ok(()) };
    Err(BodyPolicyError::CapabilityNotGranted {
        capability: *capability,
        field,
        detail: Some(detail.clone()),
    })
}

/// Some models search the web for each answer, and nothing in the body says so.
fn check_model_grant(policy: &BodyPolicy, model: &str) -> Result<(), BodyPolicyError> {
    match capability_of_model(model) {
        Some(capability) if !policy.capabilities.contains(&capability) => {
            let detail = SanitizedText(model).to_text().into();
            Err(BodyPolicyError::CapabilityNotGranted {
                capability,
                field: "model",
                detail: Some(detail),
            })
        }
        _ => Ok(()),
    }
}

/// LiteLLM has Google keep a conversation for as long as it is told, billed by the hour and by nobody's report.
fn check_cache_lifetime(found: &BodyFindings) -> Result<(), BodyPolicyError> {
    if !found.has_long_cache {
        return Ok(());
    }
    Err(BodyPolicyError::InvalidField { name: "cache_control.ttl", expected: "`5m` or `1h`" })
}

impl LlmCall {
    /// The most tokens that all texts together may have; `None` where the client set no limit.
    pub fn max_output(&self) -> Option<Tokens> {
        self.requested_output
            .map(|limit| Tokens(limit.0.saturating_mul(self.generated_texts().into())))
    }

    /// How many texts the model writes, each as long as the limit: the answers, in each of its passes.
    pub fn generated_texts(&self) -> u32 {
        self.choices.max(1).saturating_mul(self.passes.max(1))
    }

    /// Sends the call to another model, by the upstream's name.
    pub fn rename_model(&mut self, name: &str) {
        let Some(at) = self.places.model else { return };
        if self.model.as_deref() == Some(name) {
            return;
        }
        self.model = Some(name.into());
        self.draft.set_value(at, serde_json::Value::from(name).to_string().into());
        self.record_change("model", FieldChangeKind::Renamed, FieldChangeReason::Alias);
    }

    /// Takes the fields out whose beta is none of those that pass.
    pub fn drop_without_beta(&mut self, passing: &[String]) {
        for (at, field, betas) in std::mem::take(&mut self.places.betas) {
            if !passing.iter().any(|beta| betas.iter().any(|start| beta.starts_with(start))) {
                self.draft.drop_member(at);
                self.record_change(field, FieldChangeKind::Dropped, FieldChangeReason::Beta);
            }
        }
    }

    /// The body as it goes upstream, with all changes made.
    pub fn into_body(self) -> ByteRope {
        self.into_spliced().into_rope()
    }

    /// The body as it goes upstream, and the changes, which are made when it is sent.
    pub fn into_spliced(self) -> SplicedBytes {
        self.draft.into_body()
    }

    /// Takes the model, if the run may use it, and renames it where the upstream calls it otherwise.
    fn select_model(
        &mut self,
        policy: &BodyPolicy,
        model: Option<Box<str>>,
    ) -> Result<(), BodyPolicyError> {
        let Some(model) = model else { return Err(BodyPolicyError::NoModel) };
        if !policy.models.is_empty() && !policy.models.iter().any(|allowed| **allowed == *model) {
            return Err(BodyPolicyError::ModelNotAllowed { model, allowed: policy.models.clone() });
        }
        let name = policy.aliases.get(&*model);
        // A model that an operator has named is what that operator wants.
        if policy.models.is_empty() && name.is_none() {
            check_model_grant(policy, &model)?;
        }
        self.model = Some(model);
        if let Some(name) = name {
            self.rename_model(name);
        }
        Ok(())
    }

    /// Has the provider forget the answer, whatever the client said about it.
    fn disable_provider_storage(
        &mut self,
        route: GatewayRoute,
        store: Option<(usize, Option<bool>)>,
    ) {
        let asks = match store {
            None | Some((_, None)) => field::stores_by_default(route),
            Some((_, Some(asks))) => asks,
        };
        match store {
            _ if !asks => (),
            Some((at, _)) => {
                self.draft.set_value(at, Bytes::from_static(b"false"));
                self.record_change(
                    "store",
                    FieldChangeKind::Overwritten,
                    FieldChangeReason::Storage,
                );
            }
            None => {
                self.draft.add_member("store", Bytes::from_static(br#","store":false"#));
                self.record_change("store", FieldChangeKind::Forced, FieldChangeReason::Storage);
            }
        }
    }

    /// Writes down a change, once.
    fn record_change(
        &mut self,
        field: &'static str,
        what: FieldChangeKind,
        why: FieldChangeReason,
    ) {
        let change = FieldChange { field: field.into(), what, why };
        if !self.changes.contains(&change) {
            self.changes.push(change);
        }
    }
}

impl Default for BodyPolicy {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            aliases: BTreeMap::new(),
            unknown_fields: UnknownFieldPolicy::default(),
            capabilities: CapabilitySet::new(),
            // Ours: enough for those who compare answers, and no multiplier for those who burn budgets.
            max_choices: 8,
        }
    }
}

/// For a route that takes no body.
impl Default for LlmCall {
    fn default() -> Self {
        Self {
            model: None,
            stream: false,
            usage_chunk: UsageChunkMode::Show,
            requested_output: None,
            choices: 1,
            passes: 1,
            input_estimate: Tokens::ZERO,
            changes: Vec::new(),
            route: None,
            draft: BodyEditor::default(),
            places: EditableMembers::default(),
        }
    }
}

/// See [`estimate_tokens`].
const ESTIMATED_BYTES_PER_TOKEN: u64 = 3;
