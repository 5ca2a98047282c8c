//! tmp
use super::{json::Document, protocol::Route, rope::Rope, stream::UsageChunk};
use crate::budget::Tokens;
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
pub struct Policy {
    pub models: Vec<String>,
}
pub struct Call {
    pub rope: Rope,
    pub model: Option<Box<str>>,
    pub stream: bool,
    pub usage_chunk: UsageChunk,
    pub requested_output: Option<Tokens>,
    pub input_estimate: Tokens,
}
impl Default for Call {
    fn default() -> Self {
        Self {
            rope: Rope::default(),
            model: None,
            stream: false,
            usage_chunk: UsageChunk::Show,
            requested_output: None,
            input_estimate: Tokens(0),
        }
    }
}
#[derive(Debug, thiserror::Error)]
#[error("x")]
pub struct Refusal;
impl Refusal {
    pub fn code(&self) -> &'static str {
        "x"
    }
    pub fn status(&self) -> http::StatusCode {
        http::StatusCode::BAD_REQUEST
    }
}
pub fn admit(_: Route, _: &Policy, rope: Rope, d: Document) -> Result<Call, Refusal> {
    let model = d.get("model").map(|_| "m".into());
    Ok(Call { rope, model, ..Call::default() })
}
