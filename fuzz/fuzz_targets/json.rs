//! The scanner accepts any bytes if and only if a strict reader does, with the same result however they are
//! split.
#![cfg_attr(fuzzing, no_main)]

#[path = "../../tests/llm/request/strict_json.rs"]
mod strict;

use cogni_gateway::base::json::{JsonDocument, JsonError, JsonLimits, JsonScanner};
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&at, body)) = data.split_first() else { return };
    let whole = scan_frames([body]);
    if let Some(accepted) = strict::accepts_body(body) {
        assert_eq!(whole.is_ok(), accepted, "{whole:?}");
    }
    assert_eq!(scan_frames(body.chunks(1)), whole);
    let (head, tail) = body.split_at(usize::from(at).min(body.len()));
    assert_eq!(scan_frames([head, tail]), whole);
});

fn scan_frames<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<JsonDocument, JsonError> {
    // The depth limit of `serde_json`.
    let mut scanner = JsonScanner::new(JsonLimits { depth: 127, members: u16::MAX });
    frames.into_iter().try_for_each(|frame| scanner.feed_frame(frame))?;
    scanner.finish_document()
}
