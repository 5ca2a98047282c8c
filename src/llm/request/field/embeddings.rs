//! The fields of embeddings, in the order of their names: OpenAI's fields, and the fields by which
//! other providers distinguish a query from a document.

use super::{FieldRule, RequestField, ValueShape};

pub(super) const EMBEDDINGS_FIELDS: &[RequestField] = &[
    RequestField::new("add_special_tokens", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("auto_truncate", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("dimensions", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("embedding_type", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("embedding_types", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("encoding_format", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("input", FieldRule::Pass(ValueShape::TextOrList)),
    RequestField::new("input_type", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("late_chunking", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("model", FieldRule::Model),
    RequestField::new("normalize", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("normalized", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("output_dimension", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("output_dtype", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("task", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("task_type", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("title", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("truncate", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("truncate_prompt_tokens", FieldRule::Pass(ValueShape::Any)),
    RequestField::new("truncation", FieldRule::Pass(ValueShape::Any)),
];
