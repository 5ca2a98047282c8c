//! The fields of OpenAI's Responses, in the order of their names.

use super::{Field, Rule, Shape};
use crate::body::capability::Capability;

pub(super) const RESPONSES: &[Field] = &[
    Field::new("background_options", Rule::Needs(Capability::Background)),
    Field::new("context_management", Rule::Pass(Shape::Any)),
    Field::new("image", Rule::Pass(Shape::Any)),
    Field::new("include", Rule::Pass(Shape::List)),
    Field::new("input", Rule::Pass(Shape::TextOrList)),
    Field::new("instructions", Rule::Pass(Shape::TextOrList)),
    Field::new("max_output_tokens", Rule::OutputLimit),
    Field::new("max_tool_calls", Rule::Pass(Shape::Any)),
    Field::new("model", Rule::Model),
    Field::new("moderation", Rule::Pass(Shape::Any)),
    Field::new("parallel_tool_calls", Rule::Pass(Shape::Any)),
    Field::new("prompt", Rule::Needs(Capability::StoredState)),
    Field::new("prompt_cache_key", Rule::Pass(Shape::Any)),
    Field::new("prompt_cache_options", Rule::Pass(Shape::Any)),
    Field::new("prompt_cache_retention", Rule::Pass(Shape::Any)),
    Field::new("reasoning", Rule::Pass(Shape::Any)),
    Field::new("store", Rule::Store),
    Field::new("stream", Rule::Stream),
    Field::new("stream_options", Rule::Pass(Shape::Object)),
    Field::new("temperature", Rule::Pass(Shape::Any)),
    Field::new("text", Rule::Pass(Shape::Any)),
    Field::new("tool_choice", Rule::Pass(Shape::Any)),
    Field::new("tools", Rule::Pass(Shape::List)),
    Field::new("top_logprobs", Rule::Pass(Shape::Any)),
    Field::new("top_p", Rule::Pass(Shape::Any)),
    Field::new("truncation", Rule::Pass(Shape::Any)),
];
