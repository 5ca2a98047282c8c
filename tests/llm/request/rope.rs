//! Tests of the rope: it holds the same bytes as a plain buffer and shares the memory of the frames.

use std::io::IoSlice;
use std::ops::Range;

use bytes::{Buf, Bytes};
use cogni_gateway::base::rope::{ByteRope, SplicedBytes};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{concat_rope, slice_range, split_frames};

proptest! {
    #[test]
    fn splicing_equals_replacing_bytes((body, size, edits) in any_spliced_body()) {
        let mut expected = body.clone();
        for (range, bytes) in edits.iter().rev() {
            expected.splice(slice_range(range), bytes.iter().copied());
        }
        for size in [size, body.len().max(1)] {
            let spliced = SplicedBytes::new(split_frames(&body, size), edits.clone());
            prop_assert_eq!(spliced.len(), expected.len() as u64);
            let mut copied = b"head".to_vec();
            spliced.append_to(&mut copied);
            prop_assert_eq!(&copied[4..], &expected[..]);
        }
        let rope = split_frames(&body, size);
        let rope = rope.apply_edits(edits);
        prop_assert_eq!(rope.len(), expected.len() as u64);
        prop_assert_eq!(concat_rope(&rope), expected);
        prop_assert!(rope.iter().all(|piece| !piece.is_empty()));
    }

    /// G5: Splicing a large body copies none of its payload.
    #[test]
    fn splicing_copies_nothing((body, size, edits) in any_spliced_body()) {
        let rope = split_frames(&body, size);
        let memory: Vec<_> = rope.iter().map(|frame| frame.as_ptr_range()).collect();
        let given: Vec<_> = edits.iter().map(|(_, bytes)| bytes.as_ptr_range()).collect();
        let spliced = rope.apply_edits(edits);
        for piece in spliced.iter().map(|piece| piece.as_ptr_range()) {
            let is_within = |owner: &Range<*const u8>| owner.start <= piece.start && piece.end <= owner.end;
            prop_assert!(memory.iter().chain(&given).any(is_within));
        }
    }

    #[test]
    fn a_slice_equals_a_plain_slice(
        (body, size) in (vec(any::<u8>(), 0..5000), 1..3000usize),
        (from, to) in (0..6000u64, 0..6000u64),
    ) {
        let range = from.min(to)..from.max(to);
        let within = |offset: u64| offset.min(body.len() as u64);
        let expected = &body[slice_range(&(within(range.start)..within(range.end)))];
        prop_assert_eq!(split_frames(&body, size).copy_range(range), expected);
    }

    #[test]
    fn reading_it_as_a_buffer_gives_the_same_bytes(
        (body, size) in (vec(any::<u8>(), 0..5000), 1..3000usize),
        steps in vec(0..4000usize, 0..10),
    ) {
        let mut rope = split_frames(&body, size);
        let mut at = 0;
        for step in steps {
            let mut slices = [IoSlice::new(&[]); 4];
            let filled = rope.chunks_vectored(&mut slices);
            let seen: Vec<u8> = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect();
            prop_assert!(body[at..].starts_with(&seen));
            prop_assert_eq!(seen.is_empty(), at == body.len());
            let step = step.min(rope.remaining());
            rope.advance(step);
            at += step;
            prop_assert_eq!(concat_rope(&rope), &body[at..]);
        }
    }
}

/// G14: A body that arrives byte by byte is not held as one piece per byte.
#[test]
fn small_frames_are_joined_and_others_left_alone() {
    let body = vec![b'x'; 100_000];
    let drip = split_frames(&body, 1);
    assert!(drip.iter().count() <= 1 + 2 * 100_000 / 1024, "{drip:?}");
    assert_eq!(concat_rope(&drip), body);

    let usual: Vec<_> = [8192, 8192, 100].map(|len| Bytes::from(vec![b'x'; len])).into();
    let rope: ByteRope = usual.iter().cloned().collect();
    assert!(rope.iter().map(|piece| piece.as_ptr()).eq(usual.iter().map(|frame| frame.as_ptr())));
}

#[test]
fn its_debug_output_holds_no_prompt() {
    insta::assert_snapshot!(format!("{:?}", split_frames(b"a secret", 3)), @"Rope { len: 8, pieces: 1 }");
}

#[test]
#[should_panic(expected = "edits are in order")]
fn edits_that_overlap_are_a_bug() {
    let _ =
        split_frames(b"0123456789", 4).apply_edits([(2..5, Bytes::new()), (4..6, Bytes::new())]);
}

#[test]
#[should_panic(expected = "the rope is 10 bytes long, not 11")]
fn an_edit_past_the_end_is_a_bug() {
    let _ = split_frames(b"0123456789", 4).apply_edits([(11..11, Bytes::new())]);
}

/// A body, the size of its frames, and its edits in order.
type SplicedBody = (Vec<u8>, usize, Vec<(Range<u64>, Bytes)>);

fn any_spliced_body() -> impl Strategy<Value = SplicedBody> {
    let edit = (0..1500u64, 0..1500u64, vec(any::<u8>(), 0..40));
    (vec(any::<u8>(), 0..6000), 1..3000usize, vec(edit, 0..6)).prop_map(|(body, size, steps)| {
        let mut end = 0;
        let mut edits = vec![];
        for (skip, len, bytes) in steps {
            let range = end + skip..end + skip + len;
            if range.end <= body.len() as u64 {
                end = range.end;
                edits.push((range, Bytes::from(bytes)));
            }
        }
        (body, size, edits)
    })
}
