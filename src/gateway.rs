//! The LLM data plane: one request in, one exchange recorded, one response out.

pub mod protocol;
