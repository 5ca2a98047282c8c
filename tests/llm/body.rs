//! Request bodies: the scanner against a strict reference, the rope against plain bytes, and what
//! admission makes of each protocol's fields.

mod admission;
mod capabilities;
mod fields;
mod generate;
mod limit;
mod rope;
mod scanner;
mod sound;
mod strict;

use std::ops::Range;

use bytes::Bytes;
use cogni_gateway::base::json::{Document, Invalid, Limits, Scanner};
use cogni_gateway::base::rope::Rope;
use cogni_gateway::body::{Body, Call, Policy, Reader, Refusal, admit};
use cogni_gateway::protocol::Route;

/// The outcome for a body that arrives in these frames.
fn scan<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<Document, Invalid> {
    let mut scanner = Scanner::new(Limits::default());
    for frame in frames {
        scanner.feed(frame)?;
    }
    scanner.finish()
}

/// A body in frames of this size, each with memory of its own.
fn frames(body: &[u8], size: usize) -> Rope {
    body.chunks(size).map(Bytes::copy_from_slice).collect()
}

fn concat(rope: &Rope) -> Vec<u8> {
    rope.iter().flatten().copied().collect()
}

/// Offsets as a slice takes them.
fn indices(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

/// The routes that take a body.
const POSTS: [Route; 6] = [
    Route::ChatCompletions,
    Route::Completions,
    Route::Responses,
    Route::Messages,
    Route::CountTokens,
    Route::Embeddings,
];

fn admitted(route: Route, body: &str) -> Call {
    admit_in(route, &Policy::default(), frames(body.as_bytes(), 4096)).unwrap()
}

fn admit_in(route: Route, policy: &Policy, rope: Rope) -> Result<Call, Refusal> {
    admit(policy, read(route, rope.into_pieces()).unwrap())
}

/// A body that arrives in these frames.
fn read(route: Route, frames: impl IntoIterator<Item = Bytes>) -> Result<Body, Invalid> {
    let mut reader = Reader::new(route);
    for frame in frames {
        reader.push(frame)?;
    }
    reader.finish()
}

/// What goes up, if anything does.
fn sent(route: Route, policy: &Policy, body: &str) -> Result<String, Refusal> {
    let call = admit_in(route, policy, frames(body.as_bytes(), 4096))?;
    Ok(String::from_utf8(concat(&call.into_body())).unwrap())
}
