//! The path patterns of rules.

use serde::{Deserialize, Serialize};

use super::normalize::fold_case_and_invisible;

/// A pattern for paths: `*` is any text within a segment, and `**` is any number of whole segments.
///
/// Case and invisible characters are ignored: on a file system that ignores case, `.GitHub` is `.github`.
///
/// ```
/// use cogni_gateway::relay::repo::review::PathPattern;
/// let matches = |pattern: &str, path: &str| PathPattern::new(pattern).matches(path.as_bytes());
/// assert!(matches(".github/**", ".GitHub/workflows/ci.yml"));
/// assert!(matches("**/CODEOWNERS", "CODEOWNERS") && matches("**/CODEOWNERS", "docs/CODEOWNERS"));
/// assert!(matches("package.json", "pac\u{212a}age.json") && matches("AGENTS.md", "AGENT\u{17f}.md"));
/// assert!(matches(".*/**", ".vscode/tasks.json") && !matches(".*/**", "src/.x/y"));
/// assert!(matches("**/*.lock", "a/b/poetry.lock") && !matches("*.lock", "a/poetry.lock"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "String", into = "String")]
pub struct PathPattern {
    text: String,
    segments: Vec<String>,
}

impl PathPattern {
    pub fn new(text: &str) -> Self {
        let segments =
            fold_case_and_invisible(text.as_bytes()).split('/').map(str::to_owned).collect();
        Self { text: text.to_owned(), segments }
    }

    pub fn matches(&self, path: &[u8]) -> bool {
        let path = fold_case_and_invisible(path);
        self.matches_segments(&path.split('/').collect::<Vec<_>>())
    }

    /// Returns true if the pattern matches a path that is already folded and split into segments.
    pub(super) fn matches_segments(&self, path: &[&str]) -> bool {
        match_segments(&self.segments, path)
    }
}

impl From<String> for PathPattern {
    fn from(text: String) -> Self {
        Self::new(&text)
    }
}

impl From<PathPattern> for String {
    fn from(pattern: PathPattern) -> Self {
        pattern.text
    }
}

/// Matches a pattern segment by segment. On a mismatch, the last `**` takes one segment more. An earlier `**` need not
/// be tried again: whatever it could take, the last one can take, too. So the work is bounded by the product of both
/// lengths.
fn match_segments(pattern: &[String], path: &[&str]) -> bool {
    let (mut pattern_at, mut path_at) = (0, 0);
    // The position behind the last `**`, and the first segment that was tried there.
    let mut again: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(pattern_at), path.get(path_at)) {
            (None, None) => return true,
            // First let `**` take no segment. The position is kept for a later, longer try.
            (Some(any), _) if any == "**" => {
                pattern_at += 1;
                again = Some((pattern_at, path_at));
            }
            (Some(expected), Some(segment))
                if match_segment(expected.as_bytes(), segment.as_bytes()) =>
            {
                pattern_at += 1;
                path_at += 1;
            }
            _ => match again.filter(|(_, tried)| *tried < path.len()) {
                Some((behind, tried)) => {
                    (pattern_at, path_at) = (behind, tried + 1);
                    again = Some((behind, tried + 1));
                }
                None => return false,
            },
        }
    }
}

/// Matches one segment. Each `*` takes as little as possible, and the last one the rest; no other split matches more.
fn match_segment(pattern: &[u8], segment: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = segment.strip_prefix(first) else { return false };
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    // The first occurrence leaves the most text for the parts behind it.
    for part in parts {
        let Some(at) = memchr::memmem::find(rest, part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}
