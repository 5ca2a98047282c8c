//! Any bytes of a raw diff are read completely in any number of parts, or refused.
#![cfg_attr(fuzzing, no_main)]

use cogni_gateway::relay::git::cat_file::{BatchPart, BatchReader};
use cogni_gateway::relay::repo::review::diff;

cogni_gateway_fuzz::fuzz_target!(|data: &[u8]| {
    if let Ok(changes) = diff::parse_raw_diff(data) {
        let paths: usize = changes.iter().map(|change| change.path.len() + 1).sum();
        assert!(paths <= data.len());
        assert!(
            changes.iter().all(|change| !change.before.is_empty() && !change.path.contains(&0))
        );
        let twice =
            diff::parse_raw_diff(&[data, data].concat()).expect("changes follow each other");
        assert_eq!(twice.len(), 2 * changes.len());
    }
    // Reads the bytes as objects, in two pieces and in one.
    let read = |pieces: &[&[u8]]| {
        let (mut reader, mut parts) = (BatchReader::default(), 0);
        let take = |reader: &mut BatchReader, piece: &[u8], parts: &mut usize| {
            reader.push(piece, |part| {
                *parts += usize::from(!matches!(part, BatchPart::Content(_)));
            })
        };
        pieces.iter().all(|piece| take(&mut reader, piece, &mut parts).is_ok()).then_some(parts)
    };
    let (one, other) = data.split_at(data.len() / 2);
    assert_eq!(read(&[data]), read(&[one, other]));
});
