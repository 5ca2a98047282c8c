//! L3: Tests of the encoded list of commands, and of the frames that report the commands' output.

use std::ffi::OsString;

use cogni_gateway::guest::init::command_frames::{
    CommandEnd, FrameFormatError, FramePart, FrameReader, MAX_OUTPUT_FRAME_BYTES, MAX_SAID_BYTES,
    encode_end, encode_output,
};
use cogni_gateway::guest::init::command_list::{ListedCommand, decode_commands, encode_commands};
use proptest::collection::vec;
use proptest::prelude::*;

/// The output of one command, and its end if there is one.
type FrameOutput = (Vec<u8>, Option<CommandEnd>);

proptest! {
    /// L3: An encoded list decodes to the same commands, whatever their texts are.
    #[test]
    fn a_list_of_commands_is_what_was_encoded(commands in vec(any_command(), 1..5), cut in any::<usize>()) {
        let encoded = encode_commands(&commands);
        prop_assert_eq!(decode_arguments(&encoded), Ok(commands.clone()));
        // A list that is cut decodes to its first commands, or not at all.
        let part = &encoded[..cut % encoded.len()];
        if let Ok(decoded) = decode_arguments(part) {
            prop_assert_eq!(encode_commands(&decoded), part);
            prop_assert!(commands.starts_with(&decoded));
        }
    }

    /// L3: Frames have the same meaning in one piece, split at any byte, and byte by byte.
    #[test]
    fn frames_mean_the_same_wherever_they_are_split(told in vec(any_output(), 0..4)) {
        let bytes = encode_outputs(&told);
        prop_assert_eq!(read_outputs(&[&bytes]), Ok(told.clone()));
        for at in 0..=bytes.len() {
            let (first, second) = bytes.split_at(at);
            prop_assert_eq!(&read_outputs(&[first, second]), &Ok(told.clone()), "split at {}", at);
            // The first part has the output that it contains, and no end that comes later.
            let cut = read_outputs(&[first]).unwrap();
            let is_shorter = |(cut, whole): (&FrameOutput, &FrameOutput)| {
                whole.0.starts_with(&cut.0) && (cut.1.is_none() || cut == whole)
            };
            prop_assert!(cut.len() <= told.len() && cut.iter().zip(&told).all(is_shorter), "cut at {}", at);
        }
        let single: Vec<_> = bytes.chunks(1).collect();
        prop_assert_eq!(read_outputs(&single), Ok(told));
    }

    /// L3: The reader takes any bytes, and finds the same in them wherever they are split.
    #[test]
    fn any_bytes_are_read_the_same_wherever_they_are_split(bytes in vec(prop_oneof![Just(0), Just(b'O'), Just(b'E'), Just(2), any::<u8>()], 0..200)) {
        let whole = read_outputs(&[&bytes]);
        prop_assert_eq!(&read_outputs(&bytes.chunks(1).collect::<Vec<_>>()), &whole);
        let told = |(output, end): &FrameOutput| output.len() + end.as_ref().map_or(0, |end| end.said.len());
        prop_assert!(whole.iter().flatten().map(told).sum::<usize>() <= bytes.len());
    }
}

/// L3: The reader refuses an unknown kind and an impossible length before the content arrives.
#[test]
fn a_frame_has_a_kind_and_a_length_that_is_possible() {
    let head = |kind: u8, length: usize| {
        [&[kind][..], &u32::try_from(length).unwrap().to_be_bytes()].concat()
    };
    for (kind, length, is_possible) in [
        (b'O', 0, false),
        (b'O', 1, true),
        (b'O', MAX_OUTPUT_FRAME_BYTES, true),
        (b'O', MAX_OUTPUT_FRAME_BYTES + 1, false),
        (b'O', u32::MAX as usize, false),
        (b'E', 1, false),
        (b'E', 2, true),
        (b'E', 2 + MAX_SAID_BYTES, true),
        (b'E', 3 + MAX_SAID_BYTES, false),
        (0, 1, false),
        (b'o', 1, false),
    ] {
        assert_eq!(read_outputs(&[&head(kind, length)]).is_ok(), is_possible, "{kind} {length}");
    }
    for (content, is_possible) in [([0, 0], true), ([255, 1], true), ([0, 2], false)] {
        let frame = [&head(b'E', 2)[..], &content].concat();
        assert_eq!(read_outputs(&[&frame]).is_ok(), is_possible, "{content:?}");
    }
}

/// L3: The standard error of a command is cut to the length that a frame allows.
#[test]
fn an_end_that_is_too_long_is_cut() {
    let end = CommandEnd { status: 1, is_over_limit: false, said: vec![b'x'; MAX_SAID_BYTES + 1] };
    let results = read_outputs(&[&encode_end(&end)]).unwrap();
    assert_eq!(results[0].1.as_ref().map(|end| end.said.len()), Some(MAX_SAID_BYTES));
}

/// L3: A list without a program, or with an invalid count, is refused.
#[test]
fn an_invalid_list_is_refused() {
    for words in [
        &[][..],
        &["1"],
        &["1", "0"],
        &["1", "0", "0"],
        &["1", "0", "1"],
        &["1", "0", "1", ""],
        &["1", "1", "A=B", "0"],
        &["-1", "0", "1", "true"],
        &["1", "0", "2", "true"],
        &["1", "18446744073709551615", "1", "true"],
        &["1", "0", "1", "true", "true"],
        &["a", "0", "1", "true"],
    ] {
        let words: Vec<_> = words.iter().map(ToString::to_string).collect();
        assert!(decode_arguments(&words).is_err(), "{words:?}");
    }
}

fn decode_arguments(arguments: &[String]) -> Result<Vec<ListedCommand>, String> {
    decode_commands(arguments.iter().map(OsString::from))
}

fn any_command() -> impl Strategy<Value = ListedCommand> {
    // Texts that look like counts, too.
    let text = || prop_oneof!["[0-9]{1,2}", "[^\0]{1,8}"];
    (any::<u64>(), vec(text(), 0..4), vec(text(), 1..4))
        .prop_map(|(max_output_bytes, env, argv)| ListedCommand { max_output_bytes, env, argv })
}

fn any_output() -> impl Strategy<Value = FrameOutput> {
    let output = vec(prop_oneof![Just(b'O'), Just(b'E'), Just(0), any::<u8>()], 0..40);
    (output, any::<u8>(), any::<bool>(), vec(any::<u8>(), 0..20)).prop_map(
        |(output, status, is_over_limit, stderr)| {
            (output, Some(CommandEnd { status, is_over_limit, said: stderr }))
        },
    )
}

/// Encodes outputs and ends as a first process does.
fn encode_outputs(results: &[FrameOutput]) -> Vec<u8> {
    let frames = results.iter().flat_map(|(output, end)| {
        output.chunks(7).map(encode_output).chain(end.iter().map(encode_end))
    });
    frames.flatten().collect()
}

fn read_outputs(pieces: &[&[u8]]) -> Result<Vec<FrameOutput>, FrameFormatError> {
    let (mut reader, mut results) = (FrameReader::default(), vec![(vec![], None)]);
    for piece in pieces {
        reader.push(piece, |part| {
            let last: &mut FrameOutput = results.last_mut().unwrap();
            match part {
                FramePart::Output(piece) => last.0.extend_from_slice(piece),
                FramePart::End(end) => {
                    last.1 = Some(end);
                    results.push((vec![], None));
                }
            }
        })?;
    }
    if results.last() == Some(&(vec![], None)) {
        results.pop();
    }
    Ok(results)
}
