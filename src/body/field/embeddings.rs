//! The fields of embeddings, in the order of their names: OpenAI's, and those by which others tell a
//! query from a document.

use super::{Field, Rule, Shape};

pub(super) const EMBEDDINGS: &[Field] = &[
    Field::new("dimensions", Rule::Pass(Shape::Any)),
    Field::new("encoding_format", Rule::Pass(Shape::Any)),
    Field::new("input", Rule::Pass(Shape::TextOrList)),
    Field::new("input_type", Rule::Pass(Shape::Any)),
    Field::new("model", Rule::Model),
    Field::new("task", Rule::Pass(Shape::Any)),
    Field::new("truncate", Rule::Pass(Shape::Any)),
    Field::new("truncation", Rule::Pass(Shape::Any)),
];
