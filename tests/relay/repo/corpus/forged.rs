//! Commits that some readers see with another tree or other parents than git does, and packs with more objects than git
//! lists.

use std::fs;

use cogni_gateway::relay::repo::RepoError;
use cogni_gateway::relay::repo::quarantine::QuarantineError;

use super::{AnnouncementClaim, HostileAttack, HostileCase};
use crate::support::repository::TestRepository;

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("second tree, lying bitmap", |case| {
        let evil = evil_tree(case);
        let below = forged_commit(case, &[], &format!("\ntree {evil}"));
        let tip = make_commit(case, &honest_tree(case), &[&below], "");
        write_forged_bitmap(case, &tip, &[&below, &orphan_commit(case, &evil)]);
        extract_tip(case, &tip)
    }),
    ("second parent, lying bitmap", |case| {
        let orphan = orphan_commit(case, &evil_tree(case));
        let tip = forged_commit(case, &[], &format!("\nparent {orphan}"));
        write_forged_bitmap(case, &tip, &[&case.run.state.start.to_string(), &orphan]);
        extract_tip(case, &tip)
    }),
    ("second tree, from a subdirectory", |case| {
        let evil = evil_tree(case);
        let blob = case.agent().object("blob", "x\n");
        let x = case.agent().tree(&[("40000", b"x", &evil), ("100644", b"y", &blob)]);
        let testdata = case.agent().tree(&[("40000", b"testdata", &x)]);
        let first = make_commit(case, &testdata, &[], "");
        let second = forged_commit(case, &[&first], &format!("\ntree {evil}"));
        let tip = make_commit(case, &honest_tree(case), &[&second], "");
        extract_tip(case, &tip)
    }),
    ("second author", |case| {
        let tip = forged_commit(case, &[], "\nauthor B <b@example.com> 1767323045 +0000");
        extract_tip(case, &tip)
    }),
    ("second encoding", |case| {
        let tip = forged_commit(case, &[], "\nencoding UTF-8\nencoding UTF-7");
        extract_tip(case, &tip)
    }),
    ("one parent twice", |case| {
        let start = case.run.state.start.to_string();
        let tip = make_commit(case, &honest_tree(case), &[&start, &start], "");
        extract_tip(case, &tip)
    }),
    ("headers of a merged tag", |case| {
        let tag = "\nmergetag object 1111111111111111111111111111111111111111\n type commit\n tree x\n tag t\n \n parent y";
        let tip = forged_commit(case, &[], tag);
        extract_tip(case, &tip)
    }),
    ("message in UTF-7", |case| {
        let start = case.run.state.start.to_string();
        let head = format!(
            "tree {}\nparent {start}\nauthor A <a@example.com> 1767323045 -0000\n",
            honest_tree(case)
        );
        let rest = "committer A <a@example.com> 1767323045 -0000\nencoding UTF-7\n\nOdd\n\n+AFM-andbox-Run: another\n";
        extract_tip(case, &case.agent().object("commit", head + rest))
    }),
    ("pack with more in it", |case| {
        let orphan = orphan_commit(case, &evil_tree(case));
        let tip = make_commit(case, &honest_tree(case), &[], "");
        pack_objects(case, &tip, &[&orphan])
    }),
    ("pack with a tag in it", |case| {
        let tip = make_commit(case, &honest_tree(case), &[], "");
        let tag = format!(
            "object {tip}\ntype commit\ntag t\ntagger A <a@example.com> 1767323045 +0000\n\nx\n"
        );
        let tag = case.agent().object("tag", tag);
        pack_objects(case, &tip, &[&tag])
    }),
    ("honest work, lying bitmap", |case| {
        let orphan = orphan_commit(case, &evil_tree(case));
        let tip = make_commit(case, &honest_tree(case), &[], "");
        write_forged_bitmap(case, &tip, &[&case.run.state.start.to_string(), &orphan]);
        extract_tip(case, &tip)
    }),
    ("mode of more than 16 bits", |case| {
        let blob = case.agent().object("blob", "x\n");
        let tree = case.agent().tree(&[("300644", b"a", &blob)]);
        extract_tip(case, &make_commit(case, &tree, &[], ""))
    }),
    ("empty directory", |case| {
        let empty = case.agent().object("tree", "");
        let tree = case.agent().tree(&[("40000", b"ghp_a1B2c3D4e5F6", &empty)]);
        extract_tip(case, &make_commit(case, &tree, &[], ""))
    }),
];

/// L4: A commit that another run has brought to the mirror is not accepted as a parent if git does not see it as one.
#[test]
fn a_parent_from_another_run_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let case = HostileCase::new(&TestRepository::seeded(&directory.path().join("seed.git")));
    let other = case.place.begin("other", "other");
    other.workspace.write("other.txt", "of another run\n");
    other.workspace.commit("Another run's");
    case.place.deliver(&other).unwrap();
    drop(other);
    case.place.begin("other", "again");
    let foreign = case.place.tip("sandbox/other");
    let announced = extract_tip(&case, &forged_commit(&case, &[], &format!("\nparent {foreign}")));
    let error = case.place.judge(&case.run, announced.unwrap().unwrap()).unwrap_err();
    assert!(
        matches!(error, RepoError::QuarantineRefused(QuarantineError::InvalidCommit(..))),
        "{error}"
    );
}

/// A tree that no policy accepts.
fn evil_tree(case: &HostileCase) -> String {
    let key = case.agent().object("blob", "-----BEGIN RSA PRIVATE KEY-----\n");
    let workflow = case.agent().object("blob", "on: push\n");
    let workflows = case.agent().tree(&[("100644", b"pwn.yml", &workflow)]);
    let github = case.agent().tree(&[("40000", b"workflows", &workflows)]);
    case.agent().tree(&[("40000", b".github", &github), ("100644", b"credentials", &key)])
}

fn honest_tree(case: &HostileCase) -> String {
    let blob = case.agent().object("blob", "honest\n");
    case.agent().tree(&[("100644", b"honest.txt", &blob)])
}

/// A commit without the repository's history.
fn orphan_commit(case: &HostileCase, tree: &str) -> String {
    case.agent().object("commit", format!("tree {tree}\n{WHO}\n\nI approve of this\n"))
}

/// A commit of an honest tree with more headers than git reads.
fn forged_commit(case: &HostileCase, parents: &[&str], more: &str) -> String {
    make_commit(case, &honest_tree(case), parents, more)
}

/// A commit with this tree and these parents, or with the run's base as its parent, and more text after its committer.
fn make_commit(case: &HostileCase, tree: &str, parents: &[&str], more: &str) -> String {
    let start = case.run.state.start.to_string();
    let parents = if parents.is_empty() { &[start.as_str()] } else { parents };
    let parents: Vec<_> = parents.iter().map(|parent| format!("parent {parent}\n")).collect();
    let parents = parents.concat();
    case.agent().object("commit", format!("tree {tree}\n{parents}{WHO}{more}\n\nWork\n"))
}

/// A pack whose bitmap claims these parents for the commit. Git itself wrote the pack, with replaced parents.
fn write_forged_bitmap(case: &HostileCase, tip: &str, parents: &[&str]) {
    case.agent().git(["update-ref", "refs/heads/sandbox/case", tip]);
    let grafts = case.agent().path.join(".git/info/grafts");
    fs::create_dir_all(grafts.parent().unwrap()).unwrap();
    fs::write(&grafts, format!("{tip} {}\n", parents.join(" "))).unwrap();
    case.agent().git(["repack", "-adbq"]);
    fs::remove_file(grafts).unwrap();
    let mut packs = fs::read_dir(case.agent().path.join(".git/objects/pack")).unwrap();
    assert!(packs.any(|file| file.unwrap().path().extension().is_some_and(|it| it == "bitmap")));
}

fn extract_tip(case: &HostileCase, tip: &str) -> AnnouncementClaim {
    fs::write(case.agent().path.join(".git/refs/heads/sandbox/case"), format!("{tip}\n")).unwrap();
    case.extract()
}

/// A bundle with more objects than are reachable from the tip.
fn pack_objects(case: &HostileCase, tip: &str, more: &[&str]) -> AnnouncementClaim {
    let announced = extract_tip(case, tip);
    let start = case.run.state.start.to_string();
    let list =
        case.agent().git(["rev-list", "--objects", "--no-object-names", tip, &format!("^{start}")]);
    let all = more.iter().map(|name| format!("{name}\n")).collect::<Vec<_>>().concat();
    let more = case.agent().git_with(
        ["rev-list", "--objects", "--no-object-names", "--stdin", &format!("^{start}")],
        all.as_bytes(),
    );
    let names = format!("{list}\n{more}\n{all}");
    let words = ["pack-objects", "--stdout", "-q"];
    let pack = case.agent().try_git(words, names.as_bytes());
    assert!(pack.status.success(), "{pack:?}");
    let head = format!("# v2 git bundle\n-{start}\n{tip} refs/heads/sandbox/case\n\n");
    fs::write(case.run.artifacts.bundle_path(), [head.into_bytes(), pack.stdout].concat()).unwrap();
    announced
}

const WHO: &str =
    "author A <a@example.com> 1767323045 +0000\ncommitter A <a@example.com> 1767323045 +0000";
