//! Objects that git itself would not make.

use super::{AnnouncementClaim, HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    (".git in a tree", |case| commit_entry(case, "100644", b".git")),
    (".GIT in a tree", |case| commit_entry(case, "100644", b".GIT")),
    ("git~1 in a tree", |case| commit_entry(case, "100644", b"git~1")),
    (".git with a hidden letter", |case| commit_entry(case, "100644", ".g\u{200c}it".as_bytes())),
    (".. in a tree", |case| commit_entry(case, "100644", b"..")),
    ("a path in a tree", |case| commit_entry(case, "100644", b"../../outside")),
    ("an unknown mode", |case| commit_entry(case, "100600", b"odd")),
    ("a name of 256 bytes", |case| commit_entry(case, "100644", &[b'a'; 256])),
    ("a name of 255 bytes", |case| commit_entry(case, "100644", &[b'a'; 255])),
    ("a name of 256 bytes, and away again", |case| {
        commit_entry(case, "100644", &[b'a'; 256])?;
        commit_entry(case, "100644", b"short")
    }),
    ("a path of 3,000 bytes", |case| commit_deep(case, &[b'f'; 200])),
    ("a path of 3,001 bytes", |case| commit_deep(case, &[b'f'; 201])),
    ("link to nothing", |case| commit_link_object(case, "")),
    ("link to nothing before a NUL", |case| commit_link_object(case, "\0x")),
    ("link to a target of 4,096 bytes", |case| commit_link_object(case, &"x".repeat(4096))),
    ("link as .gitmodules", |case| commit_entry(case, "120000", b".gitmodules")),
    ("submodule", |case| {
        let tree = case.agent().tree(&[("160000", b"sub", &"1".repeat(40))]);
        case.agent().commit_tree(&tree, "A submodule");
        case.extract()
    }),
    ("two entries of one name", |case| {
        let blob = case.agent().object("blob", "x");
        let tree = case.agent().tree(&[("100644", b"a", &blob), ("100755", b"a", &blob)]);
        case.agent().commit_tree(&tree, "Twice");
        case.extract()
    }),
    ("entries out of order", |case| {
        let blob = case.agent().object("blob", "x");
        let tree = case.agent().tree(&[("100644", b"b", &blob), ("100644", b"a", &blob)]);
        case.agent().commit_tree(&tree, "Mixed");
        case.extract()
    }),
    ("author with <", |case| make_commit(case, "A <B <a@example.com> 1 +0000", "Odd\n")),
    ("author on two lines", |case| {
        make_commit(case, "A\nparent 1 <a@example.com> 1 +0000", "Odd\n")
    }),
    ("author without an address", |case| make_commit(case, "A 1 +0000", "Odd\n")),
    ("author of another time", |case| {
        make_commit(case, "A <a@example.com> 99999999999999999999 +0000", "Odd\n")
    }),
    ("author with a NUL", |case| make_commit(case, "A\0B <a@example.com> 1 +0000", "Odd\n")),
    ("message with a NUL", |case| make_commit(case, "A <a@example.com> 1 +0000", "Odd\0more\n")),
    ("signed commit", |case| {
        make_commit(
            case,
            "A <a@example.com> 1767323045 +0000\ncommitter A <a@example.com> 1767323045 +0000\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----",
            "Signed\n",
        )
    }),
    ("tree of ten thousand million files", |case| {
        let mut object = case.agent().object("blob", "boom");
        let mut mode = "100644";
        for _ in 0..10 {
            let names: Vec<_> = (b'a'..=b'j').map(|letter| [letter]).collect();
            let entries: Vec<_> =
                names.iter().map(|name| (mode, name.as_slice(), object.as_str())).collect();
            object = case.agent().tree(&entries);
            mode = "40000";
        }
        case.agent().commit_tree(&object, "Boom");
        // Patches would take their whole time limit and fail.
        case.place.extract_without_patches(&case.run)
    }),
    ("tip is a tag", |case| {
        let tip = honest_tree(case);
        let tag =
            format!("object {tip}\ntype commit\ntag t\ntagger A <a@example.com> 1 +0000\n\nx\n");
        let tag = case.agent().object("tag", tag);
        let path = case.agent().path.join(".git/refs/heads/sandbox/case");
        std::fs::write(path, format!("{tag}\n")).unwrap();
        case.extract()
    }),
];

fn honest_tree(case: &HostileCase) -> String {
    case.agent().write("honest.txt", "work\n");
    case.agent().commit("Work")
}

/// A commit of a tree with one invalid entry.
fn commit_entry(case: &HostileCase, mode: &str, name: &[u8]) -> AnnouncementClaim {
    let blob = case.agent().object("blob", "evil\n");
    let tree = case.agent().tree(&[(mode, name, &blob)]);
    case.agent().commit_tree(&tree, "A tree");
    case.extract()
}

/// A commit of one file below directories whose names take 2,800 bytes.
fn commit_deep(case: &HostileCase, name: &[u8]) -> AnnouncementClaim {
    let blob = case.agent().object("blob", "deep\n");
    let mut tree = case.agent().tree(&[("100644", name, &blob)]);
    for _ in 0..14 {
        tree = case.agent().tree(&[("40000", &[b'd'; 199], &tree)]);
    }
    case.agent().commit_tree(&tree, "Deep");
    case.extract()
}

/// A commit of a link that no file system can hold.
fn commit_link_object(case: &HostileCase, target: &str) -> AnnouncementClaim {
    let blob = case.agent().object("blob", target);
    let tree = case.agent().tree(&[("120000", b"way", &blob)]);
    case.agent().commit_tree(&tree, "A link");
    case.extract()
}

/// A commit with this author line and message.
fn make_commit(case: &HostileCase, author: &str, message: &str) -> AnnouncementClaim {
    let tree = case.agent().git(["rev-parse", "HEAD^{tree}"]);
    let start = case.run.state.start;
    let committer =
        if author.contains("\ncommitter ") { "" } else { "\ncommitter A <a@example.com> 1 +0000" };
    let content = format!("tree {tree}\nparent {start}\nauthor {author}{committer}\n\n{message}");
    let commit = case.agent().object("commit", content);
    let path = case.agent().path.join(".git/refs/heads/sandbox/case");
    std::fs::write(path, format!("{commit}\n")).unwrap();
    case.extract()
}
