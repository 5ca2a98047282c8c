//! The fields of the older completions, in the order of their names.

use super::{FieldRule, RequestField, ValueShape};

pub(super) const COMPLETIONS_FIELDS: &[RequestField] = &[
    RequestField::new("best_of", FieldRule::Choices),
    RequestField::new("echo", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("frequency_penalty", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("logit_bias", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("logprobs", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("max_tokens", FieldRule::OutputLimit),
    RequestField::new("min_p", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("model", FieldRule::Model),
    RequestField::new("n", FieldRule::Choices),
    RequestField::new("options", FieldRule::Options),
    RequestField::new("presence_penalty", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("prompt", FieldRule::Prompts),
    RequestField::new("repetition_penalty", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("seed", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("stop", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("stream", FieldRule::Stream),
    RequestField::new("stream_options", FieldRule::StreamOptions),
    RequestField::new("suffix", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("temperature", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("top_k", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("top_p", FieldRule::Pass(ValueShape::Any)),
];
