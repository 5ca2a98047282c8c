//! Commits in shapes that patches or policies do not expect.

use super::{HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("nothing committed", |case| {
        case.agent().write("left.txt", "not committed\n");
        case.extract()
    }),
    ("empty commit", |case| {
        case.agent().commit("Nothing");
        case.extract()
    }),
    ("commits after an empty one", |case| {
        case.agent().commit("Nothing");
        commit_work(case, "honest.txt");
        case.extract()
    }),
    ("merge", |case| {
        make_side_branch(case, "side");
        commit_work(case, "own.txt");
        case.agent().git(["merge", "-q", "--no-edit", "side"]);
        case.extract()
    }),
    ("octopus", |case| {
        make_side_branch(case, "one");
        make_side_branch(case, "two");
        make_side_branch(case, "three");
        commit_work(case, "own.txt");
        case.agent().git(["merge", "-q", "--no-edit", "one", "two", "three"]);
        case.extract()
    }),
    ("merge with a workflow of its own", |case| {
        make_side_branch(case, "side");
        commit_work(case, "own.txt");
        case.agent().git(["merge", "-q", "--no-commit", "side"]);
        case.agent().write(".github/workflows/evil.yml", "on: push\n");
        case.agent().commit("A merge");
        case.agent().git(["rm", "-rq", ".github"]);
        case.agent().commit("Clean");
        case.extract()
    }),
    ("root commit", |case| {
        case.agent().git(["checkout", "-q", "--orphan", "other"]);
        commit_work(case, "own.txt");
        case.agent().git(["branch", "-f", "sandbox/case"]);
        case.extract()
    }),
    ("merge of another history", |case| {
        case.agent().git(["checkout", "-q", "--orphan", "other"]);
        case.agent().git(["rm", "-rfq", "."]);
        commit_work(case, "own.txt");
        case.agent().git(["checkout", "-q", "sandbox/case"]);
        case.agent().git(["merge", "-q", "--no-edit", "--allow-unrelated-histories", "other"]);
        case.extract()
    }),
    ("rewritten history", |case| {
        case.agent().write("own.txt", "own\n");
        case.agent().git(["add", "-A"]);
        case.agent().git(["commit", "-q", "--amend", "-m", "Begin anew"]);
        case.extract()
    }),
    ("11 commits of 10", |case| {
        for at in 0..11 {
            case.agent().git(["commit", "-q", "--allow-empty", "-m", &at.to_string()]);
        }
        case.extract()
    }),
    ("work on another branch", |case| {
        commit_work(case, "own.txt");
        case.agent().git(["checkout", "-q", "-b", "other"]);
        commit_work(case, "more.txt");
        case.extract()
    }),
    ("branch deleted", |case| {
        case.agent().git(["checkout", "-q", "--detach"]);
        case.agent().git(["branch", "-D", "-q", "sandbox/case"]);
        commit_work(case, "own.txt");
        case.extract()
    }),
    ("replaced objects", |case| {
        let honest = commit_work(case, "honest.txt");
        let evil = commit_work(case, ".github/workflows/evil.yml");
        case.agent().git(["reset", "-q", "--hard", &honest]);
        case.agent().git(["replace", "-f", &honest, &evil]);
        case.extract()
    }),
    ("replaced start", |case| {
        let start = case.run.state.start.to_string();
        case.agent().git(["checkout", "-q", "--orphan", "other"]);
        let other = commit_work(case, "own.txt");
        case.agent().git(["checkout", "-q", "-f", "sandbox/case"]);
        case.agent().git(["replace", "-f", &start, &other]);
        commit_work(case, "more.txt");
        case.extract()
    }),
    ("grafts", |case| {
        let tip = commit_work(case, "own.txt");
        case.agent().write(".git/info/grafts", format!("{tip}\n"));
        case.extract()
    }),
    ("shallow", |case| {
        commit_work(case, "own.txt");
        let tip = commit_work(case, "more.txt");
        case.agent().write(".git/shallow", format!("{tip}\n"));
        case.extract()
    }),
    ("alternates elsewhere", |case| {
        case.agent().write(".git/objects/info/alternates", "/nowhere/objects\n/etc\n");
        commit_work(case, "own.txt");
        case.extract()
    }),
    ("notes and tags", |case| {
        let tip = commit_work(case, "own.txt");
        case.agent().git(["notes", "add", "-m", "a note", &tip]);
        case.agent().git(["tag", "-a", "-m", "a tag", "v1"]);
        case.extract()
    }),
];

fn commit_work(case: &HostileCase, path: &str) -> String {
    case.agent().write(path, format!("{path}\n"));
    case.agent().commit(path)
}

/// A branch from the agent's position, with a file of its name.
fn make_side_branch(case: &HostileCase, name: &str) {
    case.agent().git(["checkout", "-q", "-b", name]);
    commit_work(case, &format!("{name}.txt"));
    case.agent().git(["checkout", "-q", "sandbox/case"]);
}
