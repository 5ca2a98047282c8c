//! Merges of a newer base that differ from what they claim. The branch belongs to an earlier run, and the base has
//! moved on since.

use std::path::Path;

use super::{AnnouncementClaim, HostileAttack, HostileCase};
use crate::support::repository::TestRepository;

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("base, merged", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "origin/main"]);
        case.extract()
    }),
    ("base, merged, and work", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "origin/main"]);
        case.agent().write("own.txt", "more\n");
        case.agent().commit("More");
        case.extract()
    }),
    ("base of before, merged", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "origin/main~1"]);
        case.extract()
    }),
    ("base, merged in two steps", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "origin/main~1"]);
        case.agent().git(["merge", "-q", "--no-edit", "origin/main"]);
        case.extract()
    }),
    ("base, merged from its side", |case| {
        // The first parent is the base; the tree is the same.
        case.agent().git(["checkout", "-q", "-B", "side", "origin/main"]);
        case.agent().git(["merge", "-q", "--no-edit", "sandbox/case"]);
        case.agent().git(["checkout", "-q", "-B", "sandbox/case"]);
        case.extract()
    }),
    ("base merged, and not taken", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "-s", "ours", "origin/main"]);
        case.extract()
    }),
    ("base merged, and a file of it lost", |case| {
        case.agent().git(["merge", "-q", "--no-commit", "origin/main"]);
        case.agent().git(["rm", "-q", "-f", ".github/workflows/guard.yml"]);
        case.agent().commit("Merge main");
        case.extract()
    }),
    ("base of before merged, not taken", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "-s", "ours", "origin/main~1"]);
        case.extract()
    }),
    ("base merged, taken back later", |case| {
        case.agent().git(["merge", "-q", "--no-edit", "origin/main"]);
        case.agent().git(["checkout", "-q", "HEAD~1", "--", ".github/workflows/ci.yml"]);
        case.agent().commit("Tidy");
        case.extract()
    }),
    ("base merged by two ways, one not taken", |case| {
        // Neither parent of the base is an ancestor of the other.
        case.agent().git(["merge", "-q", "--no-edit", "origin/main~1^1"]);
        case.agent().git(["merge", "-q", "--no-edit", "-s", "ours", "origin/main~1^2"]);
        case.extract()
    }),
    ("conflict, with more in it", |case| {
        merge_conflict(case, |case| {
            case.agent().write("docs/guide.md", "both\n");
            case.agent().write(".github/CODEOWNERS", "* @me\n");
        })
    }),
    ("conflict", |case| merge_conflict(case, |case| case.agent().write("docs/guide.md", "both\n"))),
];

/// A repository whose branch has an earlier run's work, and whose `main` has become stricter in several ways.
pub(super) fn moved_on(path: &Path) -> TestRepository {
    let remote = TestRepository::seeded(path);
    let work = TestRepository::with_files(&path.with_extension("work"));
    let url = path.to_str().unwrap();
    work.git(["pull", "-q", url, "main"]);
    work.write(".github/workflows/ci.yml", "on: push\npermissions: write-all\n");
    work.commit("A workflow");
    work.git(["checkout", "-q", "-b", "sandbox/case"]);
    work.write("own.txt", "own\n");
    work.commit("Earlier work");
    work.git(["checkout", "-q", "-b", "owners", "main"]);
    work.write(".github/CODEOWNERS", "* @keepers\n");
    work.commit("Owners");
    work.git(["checkout", "-q", "main"]);
    work.write(".github/workflows/ci.yml", "on: push\npermissions: {}\n");
    work.commit("A stricter workflow");
    work.git(["merge", "-q", "--no-edit", "owners"]);
    work.write(".github/workflows/guard.yml", "on: pull_request\n");
    work.commit("A guard");
    work.git(["push", "-q", url, "main", "sandbox/case"]);
    remote
}

/// A conflict between the branch and the base in one place, which the agent resolves in its own way.
fn merge_conflict(case: &HostileCase, resolve: fn(&HostileCase)) -> AnnouncementClaim {
    case.agent().write("docs/guide.md", "the agent's\n");
    case.agent().commit("Agent's guide");
    case.agent().git(["checkout", "-q", "-b", "side", "HEAD~1"]);
    case.agent().write("docs/guide.md", "another\n");
    case.agent().commit("Another guide");
    case.agent().git(["checkout", "-q", "sandbox/case"]);
    case.agent().git(["merge", "-q", "--no-edit", "origin/main"]);
    let merged = case.agent().try_git(["merge", "-q", "side"], b"");
    assert!(!merged.status.success(), "there is no conflict: {merged:?}");
    resolve(case);
    case.agent().commit("Merge");
    case.extract()
}
