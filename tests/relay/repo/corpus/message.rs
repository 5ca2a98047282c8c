//! Commit messages that readers of patches may interpret.

use super::{AnnouncementClaim, HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("message with a diff", |case| commit_with_message(case, DIFF)),
    ("message with a From line", |case| {
        commit_with_message(
            case,
            &format!("Odd\n\nFrom {} Mon Sep 17 00:00:00 2001\nFrom: x\n", "1".repeat(40)),
        )
    }),
    ("message with another From line", |case| {
        commit_with_message(case, "Odd\n\nFrom here it goes on\n")
    }),
    ("message with ---", |case| commit_with_message(case, "Odd\n\nabove\n---\nbelow\n")),
    ("message with scissors", |case| {
        commit_with_message(case, "Odd\n\nabove\n-- >8 --\nSubject: below\n")
    }),
    ("message with a brackets", |case| commit_with_message(case, "[PATCH 1/2] [WIP] Odd\n")),
    ("message in another encoding", |case| {
        case.agent().git(["config", "i18n.commitEncoding", "ISO-8859-1"]);
        with_bytes(case, b"Gr\xfc\xdfe\n\nmit Zeichen\n")
    }),
    ("message that is no text", |case| with_bytes(case, b"\xff\xfe odd \x01\x1b[31m\n")),
    ("message with nothing", |case| commit_with_message(case, "")),
    ("message with a token", |case| {
        commit_with_message(case, &format!("Odd\n\nghp_{}\n", "a1B2c3D4e5F6".repeat(3)))
    }),
    ("message with our trailer", |case| commit_with_message(case, "Odd\n\nSandbox-Run: another\n")),
    ("message with trailers", |case| {
        commit_with_message(case, "Odd\n\nSigned-off-by: A <a@example.com>\n")
    }),
];

fn commit_with_message(case: &HostileCase, message: &str) -> AnnouncementClaim {
    with_bytes(case, message.as_bytes())
}

fn with_bytes(case: &HostileCase, message: &[u8]) -> AnnouncementClaim {
    case.agent().write("honest.txt", "work\n");
    case.agent().git(["add", "-A"]);
    let words = ["commit", "-q", "--cleanup=verbatim", "--allow-empty-message", "-F", "-"];
    case.agent().git_with(words, message);
    case.extract()
}

/// `git am` takes this text for the patch.
const DIFF: &str = "Harmless\n\n\
    diff --git a/.github/workflows/evil.yml b/.github/workflows/evil.yml\n\
    new file mode 100644\n\
    --- /dev/null\n\
    +++ b/.github/workflows/evil.yml\n\
    @@ -0,0 +1 @@\n\
    +on: push\n\n\
    The end.\n";
