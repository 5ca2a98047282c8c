//! The messages on git's standard error, as a reason for people.

/// Returns git's messages with the reason of a failure first, and without hints. A long text may be cut where it is
/// shown, so warnings and the remote's messages come after the reason.
///
/// ```
/// use cogni_gateway::relay::git::summarize_stderr;
/// let stderr = "hint: Support for grafts is deprecated\nhint:\nwarning: odd\nfatal: unable to read 1f0c\nhint: again";
/// assert_eq!(summarize_stderr(stderr), "fatal: unable to read 1f0c\nwarning: odd");
/// ```
pub fn summarize_stderr(stderr: &str) -> String {
    let is_reason = |line: &&str| line.starts_with("fatal:") || line.starts_with("error:");
    let (reasons, others): (Vec<_>, Vec<_>) = without_hints(stderr).partition(is_reason);
    let lines = reasons.into_iter().chain(others);
    lines.filter(|line| !line.trim().is_empty()).collect::<Vec<_>>().join("\n")
}

/// Returns the lines without git's hints. Hints tell a person at a terminal what to type next, and are so long that they
/// hide the reason, which stands before or after them.
pub(super) fn without_hints(stderr: &str) -> impl Iterator<Item = &str> {
    stderr.lines().filter(|line| !line.starts_with("hint:"))
}
