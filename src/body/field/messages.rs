//! The fields of Anthropic's Messages and of counting their tokens, in the order of their names.

use super::{Field, Rule, Shape};

pub(super) const MESSAGES: &[Field] = &[
    Field::new("cache_control", Rule::Pass(Shape::Any)),
    Field::new("compaction", Rule::Beta(&["compact-"])),
    Field::new("context_management", Rule::Beta(&["context-management-", "compact-"])),
    Field::new("max_tokens", Rule::OutputLimit),
    Field::new("messages", Rule::Pass(Shape::List)),
    Field::new("model", Rule::Model),
    Field::new("output_config", Rule::Pass(Shape::Any)),
    Field::new("output_format", Rule::Beta(&["structured-outputs-"])),
    Field::new("stop_sequences", Rule::Pass(Shape::Any)),
    Field::new("stream", Rule::Stream),
    Field::new("system", Rule::Pass(Shape::TextOrList)),
    Field::new("temperature", Rule::Pass(Shape::Any)),
    Field::new("thinking", Rule::Thinking),
    Field::new("tool_choice", Rule::Pass(Shape::Any)),
    Field::new("tools", Rule::Pass(Shape::List)),
    Field::new("top_k", Rule::Pass(Shape::Any)),
    Field::new("top_p", Rule::Pass(Shape::Any)),
];

/// Nothing is generated, so nothing of that is asked; but what it names is fetched to be counted.
pub(super) const COUNT_TOKENS: &[Field] = &[
    Field::new("cache_control", Rule::Pass(Shape::Any)),
    Field::new("compaction", Rule::Beta(&["compact-"])),
    Field::new("context_management", Rule::Beta(&["context-management-", "compact-"])),
    Field::new("messages", Rule::Pass(Shape::List)),
    Field::new("model", Rule::Model),
    Field::new("output_config", Rule::Pass(Shape::Any)),
    Field::new("output_format", Rule::Beta(&["structured-outputs-"])),
    Field::new("system", Rule::Pass(Shape::TextOrList)),
    Field::new("thinking", Rule::Pass(Shape::Any)),
    Field::new("tool_choice", Rule::Pass(Shape::Any)),
    Field::new("tools", Rule::Pass(Shape::List)),
];
