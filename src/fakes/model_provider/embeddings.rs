//! Embeddings: the same small vector for every input, as floats or as base64.

use serde_json::{Value, json};

use super::provider_request::ProviderRequest;
use super::script::{ProviderScript, UsageReporting};

/// Returns the answer to an embeddings request.
pub(super) fn embeddings_response(ask: &ProviderRequest<'_>, script: &ProviderScript) -> Value {
    let dimensions = ask.dimensions.unwrap_or(DEFAULT_DIMENSIONS).min(MAX_DIMENSIONS);
    let embedding = if ask.encoding_format.as_deref() == Some("base64") {
        json!(base64_encode(&COMPONENT_VALUE.to_le_bytes().repeat(dimensions)))
    } else {
        json!(vec![COMPONENT_VALUE; dimensions])
    };
    let data: Vec<Value> = (0..input_count(ask))
        .map(|index| json!({ "object": "embedding", "index": index, "embedding": embedding }))
        .collect();
    let mut body = json!({ "object": "list", "data": data, "model": ask.model });
    // Embeddings have no output, so that the total is the input.
    if script.usage != UsageReporting::None {
        body["usage"] = json!({ "prompt_tokens": script.input, "total_tokens": script.input });
    }
    body
}

/// Returns the number of inputs. A text or a list of tokens is one input; a list of texts or of token lists has one
/// input for each item.
fn input_count(ask: &ProviderRequest<'_>) -> usize {
    let input = ask.input.and_then(|input| serde_json::from_str::<Value>(input.get()).ok());
    match input {
        Some(Value::Array(items)) if !items.iter().all(Value::is_number) => items.len(),
        _ => 1,
    }
}

/// Encodes bytes as base64 (RFC 4648, section 4).
fn base64_encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    // A group of three bytes is four digits of six bits; the missing bytes of the last group are padding.
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | u32::from(*group.get(i).unwrap_or(&0)));
        for place in 0..4 {
            let digit = (bits >> (18 - 6 * place)) as usize & 63;
            text.push(if place > group.len() { '=' } else { char::from(BASE64_ALPHABET[digit]) });
        }
    }
    text
}

const BASE64_ALPHABET: &[u8; 64] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// The value of every component. It is exact in binary, so that every encoding reads the same.
const COMPONENT_VALUE: f32 = 0.125;
const DEFAULT_DIMENSIONS: usize = 8;
/// The maximum number of dimensions of the real models.
const MAX_DIMENSIONS: usize = 4096;
