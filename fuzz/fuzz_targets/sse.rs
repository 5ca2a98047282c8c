//! Any bytes of a provider are read the same, however they are split: pass-through changes nothing, the
//! filter adds nothing, and a cut stream has a valid end.
#![cfg_attr(fuzzing, no_main)]

use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::response::{
    CallAllowance, CutoffMode, ResponseFormat, ResponseObserver, StreamEnd, UsageChunkMode,
};
use cogni_gateway_fuzz::fuzz_target;

// Three bytes select the route and the split positions, repeatedly; the rest is the response.
fuzz_target!(|data: &[u8]| {
    let [route, one, other, response @ ..] = data else { return };
    let route = GatewayRoute::ALL[usize::from(*route) % GatewayRoute::ALL.len()];
    for format in [ResponseFormat::Sse, ResponseFormat::Json] {
        for usage_chunk in [UsageChunkMode::Show, UsageChunkMode::Hide] {
            let read = |pieces| {
                self::read_response(
                    ResponseObserver::new(route, format, usage_chunk),
                    response,
                    pieces,
                )
            };
            let (passed, told) = read([usize::MAX; 2]);
            assert_eq!(read([1; 2]), (passed.clone(), told.clone()), "byte by byte");
            assert_eq!(read([one, other].map(|n| usize::from(*n) + 1)), (passed.clone(), told));
            if usage_chunk == UsageChunkMode::Show {
                assert_eq!(passed, response);
            }
            assert!(is_subsequence(&passed, response));
        }
    }
    check_limited(route, u64::from(*one), response);
});

/// A cut stream has ended in a way that its protocol defines.
fn check_limited(route: GatewayRoute, granted: u64, response: &[u8]) {
    let cutoff = if granted.is_multiple_of(2) { CutoffMode::Graceful } else { CutoffMode::Error };
    let allowance = CallAllowance { input: Tokens(1), output: Tokens(granted / 16), cutoff };
    for usage_chunk in [UsageChunkMode::Show, UsageChunkMode::Hide] {
        let observer = || ResponseObserver::new(route, ResponseFormat::Sse, usage_chunk);
        let whole = read_response(observer().with_allowance(allowance), response, [usize::MAX; 2]);
        assert_eq!(
            read_response(observer().with_allowance(allowance), response, [1; 2]),
            whole,
            "byte by byte"
        );
        let unlimited = read_response(observer(), response, [usize::MAX; 2]);
        if whole.0 != unlimited.0 {
            let mut client =
                ResponseObserver::new(route, ResponseFormat::Sse, UsageChunkMode::Show);
            client.read_frame(Bytes::from(whole.0)).expect("no input is as long as the bound");
            assert_ne!(client.stream_end(), StreamEnd::Unfinished, "cut, and not ended");
        }
    }
}

/// Returns what passes and what is reported for a response in pieces of two alternating sizes.
fn read_response(
    mut observer: ResponseObserver,
    response: &[u8],
    pieces: [usize; 2],
) -> (Vec<u8>, String) {
    let (mut passed, mut rest) = (vec![], Bytes::copy_from_slice(response));
    for piece in pieces.into_iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let frame = rest.split_to(piece.min(rest.len()));
        passed.extend(observer.read_frame(frame).expect("no input is as long as the bound"));
    }
    passed.extend(observer.end_of_body().unwrap_or_default());
    let told = (
        observer.reported_usage(),
        observer.partial_usage(),
        observer.reported_cost(),
        observer.stream_end(),
    );
    (passed, format!("{told:?}"))
}

fn is_subsequence(part: &[u8], whole: &[u8]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|byte| whole.any(|other| other == byte))
}
