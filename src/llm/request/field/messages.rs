//! The fields of Anthropic's Messages and of `count_tokens`, in the order of their names.

use super::{FieldRule, RequestField, ValueShape};

pub(super) const MESSAGES_FIELDS: &[RequestField] = &[
    RequestField::new("cache_control", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("compaction", FieldRule::Beta(&["compact-"])),
    RequestField::new("context_management", FieldRule::Beta(&["context-management-", "compact-"])),
    RequestField::new("max_tokens", FieldRule::OutputLimit),
    RequestField::new("messages", FieldRule::Pass(ValueShape::List)),
    RequestField::new("model", FieldRule::Model),
    RequestField::new("output_config", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("output_format", FieldRule::Beta(&["structured-outputs-"])),
    RequestField::new("stop_sequences", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("stream", FieldRule::Stream),
    RequestField::new("system", FieldRule::Pass(ValueShape::TextOrList)),
    RequestField::new("temperature", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("thinking", FieldRule::Thinking),
    RequestField::new("tool_choice", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("tools", FieldRule::Pass(ValueShape::List)),
    RequestField::new("top_k", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("top_p", FieldRule::Pass(ValueShape::Any)),
];

/// The fields of `count_tokens`. The model generates nothing there, so fields about the output are
/// absent. Addresses in the body are checked nevertheless, because the provider fetches them to
/// count their tokens.
pub(super) const COUNT_TOKENS_FIELDS: &[RequestField] = &[
    RequestField::new("cache_control", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("compaction", FieldRule::Beta(&["compact-"])),
    RequestField::new("context_management", FieldRule::Beta(&["context-management-", "compact-"])),
    RequestField::new("messages", FieldRule::Pass(ValueShape::List)),
    RequestField::new("model", FieldRule::Model),
    RequestField::new("output_config", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("output_format", FieldRule::Beta(&["structured-outputs-"])),
    RequestField::new("system", FieldRule::Pass(ValueShape::TextOrList)),
    RequestField::new("thinking", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("tool_choice", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("tools", FieldRule::Pass(ValueShape::List)),
];
