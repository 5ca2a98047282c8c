//! The fields of OpenAI's Responses, in the order of their names.

use super::{FieldRule, RequestField, ValueShape};
use crate::llm::request::capability::ProviderCapability;

pub(super) const RESPONSES_FIELDS: &[RequestField] = &[
    RequestField::new("background_options", FieldRule::Needs(ProviderCapability::Background)),
    RequestField::new("context_management", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("image", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("include", FieldRule::Pass(ValueShape::List)),
    RequestField::new("input", FieldRule::Pass(ValueShape::TextOrList)),
    RequestField::new("instructions", FieldRule::Pass(ValueShape::TextOrList)),
    RequestField::new("max_output_tokens", FieldRule::OutputLimit),
    RequestField::new("max_tool_calls", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("model", FieldRule::Model),
    RequestField::new("moderation", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("parallel_tool_calls", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("prompt", FieldRule::Needs(ProviderCapability::StoredState)),
    RequestField::new("prompt_cache_key", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("prompt_cache_options", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("prompt_cache_retention", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("reasoning", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("store", FieldRule::Store),
    RequestField::new("stream", FieldRule::Stream),
    RequestField::new("stream_options", FieldRule::Pass(ValueShape::Object)),
    RequestField::new("temperature", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("text", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("tool_choice", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("tools", FieldRule::Pass(ValueShape::List)),
    RequestField::new("top_logprobs", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("top_p", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("truncation", FieldRule::Pass(ValueShape::Any)),
];
