//! Admission of a request's body: the meaning of its fields, and the changes that the gateway makes
//! in them.
//!
//! A [`BodyReader`] scans a body while the body arrives. The reader records where each top-level
//! field stands and which hosted capabilities the body's parts and tools need. [`admit_body`] then
//! applies the tables in [`field`]: a field passes, is dropped, is overwritten, or causes the
//! request to be refused. [`admit_body`] is pure and does not read the payload again.
//!
//! The upstream receives exactly what the gateway understood: strict JSON in which every key was
//! read and no key occurs twice. Each key is a known name or a permitted unknown name, spelled
//! without escapes. Only changed parts are rewritten; the rest are the very bytes that were
//! checked.
//!
//! An [`LlmCall`] can be changed until it is sent: later stages rename the call's model or limit
//! its output, and [`LlmCall::into_body`] applies all changes at once.

mod added_text;
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
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use self::apply_fields::{ParsedFields, RequestFieldReader};
use self::capability_scanner::{BodyFindings, RequiredCapability};
use self::editor::BodyEditor;
use self::embedder::embeds_text_only;
use self::model_name::ModelNameFacts;
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

/// The limits on the bodies of a run's requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BodyPolicy {
    /// The models that a request may name. An empty list allows every model.
    pub models: Vec<String>,
    /// The upstream's name of a model, by the name in the request. Other names are sent upstream
    /// unchanged.
    pub aliases: BTreeMap<String, String>,
    /// The treatment of fields that no table of this gateway contains.
    pub unknown_fields: UnknownFieldPolicy,
    /// The capabilities outside the sandbox that the operator grants to the run.
    pub capabilities: CapabilitySet,
    /// The maximum number of answers that one call may request.
    pub max_choices: u32,
}

/// The treatment of fields that no table of this gateway contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownFieldPolicy {
    /// The gateway refuses the request.
    Reject,
    /// The gateway drops and counts such fields.
    #[default]
    Drop,
    /// The gateway sends such fields upstream.
    Pass,
}

/// A call as the gateway sends it upstream, with the facts that later stages of the pipeline need.
#[derive(Debug)]
pub struct LlmCall {
    /// The model, by the name that the upstream uses. `None` if the route takes no body.
    pub model: Option<Arc<str>>,
    pub stream: bool,
    /// The treatment of the usage chunk that the gateway requests at the end of a chat stream.
    pub usage_chunk: UsageChunkMode,
    /// The maximum number of tokens in one answer. `None` if the client set no limit.
    pub requested_output: Option<Tokens>,
    /// The most tokens that each answer is billed for a predicted text, beside the output limit.
    pub predicted_output: Tokens,
    /// The number of answers that the model writes.
    pub choices: u32,
    /// The number of times that the model reads the input and writes: 2 if the provider first
    /// shortens the conversation.
    pub passes: u32,
    /// The estimated number of input tokens, from [`estimate_tokens`], the body's media, and the text that the provider
    /// adds.
    pub input_estimate: Tokens,
    /// The most that the input can be: a token for each byte, the body's media, and the text that the provider adds.
    pub input_bound: Tokens,
    /// The changes in the body, with their reasons.
    pub changes: Vec<FieldChange>,
    route: Option<GatewayRoute>,
    draft: BodyEditor,
    editable: EditableMembers,
}

/// The body's members that later stages may have to change, as indexes.
#[derive(Clone, Debug, Default)]
struct EditableMembers {
    model: Option<usize>,
    /// The fields that limit the output, with their names.
    output: [Option<(usize, &'static str)>; 2],
    thinking: Option<usize>,
    /// The fields that need a beta: index, name, and the prefixes of the betas that satisfy the
    /// field. The vector allocates only if the body has such a field.
    betas: Vec<(usize, &'static str, &'static [&'static str])>,
}

/// Checks the body of a POST and makes the required changes.
///
/// # Errors
/// Returns a [`BodyPolicyError`] if the body requests something that the run may not have. Returns
/// the same error type if a field that the gateway must understand has an unexpected value.
pub fn admit_body(policy: &BodyPolicy, body: ScannedBody) -> Result<LlmCall, BodyPolicyError> {
    let ScannedBody { route, rope, document, mut found } = body;
    let bytes = rope.len();
    let mut call = LlmCall {
        route: Some(route),
        draft: BodyEditor::new(rope, document),
        ..LlmCall::default()
    };
    // The order matters. 1. The fields are read first, because the model's name decides whether
    // embedded addresses are fetched. 2. A search tool without outside access is dropped before its
    // capability would be refused. 3. Capabilities are checked with the list complete. 4. Only then
    // the body is edited for storage and usage.
    let parsed = ParsedFields::default();
    let parsed = RequestFieldReader { route, policy, call: &mut call, parsed }.apply_fields()?;
    let asked = parsed.model.as_ref().map(|(name, _)| &**name);
    resolve_embedded_media(&mut found, policy, asked);
    resolve_relative_references(&mut found);
    if let Some(at) = found.modest_search
        && !policy.capabilities.contains(&ProviderCapability::WebSearch)
    {
        call.drop_search_without_reach(at)?;
    }
    check_capabilities(policy, &found.needs)?;
    check_cache_lifetime(&found)?;
    call.stream = parsed.stream;
    call.requested_output = parsed.output;
    call.predicted_output = parsed.predicted;
    // Each prompt of a list gets its own answers, so the two numbers multiply. Zero means "not
    // stated", and the default is 1.
    call.choices = parsed.choices.max(1).saturating_mul(parsed.prompts.max(1));
    // A compaction makes the model read and write once more before the answer.
    call.passes = if found.is_compacted { 2 } else { 1 };
    call.limit_excessive_output();
    let capability = call.select_model(policy, parsed.model)?;
    found.note_added_text(&parsed.granted, capability);
    (call.input_estimate, call.input_bound) =
        measure_input(bytes, &found, call.model.as_deref().unwrap_or_default());
    if !policy.capabilities.contains(&ProviderCapability::StoredState) {
        call.disable_provider_storage(route, parsed.store);
    }
    if call.stream && field::reports_usage_if_asked(route) {
        call.request_usage_chunk(parsed.stream_options)?;
    }
    Ok(call)
}

/// Returns the estimated tokens in a request of `bytes` bytes: one for every three bytes, rounded
/// up.
///
/// Providers state 4 characters of English to a token (OpenAI) and 3.5 (Anthropic). Code and most
/// other languages are near 3 bytes. Escapes and the JSON around the text only add bytes. The
/// result is an estimate, not a bound: random letters reach two bytes to a token. The provider's
/// report replaces the estimate when the call is settled.
pub fn estimate_tokens(bytes: u64) -> Tokens {
    Tokens(bytes.div_ceil(ESTIMATED_BYTES_PER_TOKEN))
}

/// Counts embedded addresses as fetched unless the model embeds only text. LiteLLM passes such
/// addresses on as text, so the model decides whether the provider fetches them.
fn resolve_embedded_media(found: &mut BodyFindings, policy: &BodyPolicy, asked: Option<&str>) {
    let asked = asked.unwrap_or_default();
    let upstream = policy.aliases.get(asked).map_or(asked, String::as_str);
    // An unknown model counts as one that fetches: the mistake then costs a refusal, not an unseen
    // fetch.
    if found.embedded_addresses > 0 && !embeds_text_only(asked, upstream) {
        found.count_embedded_as_fetched();
    }
}

/// Counts a relative reference of a schema as an address if a schema of the body has an address as its name, because a
/// validator resolves the reference against that address.
fn resolve_relative_references(found: &mut BodyFindings) {
    let capability = ProviderCapability::RemoteMedia;
    let is_address = found.schema_addresses.has_resolved_reference();
    if is_address && found.needs.iter().all(|need| need.capability != capability) {
        let detail = "a relative `$ref` beside an `$id` that is an address".into();
        found.needs.push(RequiredCapability { capability, field: "$ref", detail });
    }
}

/// Returns the estimated input tokens, and the most that they can be: the body's length, its media,
/// the numbers in its arrays, the text that the provider adds, and a second reading if the
/// conversation is compacted.
///
/// No tokenizer makes more tokens of a text than the text has bytes, and JSON writes no text with
/// fewer bytes. Symbols, random letters and rare scripts come near that bound. Media, and added
/// texts of a known kind, are counted in both numbers with the most that they cost.
fn measure_input(bytes: u64, found: &BodyFindings, model: &str) -> (Tokens, Tokens) {
    // A number in an array may be one whole token. Two of its bytes (a digit and a comma) are
    // already counted with the length, so one third of a token remains.
    let numbers = found.numbers.div_ceil(ESTIMATED_BYTES_PER_TOKEN);
    let media = Tokens(found.media.count_tokens(model));
    let added = Tokens(found.added.count_tokens());
    let estimate = estimate_tokens(bytes) + media + Tokens(numbers) + added;
    let bound = Tokens(bytes) + media + Tokens(found.added.max_tokens());
    if found.is_compacted { (estimate + estimate, bound + bound) } else { (estimate, bound) }
}

fn check_capabilities(
    policy: &BodyPolicy,
    needs: &[RequiredCapability],
) -> Result<(), BodyPolicyError> {
    let has = |capability| policy.capabilities.contains(&capability);
    // The first missing capability is enough: one error names one thing to grant.
    let denied = needs.iter().find(|need| !has(need.capability));
    let Some(RequiredCapability { capability, field, detail }) = denied else { return Ok(()) };
    Err(BodyPolicyError::CapabilityNotGranted {
        capability: *capability,
        field,
        detail: Some(detail.clone()),
    })
}

/// Checks the capability that a model needs by its name alone. Some models search the web for each
/// answer, and nothing in the body states the search.
fn check_model_grant(
    policy: &BodyPolicy,
    model: &str,
    capability: Option<ProviderCapability>,
) -> Result<(), BodyPolicyError> {
    match capability {
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

/// Refuses long cache lifetimes. LiteLLM lets Google store a conversation for as long as the client
/// requests; Google bills storage by the hour, and no usage report contains that cost.
fn check_cache_lifetime(found: &BodyFindings) -> Result<(), BodyPolicyError> {
    if !found.has_long_cache {
        return Ok(());
    }
    Err(BodyPolicyError::InvalidField { name: "cache_control.ttl", expected: "`5m` or `1h`" })
}

impl LlmCall {
    /// Returns the maximum number of tokens in all generated texts together. `None` if the client
    /// set no limit.
    pub fn max_output(&self) -> Option<Tokens> {
        self.requested_output
            .map(|limit| Tokens(limit.0.saturating_mul(self.generated_texts().into())))
    }

    /// Returns the most output tokens that are billed for predicted texts, beside those of the generated texts.
    pub fn unlimited_output(&self) -> Tokens {
        Tokens(self.predicted_output.0.saturating_mul(self.generated_texts().into()))
    }

    /// Returns the number of texts that the model writes, each up to the output limit: the answers
    /// in each pass.
    pub fn generated_texts(&self) -> u32 {
        self.choices.max(1).saturating_mul(self.passes.max(1))
    }

    /// Sends the call to another model, given by the upstream's name.
    pub fn rename_model(&mut self, name: &str) {
        let Some(at) = self.editable.model else { return };
        if self.model.as_deref() == Some(name) {
            return;
        }
        self.model = Some(name.into());
        self.draft.set_value(at, serde_json::Value::from(name).to_string().into());
        self.record_change("model", FieldChangeKind::Renamed, FieldChangeReason::Alias);
    }

    /// Drops each field whose required beta is not among the passing betas.
    pub fn drop_without_beta(&mut self, passing: &[String]) {
        for (at, field, betas) in std::mem::take(&mut self.editable.betas) {
            if !passing.iter().any(|beta| betas.iter().any(|start| beta.starts_with(start))) {
                self.draft.drop_member(at);
                self.record_change(field, FieldChangeKind::Dropped, FieldChangeReason::Beta);
            }
        }
    }

    /// Returns the body as the gateway sends it upstream, with all changes applied.
    pub fn into_body(self) -> ByteRope {
        self.into_spliced().into_rope()
    }

    /// Returns the body as the gateway sends it upstream. The changes are applied when the body is
    /// sent.
    pub fn into_spliced(self) -> SplicedBytes {
        self.draft.into_body()
    }

    /// Selects the model if the run may use it, and renames the model if the upstream has another
    /// name for it. Returns the capability that the selected model uses by its name alone.
    fn select_model(
        &mut self,
        policy: &BodyPolicy,
        model: Option<(Arc<str>, ModelNameFacts)>,
    ) -> Result<Option<ProviderCapability>, BodyPolicyError> {
        let Some((model, mut facts)) = model else { return Err(BodyPolicyError::NoModel) };
        if !policy.models.is_empty() && !policy.models.iter().any(|allowed| **allowed == *model) {
            let (model, allowed) = ((*model).into(), policy.models.clone());
            return Err(BodyPolicyError::ModelNotAllowed { model, allowed });
        }
        let name = policy.aliases.get(&*model);
        if let Some(name) = name {
            (_, facts) = ModelNameFacts::of_name(name);
        }
        // An operator who lists or aliases a model accepts what the model does. Only a name that
        // the client chose freely needs the capability.
        if policy.models.is_empty() && name.is_none() {
            check_model_grant(policy, &model, facts.capability)?;
        }
        self.model = Some(model);
        if let Some(name) = name {
            self.rename_model(name);
        }
        Ok(facts.capability)
    }

    /// Makes the provider discard the answer, whatever the client requested.
    fn disable_provider_storage(
        &mut self,
        route: GatewayRoute,
        store: Option<(usize, Option<bool>)>,
    ) {
        // True if the provider would store the answer: by its own default, or because the client
        // requests storage.
        let asks = match store {
            None | Some((_, None)) => field::stores_by_default(route),
            Some((_, Some(asks))) => asks,
        };
        // An explicit `false` or a provider without storage needs no change.
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

    /// Records a change, without duplicates.
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
            // Our choice: enough for clients that compare answers, without multiplying the cost of
            // a call too much.
            max_choices: 8,
        }
    }
}

/// Returns the call of a route that takes no body.
impl Default for LlmCall {
    fn default() -> Self {
        Self {
            model: None,
            stream: false,
            usage_chunk: UsageChunkMode::Show,
            requested_output: None,
            predicted_output: Tokens::ZERO,
            choices: 1,
            passes: 1,
            input_estimate: Tokens::ZERO,
            input_bound: Tokens::ZERO,
            changes: Vec::new(),
            route: None,
            draft: BodyEditor::default(),
            editable: EditableMembers::default(),
        }
    }
}

/// The number of bytes that [`estimate_tokens`] counts as one token. Our choice; the function
/// states the sources.
const ESTIMATED_BYTES_PER_TOKEN: u64 = 3;
