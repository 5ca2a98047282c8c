//! Which paths a rule is about.

use serde::{Deserialize, Serialize};

/// A path with holes: `*` is anything within a segment, `**` is any number of whole segments.
///
/// Case is ignored: on a file system that ignores it, `.GitHub` is `.github`.
///
/// ```
/// use cogni_gateway::relay::judge::Pattern;
/// let matches = |pattern: &str, path: &str| Pattern::new(pattern).matches(path.as_bytes());
/// assert!(matches(".github/**", ".GitHub/workflows/ci.yml"));
/// assert!(matches("**/CODEOWNERS", "CODEOWNERS") && matches("**/CODEOWNERS", "docs/CODEOWNERS"));
/// assert!(matches(".*/**", ".vscode/tasks.json") && !matches(".*/**", "src/.x/y"));
/// assert!(matches("**/*.lock", "a/b/poetry.lock") && !matches("*.lock", "a/poetry.lock"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Pattern {
    text: String,
}

impl Pattern {
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned() }
    }

    pub fn matches(&self, path: &[u8]) -> bool {
        let (pattern, path) = (self.text.to_ascii_lowercase(), path.to_ascii_lowercase());
        let pattern: Vec<_> = pattern.split('/').collect();
        let path: Vec<_> = path.split(|byte| *byte == b'/').collect();
        match_all(&pattern, &path)
    }
}

/// Patterns are the operator's, and short: each `**` may well try every place.
fn match_all(pattern: &[&str], path: &[&[u8]]) -> bool {
    match pattern.split_first() {
        None => path.is_empty(),
        Some((&"**", rest)) => (0..=path.len()).any(|skipped| match_all(rest, &path[skipped..])),
        Some((first, rest)) => path.split_first().is_some_and(|(segment, others)| {
            match_one(first.as_bytes(), segment) && match_all(rest, others)
        }),
    }
}

/// The last `*` takes what is left over; going back to an earlier one finds nothing more.
fn match_one(pattern: &[u8], segment: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = segment.strip_prefix(first) else { return false };
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = memchr::memmem::find(rest, part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}
