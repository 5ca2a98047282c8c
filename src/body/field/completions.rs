//! The fields of the older completions, in the order of their names.

use super::{Field, Rule, Shape};

pub(super) const COMPLETIONS: &[Field] = &[
    Field::new("best_of", Rule::Choices),
    Field::new("echo", Rule::Pass(Shape::Any)),
    Field::new("frequency_penalty", Rule::Pass(Shape::Any)),
    Field::new("logit_bias", Rule::Pass(Shape::Any)),
    Field::new("logprobs", Rule::Pass(Shape::Any)),
    Field::new("max_tokens", Rule::OutputLimit),
    Field::new("min_p", Rule::Pass(Shape::Any)),
    Field::new("model", Rule::Model),
    Field::new("n", Rule::Choices),
    Field::new("options", Rule::Options),
    Field::new("presence_penalty", Rule::Pass(Shape::Any)),
    Field::new("prompt", Rule::Prompts),
    Field::new("repetition_penalty", Rule::Pass(Shape::Any)),
    Field::new("seed", Rule::Pass(Shape::Any)),
    Field::new("stop", Rule::Pass(Shape::Any)),
    Field::new("stream", Rule::Stream),
    Field::new("stream_options", Rule::StreamOptions),
    Field::new("suffix", Rule::Pass(Shape::Any)),
    Field::new("temperature", Rule::Pass(Shape::Any)),
    Field::new("top_k", Rule::Pass(Shape::Any)),
    Field::new("top_p", Rule::Pass(Shape::Any)),
];
