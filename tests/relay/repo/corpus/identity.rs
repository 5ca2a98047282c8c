//! Commits with false claims: about their author, their run, or their time.

use super::{AnnouncementClaim, HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("committer of the relay's name", |case| {
        commit_as(case, AUTHOR, "Relay <relay@example.com>", NOW)
    }),
    ("author of the relay's name", |case| commit_as(case, "RELAY <x@example.com>", AUTHOR, NOW)),
    ("author of the relay's address", |case| {
        commit_as(case, "A <Re\u{ad}lay@Example.com>", AUTHOR, NOW)
    }),
    ("author who looks like the relay", |case| {
        commit_as(case, "R\u{435}\u{2113}\u{430}y <x@example.com>", AUTHOR, NOW)
    }),
    ("author of an address like the relay's", |case| {
        commit_as(case, "A <relay\u{ff20}exampl\u{435}.com>", AUTHOR, NOW)
    }),
    ("author who is a bot of the relay's", |case| {
        commit_as(case, "relay [bot] <x@example.com>", AUTHOR, NOW)
    }),
    ("author in the other direction", |case| {
        commit_as(case, "\u{202e}yaleR\u{202c} <a@example.com>", AUTHOR, NOW)
    }),
    ("author of another script", |case| {
        commit_as(case, "\u{418}\u{432}\u{430}\u{43d} <a@example.com>", AUTHOR, NOW)
    }),
    ("author with control characters", |case| {
        commit_as(case, "A\r\u{1b}[2KRelay <a@example.com>", AUTHOR, NOW)
    }),
    ("committer that is a token", |case| {
        let token = format!("ghp_{} <a@example.com>", "a1B2c3D4e5F6".repeat(3));
        commit_as(case, AUTHOR, &token, NOW)
    }),
    ("header that is a token", |case| {
        let token = format!("{NOW}\nx-key ghp_{}", "a1B2c3D4e5F6".repeat(3));
        commit_as(case, AUTHOR, AUTHOR, &token)
    }),
    ("merge by the relay's committer", |case| {
        case.agent().git(["checkout", "-q", "-b", "side"]);
        case.agent().write("side.txt", "side\n");
        case.agent().commit("Side");
        case.agent().git(["checkout", "-q", "sandbox/case"]);
        let tree = case.agent().git(["rev-parse", "side^{tree}"]);
        let (own, side) = (case.run.state.start, case.agent().git(["rev-parse", "side"]));
        let headers =
            format!("author A <a@example.com> {NOW}\ncommitter Relay <relay@example.com> {NOW}");
        let content = format!("tree {tree}\nparent {own}\nparent {side}\n{headers}\n\nSide\n");
        move_to(case, content)
    }),
    ("trailer after a bare CR", |case| {
        commit_message(case, "Odd\n\nAll is well.\rSandbox-Run: another\n")
    }),
    ("trailer with a hidden letter", |case| {
        commit_message(case, "Odd\n\nSandbox\u{ad}-Run: another\n")
    }),
    ("trailer with another hyphen", |case| {
        commit_message(case, "Odd\n\nSandbox\u{2011}Agent: another\n")
    }),
    ("trailer in other letters", |case| {
        commit_message(case, "Odd\n\nS\u{430}ndb\u{43e}\u{445}-Run\u{2236} another\n")
    }),
    ("trailer with a long s", |case| commit_message(case, "Odd\n\n\u{17f}andbox-run : another\n")),
    ("time of 2100", |case| commit_as(case, AUTHOR, AUTHOR, "4102444800 +0000")),
    ("time of 1970", |case| commit_as(case, AUTHOR, AUTHOR, "1 +0000")),
    ("zone of no place", |case| commit_as(case, AUTHOR, AUTHOR, "1767323045 +9959")),
];

/// A commit with this author, committer and date.
fn commit_as(case: &HostileCase, author: &str, committer: &str, date: &str) -> AnnouncementClaim {
    let tree = case.agent().git(["rev-parse", "HEAD^{tree}"]);
    let start = case.run.state.start;
    // Text after a date becomes a header of its own.
    let (date, more) = date
        .split_once('\n')
        .map_or((date, String::new()), |(date, more)| (date, format!("\n{more}")));
    let content = format!(
        "tree {tree}\nparent {start}\nauthor {author} {date}\ncommitter {committer} {date}{more}\n\nOdd\n"
    );
    move_to(case, content)
}

/// Moves the branch to this commit.
fn move_to(case: &HostileCase, content: String) -> AnnouncementClaim {
    let commit = case.agent().object("commit", content);
    let path = case.agent().path.join(".git/refs/heads/sandbox/case");
    std::fs::write(path, format!("{commit}\n")).unwrap();
    case.extract()
}

fn commit_message(case: &HostileCase, message: &str) -> AnnouncementClaim {
    case.agent().write("honest.txt", "work\n");
    case.agent().git(["add", "-A"]);
    case.agent().git_with(["commit", "-q", "--cleanup=verbatim", "-F", "-"], message.as_bytes());
    case.extract()
}

const AUTHOR: &str = "An Agent <agent@example.com>";
const NOW: &str = "1767323045 +0000";
