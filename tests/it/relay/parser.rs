//! L3, L4: what reads an agent's bytes reads any bytes.

use cogni_gateway::git::batch::{Part, Reader};
use cogni_gateway::relay::Sha;
use cogni_gateway::relay::bundle::{Header, Invalid};
use cogni_gateway::relay::extract::Announced;
use cogni_gateway::relay::judge::diff::{self, Change, Entry, FILE, PROGRAM};
use proptest::prelude::*;

const NAME: &str = "0123456789abcdef0123456789abcdef01234567";
const WANTED: &str = "refs/heads/sandbox/k";

fn sha() -> Sha {
    NAME.parse().unwrap()
}

/// L4: exactly one ref, nothing but what was asked for.
#[test]
fn a_bundle_says_one_branch_and_what_it_builds_on() {
    let text = format!("# v2 git bundle\n-{NAME} first line\n-{NAME}\n{NAME} {WANTED}\n\nPACK");
    let header = Header::parse(text.as_bytes(), WANTED).unwrap();
    let expected =
        Header { prerequisites: vec![sha(), sha()], tip: sha(), pack_at: text.len() as u64 - 4 };
    assert_eq!(header, expected);
    for (bad, why) in [
        ("", "no bundle"),
        ("# v1 git bundle\n\n", "another version"),
        ("# v2 git bundle\n\nPACK", "no ref"),
        (&format!("# v2 git bundle\n{NAME} {WANTED}\n"), "no end"),
        (&format!("# v2 git bundle\n{NAME}\n\n"), "no name"),
        (&format!("# v2 git bundle\n{NAME}\t{WANTED}\n\n"), "no space"),
        (&format!("# v2 git bundle\n{NAME} {WANTED} \n\n"), "more than a name"),
        (&format!("# v2 git bundle\n{NAME} {WANTED}\n{NAME} {WANTED}\n\n"), "twice"),
        (&format!("# v2 git bundle\n{NAME} {WANTED}\n-{NAME}\n\n"), "prerequisite after ref"),
        (&format!("# v2 git bundle\n@object-format=sha1\n{NAME} {WANTED}\n\n"), "v2 capability"),
        (&format!("# v3 git bundle\n@object-format=sha256\n{NAME} {WANTED}\n\n"), "sha256"),
        (&format!("# v2 git bundle\n{} {WANTED}\n\n", NAME.to_uppercase()), "upper case"),
    ] {
        assert!(Header::parse(bad.as_bytes(), WANTED).is_err(), "{why}");
    }
    let other = format!("# v2 git bundle\n{NAME} refs/heads/main\n\n");
    assert_eq!(Header::parse(other.as_bytes(), WANTED), Err(Invalid::Refs(WANTED.to_owned())));
}

/// L5: a change of one parent, and one of a merge.
#[test]
fn a_raw_diff_is_read_with_its_merges() {
    let text = format!(
        ":100644 100755 {NAME} {NAME} M\0a\nb\0::100644 100644 100644 {NAME} {NAME} {NAME} MM\0c\0"
    );
    let entry = |mode| Entry { mode, name: sha() };
    let one = Change { path: b"a\nb".to_vec(), before: vec![entry(FILE)], after: entry(PROGRAM) };
    let two = Change { path: b"c".to_vec(), before: vec![entry(FILE); 2], after: entry(FILE) };
    assert_eq!(diff::parse(text.as_bytes()), Ok(vec![one, two]));
    for cut in 1..text.len() {
        let whole = text.as_bytes()[..cut].ends_with(b"a\nb\0");
        assert_eq!(diff::parse(&text.as_bytes()[..cut]).is_ok(), whole, "cut at {cut}");
    }
}

/// L3: what a sandbox announces is read, or is unclear.
#[test]
fn an_announcement_is_read() {
    let line = format!("{NAME} {NAME} {NAME}\n");
    let announced = Announced::parse(line.repeat(3).as_bytes(), 0).unwrap().unwrap();
    assert_eq!((announced.commits, announced.merges, announced.head), (3, 0, None));
    let merge = format!("{NAME} {NAME} {NAME} {NAME}\n");
    assert_eq!(Announced::parse(merge.as_bytes(), 0).unwrap().unwrap().merges, 1);
    assert_eq!(Announced::parse(b"", 0), Ok(None));
    for (text, exit_code) in [(line.as_str(), 1), ("", 128), ("x\n", 0), (NAME, 0), ("\n", 0)] {
        assert!(Announced::parse(text.as_bytes(), exit_code).is_err(), "{text:?}");
    }
}

fn batch(pieces: &[&[u8]]) -> (bool, Vec<(String, Vec<u8>)>) {
    let (mut reader, mut objects) = (Reader::default(), vec![]);
    let mut is_sound = true;
    for piece in pieces {
        is_sound &= is_sound
            && reader
                .push(piece, |part| match part {
                    Part::Head(object) => objects.push((object.kind.clone(), vec![])),
                    Part::Content(piece) => objects.last_mut().unwrap().1.extend_from_slice(piece),
                    Part::End => (),
                })
                .is_ok();
    }
    (is_sound, objects)
}

/// Pieces of a bundle's head.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("# v2 git bundle\n".to_owned()),
        Just("# v3 git bundle\n".to_owned()),
        Just(format!("-{NAME} text\n")),
        Just(format!("{NAME} {WANTED}\n")),
        Just("@object-format=sha1\n".to_owned()),
        Just("\n".to_owned()),
        "\\PC{0,50}\n?",
    ]
}

proptest! {
    /// L4: no head makes the reader fail in another way than by saying so; what it accepts ends in an empty line.
    #[test]
    fn any_head_is_read_or_refused(lines in prop::collection::vec(line(), 0..8)) {
        let text = lines.concat();
        if let Ok(header) = Header::parse(text.as_bytes(), WANTED) {
            let at = usize::try_from(header.pack_at).unwrap();
            prop_assert!(text[..at].ends_with("\n\n"));
        }
    }

    /// L5: no bytes make the reader of diffs fail in another way than by saying so.
    #[test]
    fn any_diff_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = diff::parse(&bytes);
        let mut framed = format!(":100644 100644 {NAME} {NAME} M\0").into_bytes();
        let path: Vec<_> = bytes.into_iter().filter(|byte| *byte != 0).collect();
        framed.extend(&path);
        framed.push(0);
        prop_assert_eq!(diff::parse(&framed).is_ok(), !path.is_empty());
    }

    /// L5: objects are the same, however they come.
    #[test]
    fn any_split_gives_the_same_objects(
        contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..4),
        at in any::<prop::sample::Index>(),
    ) {
        let mut stream = vec![];
        for content in &contents {
            stream.extend_from_slice(format!("{NAME} blob {}\n", content.len()).as_bytes());
            stream.extend_from_slice(content);
            stream.push(b'\n');
        }
        let cut = at.index(stream.len() + 1);
        let (is_sound, objects) = batch(&[&stream[..cut], &stream[cut..]]);
        prop_assert!(is_sound);
        let expected: Vec<_> = contents.into_iter().map(|it| ("blob".to_owned(), it)).collect();
        prop_assert_eq!(objects, expected);
    }
}
