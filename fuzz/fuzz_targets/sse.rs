//! Whatever bytes a provider sends, and however they are cut: the same reading, nothing changed in
//! pass-through, and nothing added by the filter.
#![cfg_attr(fuzzing, no_main)]

use bytes::Bytes;
use cogni_gateway::gateway::protocol::Route;
use cogni_gateway::gateway::stream::{Format, Observer, UsageChunk};
use cogni_gateway_fuzz::fuzz_target;

// Three bytes choose the route and where to cut, again and again; the rest is the response.
fuzz_target!(|data: &[u8]| {
    let [route, one, other, response @ ..] = data else { return };
    let route = Route::ALL[usize::from(*route) % Route::ALL.len()];
    for format in [Format::Sse, Format::Json] {
        for usage_chunk in [UsageChunk::Show, UsageChunk::Hide] {
            let read =
                |pieces| self::read(Observer::new(route, format, usage_chunk), response, pieces);
            let (passed, told) = read([usize::MAX; 2]);
            assert_eq!(read([1; 2]), (passed.clone(), told.clone()), "byte by byte");
            assert_eq!(read([one, other].map(|n| usize::from(*n) + 1)), (passed.clone(), told));
            if usage_chunk == UsageChunk::Show {
                assert_eq!(passed, response);
            }
            assert!(is_subsequence(&passed, response));
        }
    }
});

/// What passes, and what is told, of a response in pieces of two sizes by turns.
fn read(mut observer: Observer, response: &[u8], pieces: [usize; 2]) -> (Vec<u8>, String) {
    let (mut passed, mut rest) = (vec![], Bytes::copy_from_slice(response));
    for piece in pieces.into_iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let frame = rest.split_to(piece.min(rest.len()));
        passed.extend(observer.frame(frame).expect("no input is as long as the bound"));
    }
    passed.extend(observer.end().unwrap_or_default());
    let told = (observer.usage(), observer.usage_so_far(), observer.cost(), observer.finish());
    (passed, format!("{told:?}"))
}

fn is_subsequence(part: &[u8], whole: &[u8]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|byte| whole.any(|other| other == byte))
}
