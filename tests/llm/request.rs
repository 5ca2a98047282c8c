//! Tests of request bodies: the JSON scanner against a strict reference, the rope against a plain buffer, and the
//! admission of each protocol's fields.

mod admission;
mod apply_fields;
mod body_invariants;
mod capability_scanner;
mod generated_bodies;
mod json_scanner;
mod output_limit;
mod rope;
mod strict_json;

use std::ops::Range;

use bytes::Bytes;
use cogni_gateway::base::json::{JsonDocument, JsonError, JsonLimits, JsonScanner};
use cogni_gateway::base::rope::ByteRope;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::{
    BodyPolicy, BodyPolicyError, BodyReader, LlmCall, ScannedBody, admit_body,
};

/// Scans a body that arrives in these frames.
fn scan_frames<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<JsonDocument, JsonError> {
    let mut scanner = JsonScanner::new(JsonLimits::default());
    for frame in frames {
        scanner.feed_frame(frame)?;
    }
    scanner.finish_document()
}

/// Splits a body into frames of this size, each with memory of its own.
fn split_frames(body: &[u8], size: usize) -> ByteRope {
    body.chunks(size).map(Bytes::copy_from_slice).collect()
}

fn concat_rope(rope: &ByteRope) -> Vec<u8> {
    rope.iter().flatten().copied().collect()
}

/// Converts offsets to a range of a slice.
fn slice_range(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

/// The routes whose requests have a body.
const POSTS: [GatewayRoute; 6] = [
    GatewayRoute::ChatCompletions,
    GatewayRoute::Completions,
    GatewayRoute::Responses,
    GatewayRoute::Messages,
    GatewayRoute::CountTokens,
    GatewayRoute::Embeddings,
];

fn admitted_call(route: GatewayRoute, body: &str) -> LlmCall {
    admit_in(route, &BodyPolicy::default(), split_frames(body.as_bytes(), 4096)).unwrap()
}

fn admit_in(
    route: GatewayRoute,
    policy: &BodyPolicy,
    rope: ByteRope,
) -> Result<LlmCall, BodyPolicyError> {
    admit_body(policy, read_frames(route, rope.into_pieces()).unwrap())
}

/// Reads a body that arrives in these frames.
fn read_frames(
    route: GatewayRoute,
    frames: impl IntoIterator<Item = Bytes>,
) -> Result<ScannedBody, JsonError> {
    let mut reader = BodyReader::new(route);
    for frame in frames {
        reader.push(frame)?;
    }
    reader.finish_body()
}

/// Returns the body that is sent upstream, or the refusal.
fn send_body(
    route: GatewayRoute,
    policy: &BodyPolicy,
    body: &str,
) -> Result<String, BodyPolicyError> {
    let call = admit_in(route, policy, split_frames(body.as_bytes(), 4096))?;
    Ok(String::from_utf8(concat_rope(&call.into_body())).unwrap())
}
