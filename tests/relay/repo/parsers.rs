//! L3, L4: Tests of parsers of an agent's bytes: they accept or refuse any bytes without failing.

use std::collections::HashMap;

use cogni_gateway::relay::git::cat_file::{BatchPart, BatchReader};
use cogni_gateway::relay::repo::ObjectId;
use cogni_gateway::relay::repo::bundle::{BundleError, BundleHeader};
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;
use cogni_gateway::relay::repo::quarantine::commit::{MAX_PARENTS, ParsedCommit};
use cogni_gateway::relay::repo::quarantine::tree;
use cogni_gateway::relay::repo::review::diff::{self, MODE_EXECUTABLE, MODE_FILE, TreeEntry};
use proptest::prelude::*;

use crate::support::repository::TestRepository;

const NAME: &str = "0123456789abcdef0123456789abcdef01234567";
const WANTED: &str = "refs/heads/sandbox/k";

fn any_sha() -> ObjectId {
    NAME.parse().unwrap()
}

/// L4: A bundle has exactly the one requested ref.
#[test]
fn a_bundle_names_one_branch_and_its_prerequisites() {
    let text = format!("# v2 git bundle\n-{NAME} first line\n-{NAME}\n{NAME} {WANTED}\n\nPACK");
    let header = BundleHeader::parse(text.as_bytes(), WANTED).unwrap();
    let expected = BundleHeader {
        prerequisites: vec![any_sha(), any_sha()],
        tip: any_sha(),
        pack_at: text.len() as u64 - 4,
    };
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
        assert!(BundleHeader::parse(bad.as_bytes(), WANTED).is_err(), "{why}");
    }
    let other = format!("# v2 git bundle\n{NAME} refs/heads/main\n\n");
    assert_eq!(
        BundleHeader::parse(other.as_bytes(), WANTED),
        Err(BundleError::UnexpectedRefs(WANTED.to_owned()))
    );
}

/// L5: The parser reads a change with one parent, and a change of a merge.
#[test]
fn a_raw_diff_is_read_with_its_merges() {
    let text = format!(
        ":100644 100755 {NAME} {NAME} M\0a\nb\0::100644 100644 100644 {NAME} {NAME} {NAME} MM\0c\0"
    );
    let entry = |mode| TreeEntry { mode, name: any_sha() };
    let one = diff::PathChange {
        path: b"a\nb".to_vec(),
        before: vec![entry(MODE_FILE)],
        after: entry(MODE_EXECUTABLE),
    };
    let two = diff::PathChange {
        path: b"c".to_vec(),
        before: vec![entry(MODE_FILE); 2],
        after: entry(MODE_FILE),
    };
    assert_eq!(diff::parse_raw_diff(text.as_bytes()), Ok(vec![one, two]));
    for cut in 1..text.len() {
        let whole = text.as_bytes()[..cut].ends_with(b"a\nb\0");
        assert_eq!(diff::parse_raw_diff(&text.as_bytes()[..cut]).is_ok(), whole, "cut at {cut}");
    }
}

/// L3: A sandbox's announcement is parsed, or it is an error.
#[test]
fn an_announcement_is_read() {
    let line = format!("{NAME} {NAME} {NAME}\n");
    let announced = AnnouncedBranch::parse(line.repeat(3).as_bytes(), 0).unwrap().unwrap();
    assert_eq!((announced.commits, announced.merges, announced.head), (3, 0, None));
    let merge = format!("{NAME} {NAME} {NAME} {NAME}\n");
    assert_eq!(AnnouncedBranch::parse(merge.as_bytes(), 0).unwrap().unwrap().merges, 1);
    assert_eq!(AnnouncedBranch::parse(b"", 0), Ok(None));
    for (text, exit_code) in [(line.as_str(), 1), ("", 128), ("x\n", 0), (NAME, 0), ("\n", 0)] {
        assert!(AnnouncedBranch::parse(text.as_bytes(), exit_code).is_err(), "{text:?}");
    }
}

/// L4: A commit is accepted only in the form that git writes.
#[test]
fn a_commit_has_one_form() {
    let identity = "A <a@b> 1 +0000";
    let head = format!("tree {NAME}\nparent {NAME}\nauthor {identity}\ncommitter {identity}\n");
    let parsed = |text: &str| ParsedCommit::parse(ObjectId::NONE, text.as_bytes());
    let signed = "encoding utf8\ngpgsig a\n \n b\nmergetag c\n parent x\nmergetag d\n";
    for more in ["", signed, "gpgsig-sha256 a\n"] {
        let commit = parsed(&format!("{head}{more}\nOdd\n\ntree x\n")).unwrap();
        assert_eq!((commit.tree, commit.parents.as_slice()), (any_sha(), [any_sha()].as_slice()));
        assert_eq!((commit.encoding, commit.message), (None, b"Odd\n\ntree x\n".to_vec()));
    }
    let foreign = parsed(&format!("{head}encoding UTF-7\n\n")).unwrap();
    assert_eq!(foreign.encoding.as_deref(), Some(b"UTF-7".as_slice()));
    let anew =
        foreign.rewritten(&HashMap::new(), "Relay <relay@example.com>", "Sandbox-Run: run-1\n");
    let written = String::from_utf8(anew.clone()).unwrap();
    assert!(!written.contains("encoding"), "git reads what was judged: {written}");
    assert_eq!(
        ParsedCommit::parse(ObjectId::NONE, &anew).unwrap().message,
        b"Sandbox-Run: run-1\n"
    );
    let parents = |count: usize| {
        let parents: Vec<_> = (0..count).map(|at| format!("parent {at:040}\n")).collect();
        let parents = parents.concat();
        parsed(&format!("tree {NAME}\n{parents}author {identity}\ncommitter {identity}\n\n"))
    };
    assert_eq!(parents(MAX_PARENTS).unwrap().parents.len(), MAX_PARENTS);
    assert!(parents(MAX_PARENTS + 1).is_err());
    for header in ["tree", "parent", "author", "committer"] {
        let line = head.lines().find(|line| line.starts_with(header)).unwrap();
        assert!(parsed(&format!("{head}{line}\n\nOdd\n")).is_err(), "{header} behind the rest");
        assert!(parsed(&format!("{line}\n{head}\nOdd\n")).is_err(), "{header} before the rest");
        let twice = head.replace(line, &format!("{line}\n{line}"));
        assert!(parsed(&format!("{twice}\nOdd\n")).is_err(), "{header} twice");
        let none = head.replace(&format!("{line}\n"), "");
        assert_eq!(parsed(&format!("{none}\nOdd\n")).is_ok(), header == "parent", "no {header}");
    }
    for bad in [
        head.clone(),
        format!("{head}\nOdd\0\n"),
        format!("{head} more\n\nOdd\n"),
        format!("{head}change-id x\n\nOdd\n"),
        format!("{head}encoding x\nencoding x\n\nOdd\n"),
        format!("{head}encoding x\n y\n\nOdd\n"),
        format!("{head}gpgsig x\ngpgsig x\n\nOdd\n"),
        format!("{head}gpgsig\n\nOdd\n"),
        format!("{head}\nOdd\n").replace('\n', "\r\n"),
        format!("{head}\nOdd\n").replace("tree ", "tree\t"),
        format!("{head}\nOdd\n").replace("abcdef", "ABCDEF"),
        format!("{head}\nOdd\n").replace(" 1 ", " 01 "),
        format!("{head}\nOdd\n").replace("+0000", "+00000"),
    ] {
        assert!(parsed(&bad).is_err(), "{bad:?}");
    }
}

/// The lines of a commit as git may write it, with its message.
fn any_commit() -> impl Strategy<Value = Vec<String>> {
    let identity = "A B <a@b.example> 1767323045 +0000";
    let optional = |line: &str| prop_oneof![Just(None), Just(Some(line.to_owned()))];
    let lines = (
        optional(&format!("parent {NAME}\n")),
        optional(&format!("parent {}\n", "1".repeat(40))),
        optional("encoding UTF-7\n"),
        optional("gpgsig -----BEGIN\n \n x\n"),
        optional(&format!("mergetag object {NAME}\n type commit\n \n parent x\n")),
    );
    lines.prop_map(move |(one, two, encoding, signature, tag)| {
        let [author, committer] =
            ["author", "committer"].map(|it| Some(format!("{it} {identity}\n")));
        // Git allows one object id for one kind of object only.
        let tree = Some(format!("tree {}\n", "2".repeat(40)));
        let message = Some("\nOdd\n\nparent of all\n".to_owned());
        let all = [tree, one, two, author, committer, encoding, tag, signature, message];
        all.into_iter().flatten().collect()
    })
}

/// A change that an attacker makes to lines or to bytes.
#[derive(Clone, Debug)]
enum ParserChange {
    Repeat(usize, usize),
    Swap(usize, usize),
    Remove(usize),
    Put(usize, &'static [u8]),
    Replace(usize, u8),
}

fn any_changes() -> impl Strategy<Value = Vec<ParserChange>> {
    let at = || 0..10_000_usize;
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b"\n\r\t\0 <>0aA7".to_vec())];
    let pieces: Vec<&'static [u8]> = vec![
        b"\n",
        b"\r",
        b"\t",
        b" ",
        b"\0",
        b"\n\n",
        b"0",
        b"tree ",
        b"parent ",
        b"\nparent ",
        b"\n ",
        b"encoding x\n",
        b"<",
        b"> ",
        b"+",
        b"3",
        b"\xff",
    ];
    let change = prop_oneof![
        (at(), at()).prop_map(|(from, to)| ParserChange::Repeat(from, to)),
        (at(), at()).prop_map(|(one, two)| ParserChange::Swap(one, two)),
        at().prop_map(ParserChange::Remove),
        (at(), prop::sample::select(pieces)).prop_map(|(at, piece)| ParserChange::Put(at, piece)),
        (at(), byte).prop_map(|(at, byte)| ParserChange::Replace(at, byte)),
    ];
    prop::collection::vec(change, 0..4)
}

fn change_parts(mut parts: Vec<Vec<u8>>, changes: &[ParserChange]) -> Vec<u8> {
    for change in changes {
        let count = parts.len().max(1);
        match *change {
            ParserChange::Repeat(from, to) if !parts.is_empty() => {
                let part = parts[from % count].clone();
                parts.insert(to % (count + 1), part);
            }
            ParserChange::Swap(one, two) if !parts.is_empty() => {
                parts.swap(one % count, two % count);
            }
            ParserChange::Remove(at) if !parts.is_empty() => drop(parts.remove(at % count)),
            _ => (),
        }
    }
    let mut bytes = parts.concat();
    for change in changes {
        match *change {
            ParserChange::Put(at, piece) => {
                let at = at % (bytes.len() + 1);
                bytes.splice(at..at, piece.iter().copied());
            }
            ParserChange::Replace(at, byte) if !bytes.is_empty() => {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            _ => (),
        }
    }
    bytes
}

/// Returns git's reading of an object, or `None` if git finds the object malformed.
fn store_object(repository: &TestRepository, kind: &str, content: &[u8]) -> Option<String> {
    let words = ["hash-object", "-w", "--stdin", "-t", kind];
    let output = repository.try_git(words, content);
    let name = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| name.trim_end().to_owned())
}

fn scratch_repository() -> (tempfile::TempDir, TestRepository) {
    let directory = tempfile::tempdir().unwrap();
    let repository = TestRepository::bare(&directory.path().join("oracle.git"));
    (directory, repository)
}

fn parse_batch(pieces: &[&[u8]]) -> (bool, Vec<(String, Vec<u8>)>) {
    let (mut reader, mut objects) = (BatchReader::default(), vec![]);
    let mut is_sound = true;
    for piece in pieces {
        is_sound &= is_sound
            && reader
                .push(piece, |part| match part {
                    BatchPart::Head(object) => objects.push((object.kind.clone(), vec![])),
                    BatchPart::Content(piece) => {
                        objects.last_mut().unwrap().1.extend_from_slice(piece);
                    }
                    BatchPart::End => (),
                })
                .is_ok();
    }
    (is_sound, objects)
}

/// Parts of a bundle's header.
fn any_line() -> impl Strategy<Value = String> {
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
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// L4: If a commit is accepted, git considers it well-formed and reads the same tree, parents and author. Every
    /// commit that git writes is accepted.
    #[test]
    fn git_reads_the_same_commit(lines in any_commit(), changes in any_changes()) {
        let parts = lines.into_iter().map(String::into_bytes).collect();
        let content = change_parts(parts, &changes);
        let parsed = ParsedCommit::parse(ObjectId::NONE, &content);
        prop_assert!(parsed.is_ok() || !changes.is_empty(), "{parsed:?}");
        if let Ok(commit) = parsed {
            let (_directory, git) = scratch_repository();
            let name = store_object(&git, "commit", &content);
            prop_assert!(name.is_some(), "git does not accept it: {:?}", content.escape_ascii().to_string());
            std::fs::write(git.path.join("refs/heads/it"), name.unwrap() + "\n").unwrap();
            let format = "--format=%(tree) %(parent)%0a%(authorname) %(authoremail)%0a";
            let said = git.try_git(["for-each-ref", format], b"").stdout;
            let parents: Vec<_> = commit.parents.iter().map(ToString::to_string).collect();
            let head = format!("{} {}\n", commit.tree, parents.join(" "));
            prop_assert!(said.starts_with(head.as_bytes()), "{}", said.escape_ascii());
            let squeezed = |text: &[u8]| text.iter().copied().filter(u8::is_ascii_graphic).collect::<Vec<_>>();
            let author = said[head.len()..].split(|byte| *byte == b'\n').next().unwrap_or_default();
            prop_assert_eq!(squeezed(author), squeezed(commit.author_and_date().0));
        }
    }

    /// L4: If a tree is accepted by the parser and by git, git writes the same bytes from what it reads.
    #[test]
    fn git_writes_the_same_tree(kinds in prop::collection::vec(0..7_usize, 1..4), changes in any_changes()) {
        let entries = ["100644", "100755", "120000", "160000", "40000", "300644", "040000"];
        let name = hex_bytes(NAME);
        let entry = |(at, kind): (usize, &usize)| {
            [format!("{} {}\0", entries[*kind], at).as_bytes(), &name].concat()
        };
        let content = change_parts(kinds.iter().enumerate().map(entry).collect(), &changes);
        let is_plain = changes.is_empty() && kinds.iter().all(|kind| *kind < 5);
        prop_assert_eq!(is_plain, is_plain && tree::check_tree(&content).is_ok());
        if tree::check_tree(&content).is_ok() {
            let (_directory, git) = scratch_repository();
            // Git before 2.40 stores trees that its own check refuses.
            let is_refused = || {
                let said = git.try_git(["fsck", "--strict"], b"").stderr;
                String::from_utf8_lossy(&said).contains("error in tree")
            };
            if let Some(name) = store_object(&git, "tree", &content) && !is_refused() {
                let listed = git.try_git(["ls-tree", "-z", &name], b"");
                let made = git.try_git(["mktree", "-z", "--missing"], &listed.stdout);
                let made = String::from_utf8(made.stdout).unwrap();
                prop_assert_eq!(made.trim_end(), name);
            }
        }
    }
}

fn hex_bytes(name: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&name[at..at + 2], 16).unwrap();
    (0..name.len()).step_by(2).map(digit).collect()
}

proptest! {
    /// L4: Any header is accepted or refused with an error; an accepted one ends in an empty line.
    #[test]
    fn any_head_is_read_or_refused(lines in prop::collection::vec(any_line(), 0..8)) {
        let text = lines.concat();
        if let Ok(header) = BundleHeader::parse(text.as_bytes(), WANTED) {
            let at = usize::try_from(header.pack_at).unwrap();
            prop_assert!(text[..at].ends_with("\n\n"));
        }
    }

    /// L5: Any bytes are accepted by the diff parser or refused with an error.
    #[test]
    fn any_diff_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = diff::parse_raw_diff(&bytes);
        let mut framed = format!(":100644 100644 {NAME} {NAME} M\0").into_bytes();
        let path: Vec<_> = bytes.into_iter().filter(|byte| *byte != 0).collect();
        framed.extend(&path);
        framed.push(0);
        prop_assert_eq!(diff::parse_raw_diff(&framed).is_ok(), !path.is_empty());
    }

    /// L5: The same objects are read, however the bytes are split.
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
        let (is_sound, objects) = parse_batch(&[&stream[..cut], &stream[cut..]]);
        prop_assert!(is_sound);
        let expected: Vec<_> = contents.into_iter().map(|it| ("blob".to_owned(), it)).collect();
        prop_assert_eq!(objects, expected);
    }
}
