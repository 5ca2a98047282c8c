//! Whatever JSON a client sends: admission never panics, a streamed chat request goes up with its
//! usage report asked for, and nothing else in it is changed.
#![cfg_attr(fuzzing, no_main)]

use bytes::Bytes;
use cogni_gateway::gateway::body::{Policy, admit};
use cogni_gateway::gateway::json::{Limits, Scanner};
use cogni_gateway::gateway::protocol::Route;
use cogni_gateway::gateway::rope::Rope;
use cogni_gateway::gateway::stream::UsageChunk;
use cogni_gateway_fuzz::fuzz_target;
use serde_json::{Value, json};

fuzz_target!(|data: &[u8]| {
    let [route, size, body @ ..] = data else { return };
    let route = Route::ALL[usize::from(*route) % Route::ALL.len()];
    let mut scanner = Scanner::new(Limits::default());
    let Ok(()) = scanner.feed(body) else { return };
    let Ok(document) = scanner.finish() else { return };
    let rope: Rope = body.chunks(16 * usize::from(*size) + 1).map(Bytes::copy_from_slice).collect();
    let Ok(call) = admit(route, &Policy::default(), rope, &document) else { return };

    let sent: Vec<u8> = call.rope.iter().flatten().copied().collect();
    assert_eq!(call.rope.len(), sent.len() as u64);
    // A number may be too large for `serde_json`; then the bytes are all there is to compare.
    let Ok(mut expected) = serde_json::from_slice::<Value>(body) else { return };
    if call.stream && matches!(route, Route::ChatCompletions | Route::Completions) {
        let options = &mut expected["stream_options"];
        let asked = options["include_usage"] == json!(true);
        options["include_usage"] = json!(true);
        assert_eq!(call.usage_chunk == UsageChunk::Show, asked);
    }
    assert_eq!(serde_json::from_slice::<Value>(&sent).expect("what goes up is JSON"), expected);
});
