//! A rule about requests: a method and a pattern of paths, such as `GET /repos/acme/**`.
//!
//! In a pattern, `*` stands for any characters within a segment, and a segment `**` for any number of segments, also for
//! none. An escaped slash is matched only by an escaped slash in the pattern.
//!
//! **Invariant:** a rule that allows compares the bytes that are sent. A rule that denies compares the decoded path
//! without regard to case and to a slash at the end, because many servers read paths like that.

use std::sync::Arc;

use percent_encoding::percent_decode_str;

use super::request_path::{RequestPath, has_escaped_slash};

/// A rule of a list.
#[derive(Clone, Debug)]
pub struct ConnectRule {
    /// The name in refusals and records, such as `allow[0]`.
    pub id: Arc<str>,
    /// `None` stands for every method.
    method: Option<String>,
    /// The pattern's segments, as they are written.
    raw: Vec<String>,
    /// The pattern's segments for a comparison of decoded paths, in which an escaped slash separates segments.
    folded: Vec<Vec<u8>>,
    /// The same, where an escaped slash is a character of its segment.
    folded_whole: Vec<Vec<u8>>,
}

impl ConnectRule {
    /// Parses a rule.
    ///
    /// # Errors
    /// Returns the mistake and a remedy.
    pub fn parse(id: &str, text: &str) -> Result<Self, String> {
        let form = "give a method or `*`, a space and a path, such as `GET /repos/acme/**`";
        let Some((method, path)) = text.split_once(' ') else {
            return Err(format!("`{}` is not a rule; {form}", text.escape_debug()));
        };
        if method != "*" && !is_served_method(method) {
            let known = METHODS.join("`, `");
            return Err(format!(
                "`{}` is not a method; give `*` or one of `{known}`",
                method.escape_debug()
            ));
        }
        let parsed = RequestPath::parse(path)
            .map_err(|problem| format!("the path `{}` {problem}; {form}", path.escape_debug()))?;
        if parsed.segments().any(|segment| segment.contains("**") && segment != "**") {
            return Err(format!(
                "`{path}` has `**` beside other characters; give it a segment of its own"
            ));
        }
        Ok(Self {
            id: id.into(),
            method: Some(method.to_owned()).filter(|method| method != "*"),
            raw: parsed.segments().map(str::to_owned).collect(),
            folded: fold_segments(parsed),
            folded_whole: fold_whole_segments(parsed),
        })
    }

    /// Returns true if the rule allows a request, by the bytes that are sent.
    pub fn allows(&self, method: &str, path: RequestPath<'_>) -> bool {
        let matches = |pattern: &String, segment: &&str| {
            pattern == "**" && !has_escaped_slash(segment)
                || has_escaped_slash(pattern) == has_escaped_slash(segment)
                    && match_segment(pattern.as_bytes(), segment.as_bytes())
        };
        let segments: Vec<_> = path.segments().collect();
        self.has_method(method) && match_sequence(&self.raw, &segments, |p| p == "**", matches)
    }

    /// Returns true if the rule denies a request, in any reading of its path.
    pub fn denies(&self, method: &str, path: RequestPath<'_>) -> bool {
        let matches = |pattern: &Vec<u8>, segment: &Vec<u8>| match_segment(pattern, segment);
        let is_denied = |pattern: &[Vec<u8>], segments: &[Vec<u8>]| {
            match_sequence(pattern, segments, |p| p == b"**", matches)
        };
        self.has_method(method)
            && (is_denied(&self.folded, &fold_segments(path))
                || is_denied(&self.folded_whole, &fold_whole_segments(path)))
    }

    fn has_method(&self, method: &str) -> bool {
        self.method.as_deref().is_none_or(|own| {
            // A server answers HEAD like GET, without the body: a rule about GET is about HEAD, too.
            own == method || (own == "GET" && method == "HEAD")
        })
    }
}

/// Returns true for a method that a rule can allow. `CONNECT` and `TRACE` are none.
pub(super) fn is_served_method(method: &str) -> bool {
    METHODS.contains(&method)
}

/// Returns the segments of a decoded path in small letters, without the empty one at its end.
fn fold_segments(path: RequestPath<'_>) -> Vec<Vec<u8>> {
    let decoded: Vec<u8> = percent_decode_str(path.as_str()).collect();
    let mut segments: Vec<_> = decoded
        .to_ascii_lowercase()
        .split(|byte| *byte == b'/')
        .skip(1)
        .map(<[u8]>::to_vec)
        .collect();
    segments.pop_if(|last| last.is_empty());
    segments
}

/// Returns the segments like [`fold_segments`], where an escaped slash does not end a segment.
fn fold_whole_segments(path: RequestPath<'_>) -> Vec<Vec<u8>> {
    let fold = |segment: &str| {
        percent_decode_str(segment).map(|byte| byte.to_ascii_lowercase()).collect::<Vec<_>>()
    };
    let mut segments: Vec<_> = path.segments().map(fold).collect();
    segments.pop_if(|last| last.is_empty());
    segments
}

/// Matches a sequence with a pattern in which some items stand for any number of items. If an item does not match, the
/// last such item takes one item more, so the work is at most the product of the lengths.
fn match_sequence<P, T>(
    pattern: &[P],
    items: &[T],
    is_any: impl Fn(&P) -> bool,
    matches: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut at, mut from) = (0, 0);
    // The place behind the last item for any number, and the first item that it does not take.
    let mut retry: Option<(usize, usize)> = None;
    while from < items.len() {
        if pattern.get(at).is_some_and(&is_any) {
            retry = Some((at + 1, from));
            at += 1;
        } else if pattern.get(at).is_some_and(|own| !is_any(own) && matches(own, &items[from])) {
            (at, from) = (at + 1, from + 1);
        } else if let Some((behind, taken)) =
            retry.filter(|(behind, taken)| matches(&pattern[*behind - 1], &items[*taken]))
        {
            (at, from) = (behind, taken + 1);
            retry = Some((behind, taken + 1));
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(is_any)
}

/// Matches one segment. `*` stands for any bytes; a segment of `*` alone needs at least one.
fn match_segment(pattern: &[u8], segment: &[u8]) -> bool {
    if pattern == b"**" {
        return true;
    }
    let is_empty_match = segment.is_empty() && !pattern.is_empty();
    !is_empty_match
        && match_sequence(pattern, segment, |byte| *byte == b'*', |p, s| *p == b'*' || p == s)
}

/// The methods of rules.
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
