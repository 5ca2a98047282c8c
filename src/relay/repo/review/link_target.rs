//! Targets of symbolic links, as text: which of them leave the repository, and which no checkout can make.

use super::normalize::fold_case_and_invisible;

/// Returns true if a link at `path` with this target may lead out of the tree, or into git's own directory.
///
/// Steps up are counted from the link's directory, which is a real directory. A step up after a name counts as outside:
/// that name may be a link itself, in this commit or in another, so the step may begin anywhere.
pub(super) fn leads_outside(path: &[u8], target: &[u8]) -> bool {
    // Some programs cut a target at a NUL, so its text is not what all of them read.
    if target.contains(&0) {
        return true;
    }
    let target = fold_case_and_invisible(target);
    // Windows reads `c:/x` as a path of another drive, and `c:x` as one of that drive's present directory.
    let has_drive = matches!(target.as_bytes(), [b'a'..=b'z', b':', ..]);
    if has_drive || target.starts_with(PATH_SEPARATORS) {
        return true;
    }
    let (mut depth, mut is_named) = (memchr::memchr_iter(b'/', path).count(), false);
    for segment in target.split(PATH_SEPARATORS) {
        match segment {
            "" | "." => (),
            // A step up from the root of the repository, or behind a name, may lead anywhere.
            ".." if is_named || depth == 0 => return true,
            ".." => depth -= 1,
            // Systems that ignore the end of a name see another name here.
            _ if is_special_name(without_ignored_end(segment)) => return true,
            _ => is_named = true,
        }
    }
    false
}

/// Returns true if no system can make a link with this target: it is empty, or longer than any path.
pub(super) fn is_impossible_target(target: &[u8]) -> bool {
    // A target ends at its first NUL.
    let length = memchr::memchr(0, target).unwrap_or(target.len());
    length == 0 || target.len() >= INSPECTED_BYTES
}

/// Returns a name without what Windows ignores at its end: dots, blanks, and the name of a stream behind a colon.
fn without_ignored_end(segment: &str) -> &str {
    let name = segment.split(':').next().unwrap_or_default();
    name.trim_end_matches([' ', '.'])
}

/// Returns true if a name, without its ignored end, is one of git's directory, or is nothing but an ignored end, which
/// may be a step up.
fn is_special_name(name: &str) -> bool {
    // `git~1` is the short name of `.git` on file systems of Windows, where a number may be taken.
    let is_short_name = name.strip_prefix("git~").is_some_and(|number| number.len() == 1);
    name.is_empty() || name == ".git" || is_short_name
}

/// The separators of paths, with the one of other systems.
const PATH_SEPARATORS: [char; 2] = ['/', '\\'];

/// The bytes of a blob's beginning that are inspected. Linux makes no link with a target of this length.
pub(super) const INSPECTED_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::{INSPECTED_BYTES, is_impossible_target, leads_outside};

    /// L5: A target that any system takes for one outside is one, and other names are not.
    #[test]
    fn a_target_outside_is_recognised_as_any_system_reads_it() {
        let outside = [
            "/etc/passwd",
            "\\\\host\\x",
            "C:/Windows/x",
            "z:\\x",
            "c:x",
            "\u{200b}C:/x",
            "a/../../x",
            "..\\..\\x",
            ".. /x",
            ".../x",
            "..::$INDEX_ALLOCATION/x",
            "..\0x",
            ".GIT/hooks",
            ".git./hooks",
            ".git /hooks",
            ".git::$INDEX_ALLOCATION/hooks",
            "GIT~1/hooks",
            "git~2",
        ];
        for target in outside {
            assert!(leads_outside(b"docs/way", target.as_bytes()), "{target}");
        }
        for target in ["../README.md", "./x", "ab:c", "note: x", "cc:/x", "git~", ".gitignore"] {
            assert!(!leads_outside(b"docs/way", target.as_bytes()), "{target}");
        }
    }

    /// L5: A target that Linux refuses is impossible.
    #[test]
    fn a_target_that_no_system_takes_is_impossible() {
        let directory = tempfile::tempdir().expect("there is a place for it");
        for target in [String::new(), "x".repeat(INSPECTED_BYTES), "x".repeat(INSPECTED_BYTES - 1)]
        {
            let path = directory.path().join("link");
            let made = std::os::unix::fs::symlink(&target, path);
            assert_eq!(is_impossible_target(target.as_bytes()), made.is_err(), "{}", target.len());
        }
        assert!(is_impossible_target(b"\0x"));
    }
}
