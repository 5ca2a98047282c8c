//! The fields of embeddings, in the order of their names: OpenAI's, and those by which others tell a
//! query from a document.

use super::{Field, Rule, Shape};

pub(super) const EMBEDDINGS: &[Field] = &[
    Field::new("add_special_tokens", Rule::Pass(Shape::Any)),
    Field::new("auto_truncate", Rule::Pass(Shape::Any)),
    Field::new("dimensions", Rule::Pass(Shape::Any)),
    Field::new("embedding_type", Rule::Pass(Shape::Any)),
    Field::new("embedding_types", Rule::Pass(Shape::Any)),
    Field::new("encoding_format", Rule::Pass(Shape::Any)),
    Field::new("input", Rule::Pass(Shape::TextOrList)),
    Field::new("input_type", Rule::Pass(Shape::Any)),
    Field::new("late_chunking", Rule::Pass(Shape::Any)),
    Field::new("model", Rule::Model),
    Field::new("normalize", Rule::Pass(Shape::Any)),
    Field::new("normalized", Rule::Pass(Shape::Any)),
    Field::new("output_dimension", Rule::Pass(Shape::Any)),
    Field::new("output_dtype", Rule::Pass(Shape::Any)),
    Field::new("task", Rule::Pass(Shape::Any)),
    Field::new("task_type", Rule::Pass(Shape::Any)),
    Field::new("title", Rule::Pass(Shape::Any)),
    Field::new("truncate", Rule::Pass(Shape::Any)),
    Field::new("truncate_prompt_tokens", Rule::Pass(Shape::Any)),
    Field::new("truncation", Rule::Pass(Shape::Any)),
];
